"""The command as a whole: parts without torch, completion, all kinds of terminals, `info`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from datetime import datetime
from pathlib import Path

import pytest
import stillframe
import torch
import torch.distributed.checkpoint
from _stillframe_command import INTERRUPTED, NO_READER, UNUSABLE, main
from fix_processes import run_python
from stillframe._base import bar
from stillframe._remote import journal
from stillframe._shell import info, verify

COMMANDS = ["verify", "inspect", "latest", "bench", "info", "completion"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["verify", "--help"],
        ["completion", "bash"],
        [],
    ],
    ids=" ".join,
)
def test_help_and_version_import_no_torch(arguments):
    code = f"""if True:
        import sys
        from _stillframe_command import main
        try:
            main({arguments})
        except SystemExit:
            pass
        assert not {{"torch", "stillframe", "rich"}} & set(sys.modules), sorted(sys.modules)"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments", ["verify x.pt dcp", "inspect x.pt", "inspect --tree x.pt", "inspect --json old.pt"]
)
def test_verify_and_inspect_import_no_torch(arguments, tmp_path):
    state = {"w": torch.ones(3, dtype=torch.bfloat16), "p": torch.nn.Parameter(torch.ones(2))}
    stillframe.save(state, tmp_path / "x.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is only one process
        torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    code = f"""if True:
        import sys
        from _stillframe_command import main
        status = main({arguments.split()})
        assert "stillframe._shell.cli" in sys.modules
        assert not {{"torch", "numpy"}} & set(sys.modules), sorted(sys.modules)
        sys.exit(status)"""
    done = run_python("-c", code, cwd=tmp_path, imported=())
    assert (done.returncode, done.stderr) == (0, "")
    assert "bfloat16" in done.stdout or arguments.startswith("verify")


def test_module_without_front_imports_no_torch_and_not_the_package():
    code = """if True:
        import sys
        from _stillframe_command import import_module_without_init
        raw = import_module_without_init("_shell.bench_raw")
        assert raw.available_memory_bytes() > 0
        assert not {"torch", "stillframe", "stillframe._shell"} & set(sys.modules)
        import stillframe._shell.bench_raw
        assert stillframe.save and stillframe._shell.bench_raw is not raw
        assert import_module_without_init("_shell.bench_raw") is stillframe._shell.bench_raw"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_module_is_loaded_by_its_path():
    root = Path(__file__).parents[3]
    for path in [*root.glob("python/**/*.py"), *root.glob("benchmarks/*.py")]:
        text = path.read_text()
        assert "spec_from_file_location" not in text and "runpy" not in text, path


def test_command_prints_the_version_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"stillframe {stillframe.__version__}\n"


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["demo"])
    assert end.value.code == 2
    assert "invalid choice: 'demo'" in capsys.readouterr().err


# ---- completion --------------------------------------------------------------------------------


def completed(shell_words: list[str], script: str) -> list[str]:
    """Return bash's completions of the last word."""
    words = " ".join(f"'{word}'" for word in shell_words)
    code = f"""{script}
COMP_WORDS=({words}); COMP_CWORD={len(shell_words) - 1}
_stillframe; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_and_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(["stillframe", ""], script) == [*COMMANDS, "--help", "--version"]
    assert completed(["stillframe", "ver"], script) == ["verify"]
    assert completed(["stillframe", "verify", "--j"], script) == ["--json"]
    assert completed(["stillframe", "bench", "/tmp", "--s"], script) == ["--size"]
    assert completed(["stillframe", "completion", "z"], script) == ["zsh"]
    # files, which readline offers itself
    assert completed(["stillframe", "verify", "x"], script) == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_accepts_the_completion_script(capsys):
    assert main(["completion", "zsh"]) == 0
    code = "autoload -Uz compinit; compinit -u -D\n" + capsys.readouterr().out
    code += "\n(( $+functions[_stillframe] )) && print ${_comps[stillframe]}"
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "_stillframe\n"


def test_zsh_completion_has_every_command(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert f"        '{command}:" in script
        assert f"        {command}) words_of=(" in script


# ---- verify on a terminal ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 80])
def test_verify_lines_fit_the_terminal_and_break_no_part_of_a_path(width):
    parts = ["/data", "experiments", "run-2026-11-22", "checkpoints", "step=100.ckpt"]
    text = "/".join(parts) + ": damaged: 2 records (1.2 GB, 30 records)"
    lines = bar.folded(text, width)
    assert max(map(len, lines)) <= width
    assert "".join(line.strip() for line in lines).replace(" ", "") == text.replace(" ", "")
    for part in parts:
        assert any(part in line for line in lines), part
    assert bar.folded("short: ok", width) == ["short: ok"]


def test_part_of_a_path_wider_than_the_terminal_is_not_split():
    assert bar.folded("a/" + "b" * 50 + ": ok", 20) == ["a/", "    " + "b" * 50 + ":", "    ok"]


def test_each_file_has_its_line_when_it_is_done_and_a_total_comes_last(
    tmp_path, monkeypatch, capsys
):
    for name in ("a.pt", "b.pt"):
        stillframe.save([1, 2], tmp_path / name)
    seen: list[str] = []
    check = verify.verify_file

    def checked(path: str, *rest: object) -> verify.Finding:
        seen.append(capsys.readouterr().out)
        return check(path)

    monkeypatch.setattr(verify, "verify_file", checked)
    assert main(["verify", str(tmp_path), str(tmp_path / "c.pt")]) == 2
    assert seen[0] == ""
    assert seen[1].startswith(f"{tmp_path / 'a.pt'}: ok (")
    last = capsys.readouterr().out.splitlines()
    assert last[0] == f"{tmp_path / 'c.pt'}: there is no such file"
    assert last[1].startswith("3 paths, ") and last[1].endswith(": 2 ok, 1 not checked")


def test_an_ascii_terminal_gets_a_question_mark_and_no_traceback(tmp_path):
    path = tmp_path / "größe.pt"
    stillframe.save([1], path)
    done = run_python(
        "-m", "stillframe", "verify", path, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr??e.pt: ok" in done.stdout


@pytest.fixture(params=["completion bash", "verify x.pt", "inspect x.pt", "inspect x.pt --json"])
def arguments(request, tmp_path, monkeypatch) -> list[str]:
    stillframe.save({"a": [1]}, tmp_path / "x.pt")
    monkeypatch.chdir(tmp_path)
    words: str = request.param
    return words.split()


def test_closed_output_is_not_reported_as_damage(arguments, monkeypatch, capsys):
    end, begin = os.pipe()
    os.close(end)
    with open(begin, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(arguments) == NO_READER
    assert capsys.readouterr().err == ""


def test_output_that_cannot_be_written_is_an_error_in_a_line(arguments, monkeypatch, capsys):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(arguments) == UNUSABLE
    output = "stillframe: the output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == output


def test_exit_status_is_the_same_without_a_standard_output(arguments, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(arguments) == 0
    sys.stdout.close()


def test_ctrl_c_while_torch_is_imported_ends_quietly(monkeypatch):
    class Interrupts:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "stillframe._shell.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "stillframe._shell.cli")
    monkeypatch.delattr("stillframe._shell.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    assert main(["verify", "x.pt"]) == INTERRUPTED


# ---- info ----------------------------------------------------------------------------------------


def test_info_prints_everything_a_bug_report_needs(tmp_path, capsys):
    assert main(["info", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for name in ("stillframe", "torch", "python", "lightning", "machine", "pool", "driver"):
        assert f"\n{name}: " in f"\n{output}"
    assert f"directory: {tmp_path}" in output
    assert "a save there: " in output
    assert list(tmp_path.iterdir()) == []


def test_info_as_json_has_the_same_values(tmp_path, capsys):
    assert main(["info", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["stillframe"] == stillframe.__version__
    assert found["engine"]["pool_bytes"] >= found["engine"]["block_bytes"] > 0
    assert found["disk"]["error"] is None and isinstance(found["disk"]["fallbacks"], list)


def test_info_of_a_directory_that_cannot_be_written_to_says_why(tmp_path, capsys):
    assert main(["info", str(tmp_path / "missing")]) == 2
    output = capsys.readouterr().out
    assert "a save there fails: FileNotFoundError" in output
    assert "torch: " in output


def test_info_shows_what_is_still_to_be_uploaded(tmp_path, capsys):
    (tmp_path / "a.pt").write_bytes(bytes(1500))
    for name, url in (("a.pt", "s3://bucket/run/"), ("gone.pt", "gs://other/")):
        journal.add_due(journal.Entry(str(tmp_path), name, url, name), durable=False)
    assert main(["info", str(tmp_path)]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "uploaded" in each]
    assert re.fullmatch(
        r"to be uploaded: 2 \(1\.5 kB\), the oldest of \d{4}-\d\d-\d\dT[\d:+-]+,"
        r" to gs://other/, s3://bucket/run/",
        line,
    )
    assert main(["info", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["mirror"]
    assert (found["uploads"], found["nbytes"]) == (2, 1500)
    assert found["prefixes"] == ["gs://other/", "s3://bucket/run/"]
    assert datetime.fromisoformat(found["oldest"]).timestamp() == int(found["oldest_s"])


def test_info_of_a_directory_without_a_mirror_shows_none(tmp_path, capsys):
    assert main(["info", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["mirror"] is None


def test_info_shows_the_fallbacks_of_a_save():
    found = info.collect(".")
    found["disk"]["fallbacks"] = ["Written through the page cache: no O_DIRECT."]
    assert "fallback: Written through the page cache: no O_DIRECT." in info.lines(found)
