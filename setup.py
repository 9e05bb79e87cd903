"""Builds the two extension modules; everything else about the package is in pyproject.toml.

    stillframe._core    the C11 core and its binding (limited API, CPython 3.11 and later)
    stillframe._bridge  the one C++ file, on torch's stable ABI

One binary of each serves many Python and torch versions. Switches, all from the environment:

    STILLFRAME_SANITIZE=address,undefined   builds with these sanitizers
    STILLFRAME_COVERAGE=1                   builds with gcov counters
    STILLFRAME_WERROR=1                     makes warnings errors (our CI does; users should not)

From a checkout it also builds build/libfake_cuda.so, the tests' CUDA driver. The core is compiled
with the CUDA toolkit's cuda.h, else with the one of the nvidia-cuda-runtime wheel; where there is
neither it declares the few types that it needs, which gives the same binary.
"""

import hashlib
import os
import runpy
import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from torch.utils import cpp_extension
except ImportError:
    cpp_extension = None

PYTHON_ABI = "0x030b0000"  # CPython 3.11
TORCH_ABI = "0x020a000000000000"  # torch 2.10
FAKE_DRIVER = "fake_cuda*"
HEADERS = sorted(glob("csrc/**/*.h", recursive=True))

support = runpy.run_path("python/stillframe/_base/support.py")
if complaint := support["complaint_of_python"](sys.platform, support["is_free_threaded"]()):
    raise SystemExit(complaint)

NO_TORCH = """
stillframe is compiled against the torch it is going to run with, and finds none here.
Install torch first, then build in that same environment:

    pip install torch
    pip install --no-build-isolation stillframe      (or: pip install --no-build-isolation .)
"""


def switches() -> tuple[list[str], list[str]]:
    """Compiler and linker flags that the environment asks for."""
    both: list[str] = []
    if names := os.environ.get("STILLFRAME_SANITIZE"):
        both += [f"-fsanitize={names}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    if os.environ.get("STILLFRAME_COVERAGE") == "1":
        both += ["--coverage", "-O0"]
    werror = ["-Werror"] if os.environ.get("STILLFRAME_WERROR") == "1" else []
    return ["-g", *both, *werror], both


def cuda_include() -> list[str]:
    """The directory of cuda.h: of a toolkit, or of the wheel that torch's CUDA builds bring."""
    places = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    if nvcc := shutil.which("nvcc"):
        places.append(str(Path(nvcc).resolve().parents[1]))
    places += ["/usr/local/cuda", *sorted(glob("/usr/local/cuda-*"), reverse=True)]
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    places += sorted(map(str, [*wheels.glob("cu1*"), *wheels.glob("cuda_runtime")]), reverse=True)
    for place in filter(None, places):
        if Path(place, "include", "cuda.h").exists():
            return [str(Path(place, "include"))]
    return []


def extensions() -> list[Extension]:
    compile_flags, link_flags = switches()
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-fvisibility=hidden", *compile_flags]
    core = Extension(
        "stillframe._core",
        sources=sorted(
            glob("csrc/core/**/*.c", recursive=True) + glob("csrc/python/**/*.c", recursive=True)
        ),
        depends=HEADERS,
        define_macros=[("_GNU_SOURCE", None)],
        include_dirs=["csrc/core", "csrc/python", "csrc", *cuda_include()],
        extra_compile_args=[
            *("-std=c11", "-pthread", "-Wstrict-prototypes", "-Wmissing-prototypes"),
            *warnings,
        ],
        extra_link_args=["-pthread", *link_flags],
        py_limited_api=True,
    )
    if cpp_extension is None:
        return [core]
    # -isystem: torch's headers are not ours to warn about.
    bridge = cpp_extension.CppExtension(
        "stillframe._bridge",
        sources=["csrc/torch/bridge.cpp"],
        depends=HEADERS,
        define_macros=[("TORCH_TARGET_VERSION", TORCH_ABI)],
        extra_compile_args=[
            *(f"-isystem{path}" for path in cpp_extension.include_paths()),
            *warnings,
        ],
        extra_link_args=link_flags,
        py_limited_api=True,
    )
    return [core, bridge]


def refuse_other_torch() -> None:
    if cpp_extension is None:
        raise SystemExit(NO_TORCH)
    if why := support["complaint_of_torch"](support["installed"]("torch")):
        raise SystemExit(why)


def signature(ext: Extension) -> str:
    """What the binary of `ext` is made from: flags, sources, headers, torch."""
    torch_version = cpp_extension.torch.__version__ if cpp_extension else ""
    digest = hashlib.sha256()
    args = (ext.extra_compile_args, ext.extra_link_args, ext.define_macros, torch_version)
    args += (ext.include_dirs if ext.name == "stillframe._core" else [],)
    digest.update(repr((args, os.environ.get("CC"), os.environ.get("CXX"))).encode())
    for path in [*ext.sources, *ext.depends, __file__]:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


class Build(cpp_extension.BuildExtension if cpp_extension else build_ext):  # type: ignore[misc]
    """Rebuilds an extension when what it is made from has changed, whatever the file times say."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        refuse_other_torch()
        cpp_extension.min_supported_cpython = PYTHON_ABI  # as its documentation tells one to
        super().__init__(*args, use_ninja=False, **kwargs)

    def run(self) -> None:
        super().run()
        self.build_fake_driver()

    def build_fake_driver(self) -> None:
        """Builds the tests' CUDA driver. Nothing of it is installed."""
        made_of = sorted(Path("tests/c/cuda").glob(FAKE_DRIVER))
        sources = [str(each) for each in made_of if each.suffix == ".c"]
        target = Path("build/libfake_cuda.so")
        if not sources:
            return
        made_of.append(Path("csrc/core/cuda/types.h"))
        if target.exists() and all(
            each.stat().st_mtime <= target.stat().st_mtime for each in made_of
        ):
            return
        compile_flags, link_flags = switches()
        objects = self.compiler.compile(
            sources,
            output_dir=self.build_temp,
            macros=[("_GNU_SOURCE", None)],
            include_dirs=["csrc/core"],
            extra_postargs=["-std=c11", "-pthread", "-fPIC", *compile_flags],
        )
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread", *link_flags]
        )

    def build_extension(self, ext: Extension) -> None:
        marker = Path("build", f"{ext.name}.signature")
        made_from = signature(ext)
        self.force = not marker.exists() or marker.read_text() != made_from
        super().build_extension(ext)
        marker.parent.mkdir(exist_ok=True)
        marker.write_text(made_from)


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
