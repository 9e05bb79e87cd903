"""A copy of the tree in which edits are made, compiled and tested, one at a time.

C programs are built by the copy's Makefile, so an edit costs the one object that it changes. The
extension is built from what setup.py says, object by object. Compiled files of the tree that are
newer than their sources come along with the copy.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import mutant_list
import tester

# Of the tree, without what is compiled or left by tools.
PARTS = (
    *("csrc", "python", "tests", "benchmarks", "examples", "docs", "Makefile", "setup.py"),
    *("pyproject.toml", "requirements.txt", "README.md", "CHANGELOG.md", "LICENSE", "mkdocs.yml"),
    *("ARCHITECTURE.md", "CONTRIBUTING.md"),
)
NOT_COPIED = {"__pycache__", "build", ".hypothesis"}
# What tests of Python find imported.
TORCH = ("torch", "torch.distributed.checkpoint", "pytest", "numpy")
LIGHTNING = (*TORCH, "lightning.pytorch")
C_TIMEOUT_S, PYTHON_TIMEOUT_S, BUILD_TIMEOUT_S = 60.0, 240.0, 600.0
# What setup.py builds the first extension of.
RECIPE = """
import json
from distutils.core import run_setup
from setuptools.dist import Distribution
core = run_setup("setup.py", stop_after="init").ext_modules[0]
print(json.dumps([core.sources, core.define_macros, core.include_dirs, core.extra_compile_args]))
"""


@dataclass(frozen=True, slots=True)
class Ran:
    passed: bool
    why: str  # how it failed, with the last lines that it printed
    seconds: float


class Ground:
    """Not for two threads at once."""

    def __init__(self, root: Path, place: Path, variant: str, patience: float = 1.0) -> None:
        self.root, self.place, self.variant, self.patience = root, place, variant, patience
        self._extension_differs = False
        self._before = ""  # the file that an edit stands in, without it
        self._testers: dict[tuple[str, ...], tester.Tester] = {}
        self._copy_tree()

    # ---- the copy ---------------------------------------------------------------------------

    def _copy_tree(self) -> None:
        wanted = {each.relative_to(self.root): each for each in _files(self.root)}
        for path in _files(self.place):
            if path.relative_to(self.place) not in wanted:
                path.unlink()
        for name, source in wanted.items():
            _copy(source, self.place / name)
        objects = self.root / f"build/{self.variant}/core"
        drivers = [self.root / "build/libfake_cuda.so", objects.parent / "libfake_cuda.so"]
        for each in [*objects.rglob("*.o"), *filter(Path.exists, drivers)]:
            made = self.place / each.relative_to(self.root)
            if not made.exists():
                made.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(each, made)
        self._copy_extension()

    def _copy_extension(self) -> None:
        for each in (self.root / "python").rglob("*.so"):
            _copy(each, self.place / each.relative_to(self.root))

    # ---- an edit ----------------------------------------------------------------------------

    def edit(self, mutant: mutant_list.Mutant) -> None:
        """Makes the edit; ListError if it does not apply."""
        path = self.place / mutant.file
        if not path.is_file():
            raise mutant_list.ListError(f"{mutant.file}: there is no such file")
        self._before = path.read_text()
        path.write_text(mutant.apply(self._before))

    def undo(self, mutant: mutant_list.Mutant) -> None:
        """Once the edit is made."""
        (self.place / mutant.file).write_text(self._before)
        if self._extension_differs:
            self._copy_extension()
            self._extension_differs = False

    def compile(self, mutant: mutant_list.Mutant | None, test: str) -> str:
        """Builds what `test` runs; what the compiler says against it, or nothing."""
        if not is_pytest(test):
            driver = Path(self._program(test)).with_name("libfake_cuda.so")
            drivers = [str(driver)] if (self.place / "tests/c/cuda").is_dir() else []
            return self._command(["make", "-s", self._program(test), *drivers])
        if mutant is None:
            return ""
        if mutant.file.endswith(".py"):
            try:
                compile((self.place / mutant.file).read_text(), mutant.file, "exec")
            except SyntaxError as error:
                return str(error)
            return ""
        self._extension_differs = True
        return self._build_extension()

    def _build_extension(self) -> str:
        """python/stillframe/_core.abi3.so of the copy, from its sources as they are now."""
        sources, flags = self._recipe()
        cc = os.environ.get("CC", "cc").split()
        headers = max(each.stat().st_mtime_ns for each in self.place.glob("csrc/**/*.h"))
        objects = []
        for source in sources:
            made = self.place / "build/extension" / Path(source).with_suffix(".o")
            objects.append(str(made))
            newest = max((self.place / source).stat().st_mtime_ns, headers)
            if made.exists() and made.stat().st_mtime_ns > newest:
                continue
            made.parent.mkdir(parents=True, exist_ok=True)
            if said := self._command([*cc, *flags, "-c", source, "-o", str(made)]):
                made.unlink(missing_ok=True)
                return said
        target = self.place / "python/stillframe/_core.abi3.so"
        target.unlink(missing_ok=True)
        return self._command([*cc, "-shared", "-pthread", *objects, "-o", str(target)])

    @functools.cache  # noqa: B019  (a ground lives as long as the process)
    def _recipe(self) -> tuple[list[str], list[str]]:
        """The extension's sources and flags."""
        said = subprocess.run(
            [sys.executable, "-c", RECIPE], cwd=self.place, env=self._building(),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        sources, macros, includes, flags = json.loads(said.stdout.splitlines()[-1])
        return sources, [
            *flags,
            *("-O1", "-fPIC", f"-I{sysconfig.get_path('include')}", "-DPy_LIMITED_API=0x030b0000"),
            *(f"-D{name}" if value is None else f"-D{name}={value}" for name, value in macros),
            *(f"-I{each}" for each in includes),
        ]

    # ---- tests ------------------------------------------------------------------------------

    def run(self, tests: list[str], took_s: float | None = None) -> Ran:
        """Runs one C program, or tests of pytest together.

        Args:
            took_s: What they took without an edit. Many edits have a test hang, which is given up
                the sooner. A run without an edit is given up late: nothing is known after that.
        """
        if is_pytest(tests[0]):
            options = ["-q", "-x", "-p", "no:cacheprovider", f"--timeout={60 * self.patience}"]
            options += ["--tb=line"]
            started = self._tester(tests).start([*options, *tests])
            return self._wait(started, _limit_s(PYTHON_TIMEOUT_S, took_s))
        program = self._program(tests[0])
        tsan = ["setarch", "-R"] if "/tsan/" in program and shutil.which("setarch") else []
        started = self._start([*tsan, f"./{program}"])
        return self._wait(started, _limit_s(C_TIMEOUT_S, took_s))

    def _tester(self, tests: list[str]) -> tester.Tester:
        """Kept, one with Lightning and one without."""
        ahead = LIGHTNING if any("lightning" in each for each in tests) else TORCH
        if ahead not in self._testers:
            self._testers[ahead] = tester.Tester(self.place, _environment(self.place), [*ahead])
        return self._testers[ahead]

    def close(self) -> None:
        for each in self._testers.values():
            each.close()

    def _program(self, test: str) -> str:
        return f"build/{test}" if "/" in test else f"build/{self.variant}/{test}"

    def _wait(self, process: subprocess.Popen[bytes] | tester.Run, timeout_s: float) -> Ran:
        start = time.monotonic()
        try:
            output, _ = process.communicate(timeout=timeout_s * self.patience)
            status = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = "timed out"
        said = output.decode(errors="replace").strip().splitlines()
        telling = [each for each in said if "failed: " in each or each.startswith("FAILED")]
        why = "\n".join([status, *(telling[:3] or said[-8:])])
        return Ran(process.returncode == 0, why, time.monotonic() - start)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        while True:
            try:
                return subprocess.Popen(
                    command, cwd=self.place, env=_environment(self.place), stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                # A process that another thread starts has for a moment what is open here, the
                # program that was just copied among it.
                if error.errno != errno.ETXTBSY:
                    raise
                time.sleep(0.01)

    def _building(self) -> dict[str, str]:
        """An edit may leave a variable that nobody uses."""
        return {**_environment(self.place), "STILLFRAME_WERROR": "0", "MAKEFLAGS": ""}

    def _command(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.place, env=self._building(), capture_output=True, text=True,
            errors="replace", timeout=BUILD_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode == 0:
            return ""
        return (done.stderr or done.stdout).strip() or f"{command[0]} failed"


def _limit_s(usual_s: float, took_s: float | None) -> float:
    if took_s is None:
        return 5 * usual_s
    return max(min(usual_s, 10 + 10 * took_s), 2 * took_s)  # it may be busier now


def is_pytest(test: str) -> bool:
    return ".py" in test


@functools.cache
def _sanitizers() -> dict[str, str]:
    found: dict[str, str] = runpy.run_path(str(Path(__file__).parents[1] / "c/run.py"))["OPTIONS"]
    return found


def _environment(place: Path) -> dict[str, str]:
    return {
        **_sanitizers(),
        **os.environ,
        "PYTHONPATH": str(place / "python"),  # before the tree's own, which is installed
        "PYTHONDONTWRITEBYTECODE": "1",  # an edit and its undoing may fall into one second
    }


def _files(top: Path) -> list[Path]:
    found = []
    for part in PARTS:
        if (top / part).is_file():
            found.append(top / part)
        for folder, folders, files in os.walk(top / part):
            folders[:] = [each for each in folders if each not in NOT_COPIED]
            found += [Path(folder, each) for each in files if not each.endswith((".so", ".pyc"))]
    return found


def _copy(source: Path, target: Path) -> None:
    """Copies what differs. What was there before is new from now on: objects were made of it."""
    existed = target.exists()
    if existed and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy2(source, target)
    if existed:
        os.utime(target)
