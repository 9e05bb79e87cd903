"""The requirements of stillframe, and a sentence for each requirement that is not met.

This file imports nothing from the package, because `setup.py` runs it before the build.
"""

from __future__ import annotations

import importlib
import re
import sys

VERSION = "0.1.0"
TORCH = (2, 10)
# package with a stillframe module of the same name: (oldest supported version, name for pip)
FRAMEWORKS = {
    "accelerate": ((1, 10), "accelerate"),
    "lightning": ((2, 4), "lightning"),
    "pytorch_lightning": ((2, 4), "pytorch-lightning"),
    "transformers": ((5, 0), "transformers[torch]"),
}


def why_python_is_unsupported(platform: str, free_threaded: bool) -> str | None:
    """Return what is wrong with the system and its Python, or None."""
    if not platform.startswith("linux"):
        name = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
        return f"stillframe runs on Linux only, and this is {name}"
    if free_threaded:
        return (
            "stillframe does not support free-threaded builds of CPython: use an ordinary one"
            " (python3.13 in place of python3.13t)"
        )
    return None


def why_torch_is_unsupported(version: str | None) -> str | None:
    """Return what is wrong with torch, or None. `version` is None if torch is not installed."""
    if version is None:
        return "stillframe needs torch 2.10 or later, and there is none here: pip install torch"
    if parsed(version) < TORCH:
        return f"stillframe needs torch 2.10 or later, and this is {version}: pip install -U torch"
    return None


def why_framework_is_unsupported(package: str, version: str | None) -> str | None:
    """Return what is wrong with a package of `FRAMEWORKS`, or None."""
    least, name = FRAMEWORKS[package]
    major, minor = least
    needs = f"stillframe.{package} needs {name.split('[')[0]} {major}.{minor} or later"
    if version is None:
        return f'{needs}, and there is none here: pip install "{name}"'
    if parsed(version) < least:
        return f'{needs}, and this is {version}: pip install -U "{name}"'
    return None


def parsed(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (2, 10) for "2.10.0a0+git1", (0, 0) for none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return str(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if error.name == package:
            return None
        raise  # the package itself imports a module that is missing


def is_free_threaded() -> bool:
    return "t" in getattr(sys, "abiflags", "")


def refuse_unsupported_system() -> None:
    """Raise ImportError if stillframe cannot run here."""
    complaint = why_python_is_unsupported(sys.platform, is_free_threaded())
    complaint = complaint or why_torch_is_unsupported(installed_version("torch"))
    if complaint is not None:
        raise ImportError(complaint)
    try:
        importlib.import_module("stillframe._core")
    except ModuleNotFoundError as error:
        if error.name != "stillframe._core":
            raise
        raise ImportError(
            "stillframe's extension (_core) is not there: install the package again, or build it in"
            " a checkout with `make build`"
        ) from None


def refuse_unsupported_framework(package: str) -> None:
    """Raise ImportError if a package of `FRAMEWORKS` is missing or too old."""
    complaint = why_framework_is_unsupported(package, installed_version(package))
    if complaint is not None:
        raise ImportError(complaint)
