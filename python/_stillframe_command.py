"""The command `stillframe`, as far as it needs no torch: help, version, bad usage, completion,
verify, inspect and latest.

This module is outside the package, because importing the package imports torch, which takes
seconds. It imports the package's modules without the *front*, the `__init__` that imports torch.
The commands verify, inspect and latest do so too, and also use the core.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

UNUSABLE = 2  # the output cannot be written
INTERRUPTED = 130  # the status that a shell reports for a process that SIGINT has ended
NO_READER = 141  # the status of a process that SIGPIPE kills

_PACKAGE = Path(__file__).parent / "stillframe"
_WITHOUT_TORCH = ("verify", "inspect", "latest")


def import_module_without_init(name: str) -> ModuleType:
    """Import a module of the package that needs no torch, such as `_base.sizes`.

    The package's own `__init__`, which imports torch, does not run, and nothing of the package
    stays in `sys.modules`. If the package is loaded already, its module is returned.
    """
    if "stillframe" in sys.modules:
        return importlib.import_module(f"stillframe.{name}")
    _insert_stub_package()
    try:
        return importlib.import_module(f"stillframe.{name}")
    finally:
        for each in [each for each in sys.modules if each.partition(".")[0] == "stillframe"]:
            del sys.modules[each]


def _insert_stub_package() -> None:
    """Put an empty package into `sys.modules`, under which Python finds the package's modules."""
    package = ModuleType("stillframe", "Without its public names.")
    package.__path__ = [str(_PACKAGE)]
    sys.modules["stillframe"] = package


def _enable_imports_without_init() -> None:
    """Make the package's modules importable without the front. This is for a process that does
    nothing else, because the empty package stays in `sys.modules`.

    Raises:
        ImportError: stillframe does not support this system or this Python.
    """
    support: Any = import_module_without_init("_base.support")
    complaint = support.why_python_is_unsupported(sys.platform, support.is_free_threaded())
    if complaint is not None:
        raise ImportError(complaint)
    _insert_stub_package()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status, even after Ctrl-C or if the output cannot be
    written.

    Args:
        argv: The arguments after the program's name; `sys.argv[1:]` by default.

    Raises:
        SystemExit: The usage is wrong (status 2), or `--help` or `--version` was given (status 0).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return NO_READER
    except OSError as error:
        if error.filename is not None:
            raise  # the error is about a file: one about the standard output has no file name
        print(f"stillframe: the output cannot be written: {error.strerror}", file=sys.stderr)
        _discard_output()
        return UNUSABLE


def _run(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return its exit status."""
    usage: Any = import_module_without_init("_shell.usage")
    parser: argparse.ArgumentParser = usage.parser()
    options = parser.parse_args(arguments)
    if options.command == "completion":
        print(usage.completion(parser, options.shell), end="")
        return 0
    if options.command in _WITHOUT_TORCH and "stillframe" not in sys.modules:
        _enable_imports_without_init()
    from stillframe._shell import cli

    return cli.run(options)


def _discard_output() -> None:
    """Discard output that is not written yet. Otherwise Python would try to write it at exit, and
    print the error again."""
    with contextlib.suppress(OSError, ValueError):  # a test's stdout may have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
