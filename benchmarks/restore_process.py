"""The functions that `restore.py` calls in the processes that it measures."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from common import BenchError, Spec
from machine import reset_peak_rss, status_bytes

TORCH, MMAP, OURS = "torch.load", "torch.load(mmap=True)", "stillframe.load"
SAVED_BY_TORCH, SAVED_BY_STILLFRAME = "torch.save", "stillframe.save"
DCP, SAFETENSORS = "DCP load", "safetensors"
HAS_SAFETENSORS = importlib.util.find_spec("safetensors") is not None
WAYS = (TORCH, MMAP, DCP, *((SAFETENSORS,) if HAS_SAFETENSORS else ()), OURS)
MEMCPY_BYTES = 256 << 20  # far more than the caches hold


class Load(NamedTuple):
    """The figures of one load.

    seconds: until every byte was used. cpu_seconds: processor time of the process meanwhile.
    peak_nbytes: the peak of resident memory, less that before the load.
    """

    seconds: float
    cpu_seconds: float
    peak_nbytes: float


def prepare() -> None:
    """Import everything, so that the first call does not pay for it."""
    import torch
    from stillframe._shell import verify  # noqa: F401
    from torch.distributed import checkpoint  # noqa: F401

    torch.set_num_threads(2)


def make(path: str, spec: Spec, saved_by: str) -> None:
    """Save one state in each format, and sync the files.

    The file at `path` is in torch's format, and the program `saved_by` writes it. `path`.dcp and
    `path`.safetensors have the same tensors in the formats of DCP and safetensors.
    """
    import states
    import stillframe
    import torch
    from torch.distributed import checkpoint as dcp

    state = states.make(spec)
    state.step(8)  # so that the optimizer has its moments
    if saved_by == SAVED_BY_STILLFRAME:
        stillframe.save(state.tree(), path)
    else:
        with open(path, "wb") as file:
            torch.save(state.tree(), file)
            os.fsync(file.fileno())
    flat = {str(number): each for number, each in enumerate(states.tensors_of(state.tree()))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is only one process
        dcp.save(flat, checkpoint_id=f"{path}.dcp", no_dist=True)
    if HAS_SAFETENSORS:
        _safetensors().save_file(flat, f"{path}.safetensors")
    os.sync()


def load(path: str, way: str) -> Load:
    """Load once and sum every tensor, so that every byte is used."""
    import states

    gc.collect()
    read = _loaders_by_way()[way]
    before = status_bytes("VmRSS")
    reset_peak_rss()
    start, cpu_start = time.perf_counter(), time.process_time()
    tensors = states.tensors_of(read(path))
    for each in tensors:
        each.sum()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    if not tensors:
        raise BenchError(f"{way} found no tensors")
    return Load(seconds, cpu_seconds, status_bytes("VmHWM") - before)


def verify(path: str) -> float:
    """Return the seconds that `stillframe verify` needs for the file, without its start."""
    from stillframe._shell.verify import verify_file

    start = time.perf_counter()
    finding = verify_file(path)
    seconds = time.perf_counter() - start
    if not finding.ok:
        raise BenchError(f"{path}: {finding.error}")
    return seconds


def memcpy(path: str) -> float:
    """Return the seconds to copy as many bytes as the file has, at most MEMCPY_BYTES at a time."""
    import torch

    left = nbytes = os.stat(path).st_size
    chunk = min(nbytes, MEMCPY_BYTES)
    source = torch.full((chunk,), 1, dtype=torch.uint8)
    target = torch.full((chunk,), 0, dtype=torch.uint8)
    start = time.perf_counter()
    while left > 0:
        target[:left].copy_(source[:left])  # a whole chunk, except the last one
        left -= chunk
    return time.perf_counter() - start


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")


def _read_dcp(path: str) -> Any:
    """Load with DCP, which fills tensors that the caller has made."""
    import torch
    from torch.distributed import checkpoint as dcp

    shapes = dcp.FileSystemReader(f"{path}.dcp").read_metadata().state_dict_metadata
    tree = {
        name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in shapes.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, checkpoint_id=f"{path}.dcp", no_dist=True)
    return tree


def _loaders_by_way() -> dict[str, Callable[[str], Any]]:
    """Return the function of each way, which loads the files that `make` has saved at a path."""
    import stillframe
    import torch

    return {
        TORCH: torch.load,
        MMAP: lambda path: torch.load(path, mmap=True),
        DCP: _read_dcp,
        SAFETENSORS: lambda path: _safetensors().load_file(f"{path}.safetensors"),
        OURS: stillframe.load,
    }
