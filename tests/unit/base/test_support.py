"""Unsupported systems and packages are reported in one sentence, at build time and at run time."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from fix_processes import TORCH, run_python
from stillframe._base import support

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("platform", "free_threaded", "words"),
    [
        ("linux", False, None),
        ("darwin", False, "runs on Linux only, and this is macOS"),
        ("win32", False, "runs on Linux only, and this is Windows"),
        ("linux", True, "does not support free-threaded builds"),
    ],
)
def test_unsupported_systems_and_pythons_are_named(platform, free_threaded, words):
    message = support.why_python_is_unsupported(platform, free_threaded)
    assert message is None if words is None else words in message


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.10.0", None),
        ("2.13.0+cu130", None),
        ("3.0.0a0+git12", None),
        ("2.9.1+cpu", "needs torch 2.10 or later, and this is 2.9.1+cpu"),
        ("1.13.1", "this is 1.13.1"),
        (None, "there is none here: pip install torch"),
    ],
)
def test_old_and_missing_torch_are_reported(version, words):
    message = support.why_torch_is_unsupported(version)
    assert message is None if words is None else words in message


def run(code: str, path: Path, imported: tuple[str, ...] = TORCH) -> str:
    """Return the last line on stderr of a Python that searches `path` for modules first."""
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"
    done = run_python("-c", code, imported=imported)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def fake(path: Path, package: str, version: str) -> None:
    (path / package).mkdir()
    (path / package / "__init__.py").write_text(f"__version__ = {version!r}\n")


def test_import_with_an_old_torch_is_refused(tmp_path):
    fake(tmp_path, "torch", "2.9.1")
    message = run("import stillframe", tmp_path, imported=())
    assert message == (
        "ImportError: stillframe needs torch 2.10 or later, and this is 2.9.1: pip install -U torch"
    )


def test_import_without_torch_is_refused(tmp_path):
    message = run("sys.modules['torch'] = None; import stillframe", tmp_path, imported=())
    assert message.startswith(
        "ImportError: stillframe needs torch 2.10 or later, and there is none"
    )


@pytest.mark.parametrize(
    ("package", "least"),
    [
        ("accelerate", "1.10"),
        ("lightning", "2.4"),
        ("pytorch_lightning", "2.4"),
        ("transformers", "5.0"),
    ],
)
def test_import_of_a_module_with_an_old_package_is_refused(tmp_path, package, least):
    fake(tmp_path, package, "1.9.3")
    message = run(f"import stillframe.{package}", tmp_path)
    assert f"needs {package.replace('_', '-')} {least} or later, and this is 1.9.3" in message
    message = run(f"sys.modules[{package!r}] = None; import stillframe.{package}", tmp_path)
    assert "and there is none here: pip install" in message


def test_import_on_an_unsupported_system_is_refused(tmp_path):
    message = run("import torch; sys.platform = 'darwin'; import stillframe", tmp_path)
    assert message == "ImportError: stillframe runs on Linux only, and this is macOS"


def test_a_package_without_its_extension_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "stillframe._core", None)
    with pytest.raises(ImportError, match="is not there: install the package again"):
        support.refuse_unsupported_system()


def build(path: Path, before: str = "") -> str:
    """Return the last line of a refused build; modules in `path` come before all others."""
    code = f"""
        import runpy, sys
        sys.path.insert(0, {str(path)!r})
        {before}
        sys.argv = ["setup.py", "build_ext", "--build-lib", {str(path)!r}]
        runpy.run_path("setup.py", run_name="__main__")
    """
    done = run_python("-c", textwrap.dedent(code), cwd=ROOT)
    assert done.returncode == 1
    return done.stderr


def test_build_on_an_unsupported_system_is_refused(tmp_path):
    loaded = "import sysconfig, setuptools; sysconfig.get_config_vars()"
    message = build(tmp_path, f"{loaded}; sys.platform = 'win32'")
    assert "runs on Linux only, and this is Windows" in message
