"""A copy of the tree in which one change at a time is made, compiled and tested.

`make` in the copy builds a C program, so a change costs the one object that it touches. setup.py
in the copy builds the extension. The copy stays in build/mutants, and each run updates it.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

NOT_COPIED = {"__pycache__", "build", "dist"}
C_TIMEOUT_S, PYTHON_TIMEOUT_S, BUILD_TIMEOUT_S = 60.0, 240.0, 600.0
SANITIZERS: dict[str, str] = runpy.run_path(str(Path(__file__).parents[1] / "c/run.py"))["OPTIONS"]


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one test run."""

    passed: bool
    why: str  # how it failed, with its last lines
    seconds: float


class TreeCopy:
    """A copy of `root` at `directory`. One thread uses it.

    Args:
        variant: The Makefile's variant of C programs that name none.
        patience: A factor for every time limit, for a busy machine.
        python: The Python with which the tests run.
    """

    def __init__(
        self,
        root: Path,
        directory: Path,
        *,
        variant: str = "plain",
        patience: float = 1.0,
        python: str = sys.executable,
    ) -> None:
        self.root, self.directory, self.python = root, directory, python
        self._variant, self._patience = variant, patience
        wanted = {each.relative_to(root) for each in _files(root)}
        for path in _files(directory):
            if path.relative_to(directory) not in wanted:
                path.unlink()
        for name in wanted:
            _copy(root / name, directory / name)
        objects = [*root.glob("build/*/core/**/*.o"), *root.glob("build/**/libfake_cuda.so")]
        for made in objects:
            if not (directory / made.relative_to(root)).exists() and directory not in made.parents:
                _copy(made, directory / made.relative_to(root))
        self.restore_extension()

    def restore_extension(self) -> None:
        """Put back the extension that the tree was built with."""
        for each in (self.root / "python").rglob("*.so"):
            _copy(each, self.directory / each.relative_to(self.root))

    def environment(self) -> dict[str, str]:
        """Return the variables with which commands run in the copy."""
        return {
            **SANITIZERS,
            **os.environ,
            # before the tree in which the package is installed
            "PYTHONPATH": str(self.directory / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",  # a change and its revert may happen within one second
            "STILLFRAME_WERROR": "0",  # a change may leave a variable unused
            "CFLAGS": "-O1",
            "MAKEFLAGS": "",
        }

    # ---- building ---------------------------------------------------------------------------

    def build(self, file: str | None, test: str) -> str:
        """Build what `test` runs, after a change of `file`.

        Returns:
            The compiler's error, or nothing.
        """
        if not is_pytest(test):
            driver = str(Path(self.program(test)).with_name("libfake_cuda.so"))
            drivers = [driver] if (self.directory / "tests/c/cuda").is_dir() else []
            return self._command(["make", "-s", self.program(test), *drivers])
        if file is None:
            return ""
        if file.endswith(".py"):
            try:
                compile((self.directory / file).read_text(), file, "exec")
            except SyntaxError as error:
                return str(error)
            return ""
        return self._command([self.python, "setup.py", "--quiet", "build_ext", "--inplace"])

    def program(self, test: str) -> str:
        """Return the path of a C test program in the copy; `test` may name its variant."""
        return f"build/{test}" if "/" in test else f"build/{self._variant}/{test}"

    def _command(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.directory, env=self.environment(), capture_output=True, text=True,
            errors="replace", timeout=BUILD_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode == 0:
            return ""
        return (done.stderr or done.stdout).strip() or f"{command[0]} failed"

    # ---- running ----------------------------------------------------------------------------

    def command(self, tests: list[str]) -> list[str]:
        """Return the command that runs one C program, or tests of pytest together."""
        if is_pytest(tests[0]):
            options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=line"]
            options.append(f"--timeout={60 * self._patience}")
            return [self.python, "-m", "pytest", *options, *tests]
        program = self.program(tests[0])
        fixed = "/tsan/" in program and shutil.which("setarch") is not None
        return [*(["setarch", "-R"] if fixed else []), f"./{program}"]

    def run(self, tests: list[str], took_s: float | None = None) -> Ran:
        """Run one C program, or tests of pytest together.

        Args:
            took_s: The seconds that they take without a change. A change often makes a test hang,
                so a known duration shortens the limit.
        """
        usual_s = PYTHON_TIMEOUT_S if is_pytest(tests[0]) else C_TIMEOUT_S
        limit_s = 5 * usual_s
        if took_s is not None:
            limit_s = max(min(usual_s, 10 + 10 * took_s), 2 * took_s)
        start = time.monotonic()
        process = subprocess.Popen(
            self.command(tests), cwd=self.directory, env=self.environment(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s * self._patience)
            status = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = "timed out"
        lines = output.decode(errors="replace").strip().splitlines()
        telling = [each for each in lines if "failed: " in each or each.startswith("FAILED")]
        why = "\n".join([status, *(telling[:3] or lines[-8:])])
        return Ran(process.returncode == 0, why, time.monotonic() - start)


def is_pytest(test: str) -> bool:
    """Return whether pytest runs a test; otherwise it is a C program."""
    return test.startswith("tests/")


def together(tests: tuple[str, ...]) -> list[list[str]]:
    """Group tests into runs: each C program alone, then all of pytest in one process."""
    python = [each for each in tests if is_pytest(each)]
    return [*([each] for each in tests if each not in python), *([python] if python else [])]


def _files(top: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(top):
        folders[:] = [x for x in folders if x not in NOT_COPIED and not x.startswith(".")]
        found += [Path(folder, each) for each in files if not each.endswith((".so", ".pyc"))]
    return found


def _copy(source: Path, target: Path) -> None:
    """Copy the files that differ. A replaced file gets a new time, so that make builds it again."""
    existed = target.exists()
    if existed and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy2(source, target)
    if existed:
        os.utime(target)
