"""Builds stillframe._core; everything else about the package is in pyproject.toml.

It is the C11 core with its binding: limited API of CPython 3.11, and nothing of torch, whose
functions are looked up when it is imported. So one binary serves many Pythons and torches, and a
build needs a C compiler. Switches, all from the environment:

    STILLFRAME_SANITIZE=address,undefined   builds with these sanitizers
    STILLFRAME_COVERAGE=1                   builds with gcov counters
    STILLFRAME_WERROR=1                     makes warnings errors (our CI does; users should not)
    STILLFRAME_STRIP=1                      leaves debugging symbols out (what is released has none)

From a checkout it also builds build/libfake_cuda.so, the tests' CUDA driver. The core is compiled
with the CUDA toolkit's cuda.h, else with the one of the nvidia-cuda-runtime wheel; where there is
neither it declares the few types that it needs, which gives the same binary.
"""

import hashlib
import os
import re
import runpy
import shutil
import sys
import sysconfig
import tomllib
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PYTHON_ABI = "0x030b0000"  # CPython 3.11
FAKE_DRIVER = "fake_cuda*"
HEADERS = sorted(glob("csrc/**/*.h", recursive=True))

support = runpy.run_path("python/stillframe/_base/support.py")
if complaint := support["why_python_is_unsupported"](sys.platform, support["is_free_threaded"]()):
    raise SystemExit(complaint)


def switches() -> tuple[list[str], list[str]]:
    """Compiler and linker flags that the environment asks for."""
    both: list[str] = []
    if names := os.environ.get("STILLFRAME_SANITIZE"):
        both += [f"-fsanitize={names}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    if os.environ.get("STILLFRAME_COVERAGE") == "1":
        both += ["--coverage", "-O0"]
    werror = ["-Werror"] if os.environ.get("STILLFRAME_WERROR") == "1" else []
    if os.environ.get("STILLFRAME_STRIP") == "1":
        return ["-g0", *both, *werror], [*both, "-s"]
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


def core() -> Extension:
    compile_flags, link_flags = switches()
    return Extension(
        "stillframe._core",
        sources=sorted(
            glob("csrc/core/**/*.c", recursive=True) + glob("csrc/python/**/*.c", recursive=True)
        ),
        depends=HEADERS,
        define_macros=[("_GNU_SOURCE", None), ("Py_LIMITED_API", PYTHON_ABI)],
        include_dirs=["csrc/core", "csrc/python", *cuda_include()],
        extra_compile_args=[
            *("-std=c11", "-pthread", "-Wstrict-prototypes", "-Wmissing-prototypes"),
            *("-Wall", "-Wextra", "-Wshadow", "-fvisibility=hidden"),
            *compile_flags,
        ],
        extra_link_args=["-pthread", *link_flags],
        libraries=["dl"],  # of its own before glibc 2.34
        py_limited_api=True,
    )


def signature(ext: Extension) -> str:
    """Return a hash of all that the binary of `ext` is made from: flags, sources, headers."""
    digest = hashlib.sha256()
    args = (ext.extra_compile_args, ext.extra_link_args, ext.define_macros, ext.include_dirs)
    digest.update(repr((args, os.environ.get("CC"))).encode())
    for path in [*ext.sources, *ext.depends, __file__]:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


class Build(build_ext):
    """Rebuilds an extension when what it is made from has changed, whatever the file times say."""

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
        # A Python that was built with a path of its own would write it into what it links.
        self.compiler.linker_so = [
            each for each in self.compiler.linker_so if not each.startswith("-Wl,-rpath")
        ]
        marker = Path("build", f"{ext.name}.signature")
        made_from = signature(ext)
        self.force = not marker.exists() or marker.read_text() != made_from
        super().build_extension(ext)
        marker.parent.mkdir(exist_ok=True)
        marker.write_text(made_from)


def readme() -> str:
    """README with links and pictures of the repository's, for readers who are not in it."""
    urls = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]
    blob, raw = f"{urls['Source']}/blob/main/", f"{urls['Source']}/raw/main/"
    text = Path("README.md").read_text()
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:|#)", rf"\g<1>{raw}", text)
    return re.sub(r"(?<!!)(\[(?:[^][]|\[[^]]*\])*\]\()(?![a-z]+:|#)", rf"\g<1>{blob}", text)


setup(
    ext_modules=[core()],
    cmdclass={"build_ext": Build},
    long_description=readme(),
    long_description_content_type="text/markdown",
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
