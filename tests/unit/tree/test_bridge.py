"""The bridge's declarations agree with torch's own headers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]

COMPARED = """
#include <type_traits>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#if __has_include(<torch/csrc/stable/c/shim.h>)
#include <torch/csrc/stable/c/shim.h>
#endif
#include "torch_shim.h"
#define NEEDED(result, name, arguments) \\
	static_assert(std::is_same_v<decltype(name), result arguments>, #name);
#define LATER(result, name, arguments)
SFR_TORCH_FUNCTIONS(NEEDED, %s)
"""


def test_every_function_is_declared_as_torch_declares_it(tmp_path):
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    headers = Path(torch.__file__).parent / "include"
    if shutil.which(compiler[0]) is None or not headers.is_dir():
        pytest.skip("no C++ compiler, or no headers of torch")
    later = (headers / "torch/csrc/stable/c/shim.h").exists()
    # With a name of its own, because torch/shim.h is searched for among torch's headers.
    shutil.copy(ROOT / "csrc/python/torch/shim.h", tmp_path / "torch_shim.h")
    source = tmp_path / "compared.cpp"
    source.write_text(COMPARED % ("NEEDED" if later else "LATER"))
    done = subprocess.run(
        [*compiler, "-std=c++17", "-fsyntax-only", f"-I{tmp_path}", f"-isystem{headers}", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
