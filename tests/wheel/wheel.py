"""Checks a wheel, and tries it with several versions of torch: `make wheel-check`,
`wheel-versions`.

    python tests/wheel/wheel.py check WHEEL...             names, symbols, paths, debugging symbols
    python tests/wheel/wheel.py versions WHEEL VERSION...  an environment for each torch, and a save

Each environment is new, below build/, with the CPU build of torch. A version that cannot be
installed is skipped, and a line says why. With WHEEL_CUDA=1 the ordinary build is used instead,
which needs up to six gigabytes of CUDA packages. The exit status is 1 if the wheel has a fault.
"""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TAG = re.compile(r"stillframe-[\d.]+-cp311-abi3-(manylinux_2_28|linux)_(x86_64|aarch64)\.whl")
MOST_GLIBC = (2, 28)  # of manylinux_2_28
INDEX = "https://download.pytorch.org/whl/cpu"


def sections(binary: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit little-endian ELF file, by name."""
    (offset,) = struct.unpack_from("<Q", binary, 0x28)
    size, number, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", binary, offset + i * size) for i in range(number)]
    names = binary[heads[names_at][4] :]
    return {
        names[name : names.index(b"\0", name)].decode(): b"" if kind == 8 else binary[at : at + n]
        for name, kind, _, _, at, n in heads
    }


def complaints_of_binary(binary: bytes) -> list[str]:
    """Return what is wrong with an extension for a release."""
    found = sections(binary)
    wrong = [f"has {name}: not stripped" for name in found if name in (".symtab", ".debug_info")]
    tags = {tag for tag, _ in struct.iter_unpack("<qQ", found[".dynamic"])}
    if tags & {15, 29}:  # DT_RPATH, DT_RUNPATH
        wrong.append("has a path of its builder's (RUNPATH)")
    return wrong


def data_files() -> list[str]:
    """Return the data files that the package reads."""
    python = HERE.parents[1] / "python"
    return [str(each.relative_to(python)) for each in python.rglob("*.toml")] + [
        "stillframe/py.typed"
    ]


def glibc_of(binary: bytes) -> tuple[int, int]:
    """Return the newest version of glibc that a binary's symbols need."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", sections(binary)[".dynstr"])
    return max((int(major), int(minor)) for major, minor in versions)


def audit(tool: str, wheel: Path, *arguments: str) -> bool:
    """Run auditwheel or abi3audit; return False if it complains. A missing tool is reported."""
    if importlib.util.find_spec(tool) is None:
        print(f"  {tool}: skipped, it could not be installed")
        return True
    command = [sys.executable, "-m", tool, *arguments, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = " ".join((done.stdout + done.stderr).split("\n\n")[0].split())
    print(f"  {tool}: {output or 'nothing to complain of'}")
    return done.returncode == 0


def check(wheel: Path) -> bool:
    print(wheel.name)
    wrong = [] if TAG.fullmatch(wheel.name) else ["has another name than cp311-abi3"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        binaries = [name for name in names if name.endswith(".so")]
        if binaries != ["stillframe/_core.abi3.so"]:
            wrong.append(f"has the binaries {binaries}")
        for name in binaries:
            binary = archive.read(name)
            wrong += [f"{name} {each}" for each in complaints_of_binary(binary)]
            glibc = glibc_of(binary)
            print(f"  {name}: {len(binary) / 1e3:.0f} kB, glibc {glibc[0]}.{glibc[1]}")
            if "manylinux" in wheel.name and glibc > MOST_GLIBC:
                wrong.append(f"{name} wants a newer glibc than 2.28")
        wrong += [f"has no {each}" for each in data_files() if each not in names]
    content = audit("auditwheel", wheel, "show")
    content = audit("abi3audit", wheel, "--strict") and content
    for each in wrong:
        print(f"  WRONG: {each}")
    return content and not wrong


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def install_torch(python: Path, version: str) -> bool:
    """Install torch; return whether that succeeded."""
    newest = version == "newest"
    torch = "torch" if newest else f"torch=={version}"
    index = ["--index-url" if newest else "--extra-index-url", INDEX]
    wanted = [*index, torch if newest else f"{torch}+cpu"]
    done = pip(python, "install", "--quiet", "--retries", "1", *wanted)
    if done.returncode != 0 and os.environ.get("WHEEL_CUDA") == "1":
        done = pip(python, "install", "--quiet", torch)
    return done.returncode == 0


def try_beside(wheel: Path, version: str) -> bool:
    """Return whether the wheel works with this torch; True if that torch cannot be installed."""
    with tempfile.TemporaryDirectory(dir="build", prefix=f"torch-{version}-") as directory:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        python = Path(directory).resolve() / "bin/python"
        if not install_torch(python, version):
            print(f"torch {version}: skipped, there is no CPU build of it within reach ({INDEX})")
            return True
        done = pip(python, "install", "--quiet", str(wheel))
        if done.returncode == 0:
            done = subprocess.run(
                [python, "-W", "ignore", HERE / "smoke.py"],
                cwd=directory,
                capture_output=True,
                text=True,
                check=False,
            )
        failed = done.returncode != 0
        print(f"torch {version}: {'FAILED' if failed else done.stdout.strip()}", flush=True)
        if failed:
            print(done.stderr)
        return not failed


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["check"] and arguments[1:]:
        verdicts = [check(Path(each)) for each in arguments[1:]]
    elif arguments[:1] == ["versions"] and arguments[2:]:
        verdicts = [try_beside(Path(arguments[1]).resolve(), each) for each in arguments[2:]]
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
