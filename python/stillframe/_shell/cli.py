"""Runs the command that was parsed."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Callable

_UNUSABLE = 2  # the exit status
# Commands that make no engine, and so do not read its environment variables.
_WITHOUT_ENGINE = ("verify", "inspect", "latest")


def run(options: argparse.Namespace) -> int:
    """Run a command, and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows "?" for other letters
    run_command = _import_command(options.command)
    complaint = None
    if options.command not in _WITHOUT_ENGINE:
        complaint = _describe_environment_problem()
    if complaint:
        print(f"stillframe {options.command}: {complaint}", file=sys.stderr)
        return _UNUSABLE
    return run_command(options)


def _describe_environment_problem() -> str | None:
    """Return what is wrong with the environment variables that an engine reads, or None."""
    from stillframe._save.engine import Engine

    try:
        Engine().close()
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _import_command(name: str) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command; its module is imported only now."""
    module = importlib.import_module(f"stillframe._shell.{name}")
    command: Callable[[argparse.Namespace], int] = module.run
    return command
