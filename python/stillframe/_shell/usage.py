"""The usage of the command `stillframe`: its commands, their options, and completion for shells.

`_stillframe_command` imports this module without `stillframe/__init__.py`, which needs torch.
"""

from __future__ import annotations

import argparse

from stillframe._base import sizes, support


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="stillframe", description="Saves PyTorch training state without stopping training."
    )
    top.add_argument("--version", action="version", version=f"stillframe {support.VERSION}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, description, epilog, add_arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=description, epilog=epilog)
        add_arguments(command)
    return top


# ---- functions that add the arguments of each command --------------------------------------------


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    path_help = "a file, a directory of files, or a URL"
    parser.add_argument("paths", nargs="+", metavar="PATH", help=path_help)
    parser.add_argument("--json", action="store_true", help="print a list of objects, not lines")


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="a checkpoint, or its URL")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument(
        "--tree", action="store_true", help="as a tree, with the bytes of each branch"
    )
    layout.add_argument("--json", action="store_true", help="print an object, not a table")


def _add_latest_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a directory of checkpoints, or its URL")
    parser.add_argument(
        "--check",
        choices=("files", "bytes"),
        default="files",
        help="how: that all files are there with their lengths (the default), or every CRC too",
    )


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a directory on the disk to measure")
    parser.add_argument(
        "--size",
        type=sizes.argparse_size_type(),
        help="size of the state, such as 500MB (default: what the disk writes in a second, 33.6 to"
        " 537 MB)",
    )
    parser.add_argument("--json", action="store_true", help="print an object, not a table")


def _add_info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        default=".",
        metavar="DIR",
        help="where checkpoints go (default: the current directory)",
    )
    parser.add_argument("--json", action="store_true", help="print an object, not lines")


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="for which shell")


# command: (line in the list of commands, description, exit status, function that adds arguments)
_COMMANDS = {
    "verify": (
        "check that checkpoints are whole",
        "Checks the structure of checkpoints and the CRC of every record in them.",
        "Exit status: 0 all are whole; 1 damaged; 2 missing, unreadable or not a checkpoint.",
        _add_verify_arguments,
    ),
    "inspect": (
        "show what is in a checkpoint, without loading it",
        "Shows tensors with name, shape, type, device and bytes, and counts other values by type."
        " The file's pickle is only read: nothing in it is executed.",
        "Exit status: 0 shown; 1 damaged, shown as far as possible; 2 missing, unreadable or not a"
        " checkpoint.",
        _add_inspect_arguments,
    ),
    "latest": (
        "print the newest whole checkpoint in a directory",
        "Prints the path of the newest checkpoint that is whole. Those that are truncated,"
        " unfinished or damaged are passed over, and named on stderr with the reason.",
        "Exit status: 0 printed; 2 there is none, or DIR cannot be read.",
        _add_latest_arguments,
    ),
    "bench": (
        "measure a disk, and saves and loads on it",
        "Measures memcpy and raw writes and reads, then saves and loads in per cent of those, and"
        " gives advice. It takes half a minute. Its files go to a new directory in DIR and are"
        " removed.",
        "Exit status: 0 measured; 2 DIR cannot be measured, or bad usage.",
        _add_bench_arguments,
    ),
    "info": (
        "show versions, machine and disk, for a bug report",
        "Shows versions, machine, memory, disk, driver and pool, and the fallbacks of a save into"
        " DIR: a megabyte, which is removed again. Shows what is still to be uploaded from DIR to a"
        " mirror.",
        "Exit status: 0 shown; 2 a save into DIR fails; the reason is shown.",
        _add_info_arguments,
    ),
    "completion": (
        "print completion for a shell",
        'Prints completion for a shell. In ~/.bashrc: eval "$(stillframe completion bash)"; in'
        ' ~/.zshrc, after compinit: eval "$(stillframe completion zsh)".',
        None,
        _add_completion_arguments,
    ),
}


# ---- completion ------------------------------------------------------------------------------


def completion(top: argparse.ArgumentParser, shell: str) -> str:
    """Return a script that completes commands, options and files."""
    words_after, helps = _collect_completion_words(top)
    return (
        _bash_completion_script(words_after)
        if shell == "bash"
        else _zsh_completion_script(words_after, helps)
    )


def _collect_completion_words(
    top: argparse.ArgumentParser,
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return two dicts: the words that may follow each command, and each command's help. The key ""
    of the first dict has the words that may come before any command."""
    # argparse keeps all commands in one action of the parser.
    (commands,) = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    words_after = {name: _options(parser) for name, parser in commands.choices.items()}
    words_after["completion"] = ["bash", "zsh", *words_after["completion"]]
    words_after[""] = [*commands.choices, *_options(top)]
    return words_after, {each.dest: str(each.help) for each in commands._choices_actions}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command."""
    texts = [text for action in parser._actions for text in action.option_strings]
    return [text for text in texts if text.startswith("--")]


def _bash_completion_script(words_after: dict[str, list[str]]) -> str:
    """Return the script for bash. `words_after` has the words that may follow each command."""
    cases = ""  # of the `case` statement: one for each command
    for command, words in words_after.items():
        pattern, joined = command or "''", " ".join(words)
        cases += f'    {pattern}) words="{joined}" ;;\n'
    return f"""_stillframe() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command='' words='' each
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        [[ $each == -* ]] || {{ command=$each; break; }}
    done
    case $command in
{cases}    esac
    # Nothing found: readline offers files.
    COMPREPLY=()
    if [[ -z $command || $command == completion || $word == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    fi
}}
complete -o default -F _stillframe stillframe
"""


def _zsh_completion_script(words_after: dict[str, list[str]], helps: dict[str, str]) -> str:
    """Return the script for zsh. `words_after` has the words that may follow each command, `helps`
    has a line of help for each."""
    commands = "\n".join(f"        '{name}:{summary}'" for name, summary in helps.items())
    cases = ""  # of the `case` statement: one for each command
    for command, words in words_after.items():
        if command:  # the words that may come before any command are not needed here
            cases += f"        {command}) words_of=({' '.join(words)}) ;;\n"
    return f"""#compdef stillframe
_stillframe() {{
    local -a commands words_of
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        [[ $PREFIX == -* ]] && compadd -- {" ".join(w for w in words_after[""] if w[0] == "-")}
        return
    fi
    case $words[2] in
{cases}    esac
    if [[ $PREFIX == -* || $words[2] == completion ]]; then
        compadd -- $words_of
    else
        _files
    fi
}}
compdef _stillframe stillframe
"""
