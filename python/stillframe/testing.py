"""Helpers for tests: make the system calls under a save fail, fall short, wait or be slow.

The C core makes every call for files, memory, threads and time through one table. Inside a block of
``fault``, ``held`` or ``slow``, wrappers in that table count the calls and change some of them.

    with fault("fdatasync", err=errno.EIO) as injected:
        with pytest.raises(stillframe.SaveError):
            stillframe.save(state, path)
    assert injected.hits == 1

Calls are named as in ``csrc/core/base/sys.h``, and "*" means any of them:

    open close pread pwrite fdatasync fsync fallocate flock set_flags fstat lstat realpath faccessat
    mkdir rename exchange unlink rmdir opendir mmap munmap mprotect madvise mincore malloc calloc
    realloc thread_create set_nice get_affinity set_affinity

"readdir", "closedir", "free", "thread_join" and "clock_gettime" can only be held or slow. The same
is true of the copies of tensor bytes: "capture_copy" (during the call) and "lane_copy" (after it).

Faults apply to all threads of the process. Blocks nest; up to 16 faults exist at a time. Enter the
first block while no save is in flight, because it replaces the table.
"""

import ctypes
import errno as _errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stillframe import _core
from stillframe._base import device as _device
from stillframe._tree import skeleton

__all__ = ["FakeDriver", "Injected", "fault", "held", "host_as_device", "slow"]

_FOREVER_NS = (1 << 64) - 1  # SFR_FOREVER in the core
_NO_LIMIT = -1
_LIMITS = {"half": -2, "all but one": -3}  # the core's codes for these limits
_lock = threading.Lock()  # protects `_depth`, `_host_as_device_depth` and the core's list of faults
_depth = 0  # how many blocks of `fault`, `slow` and `held` are entered


class Injected:
    """The counts of calls and of faults since the outermost block was entered."""

    @property
    def hits(self) -> int:
        """Return how often the fault of any block has changed a call."""
        return _core.inject_hits()

    def calls(self, call: str = "*") -> int:
        """Return how often a call was made, including failed ones; "*" counts all that can fail.

        An unknown name counts 0.
        """
        return _core.inject_calls(call)


@contextmanager
def _install_fault_for_block(
    call: str, nth: int, sticky: bool, err: int, limit: int, delay_ns: int
) -> Iterator[Injected]:
    """Install one fault for the block.

    Args:
        err: The errno of the failure; 0 for none.
        limit: The most bytes of a transfer, a value of `_LIMITS`, or `_NO_LIMIT`.
        delay_ns: The time to sleep before the call; `_FOREVER_NS` holds the call until the block's
            end.
    """
    global _depth
    with _lock:
        _core.inject_install()
        if _depth == 0:
            _core.inject_clear()  # resets the counts
        _core.inject_set(call, nth, sticky, err, limit, delay_ns)
        _depth += 1
    try:
        yield Injected()
    finally:
        with _lock:
            _core.inject_drop(call, nth, sticky, err, limit, delay_ns)
            _depth -= 1


@contextmanager
def fault(
    call: str,
    *,
    nth: int = 1,
    sticky: bool = False,
    err: int = _errno.EIO,
    limit: int | str | None = None,
) -> Iterator[Injected]:
    """Make the `nth` call (counted from 1 at the block's entry) fail with `err`.

    Args:
        call: The name of the call; the module's docstring lists the names.
        nth: The number of the call to fail, counted from 1 at the block's entry.
        sticky: Make every later call fail too.
        err: The errno of the failure. A failed call has done nothing, except "close", which has
            closed the file.
        limit: Let "pread" and "pwrite" transfer only a part of the requested bytes, instead of
            failing: at most a number of bytes, "half" or "all but one". `err` is then not used. 0
            transfers nothing and reports no error.

    Raises:
        ValueError: The call is unknown or cannot fail, `nth` is below 1, or `limit` is invalid.
        RuntimeError: There are more than 16 faults.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    if isinstance(limit, str):
        if limit not in _LIMITS:
            raise ValueError(f"limit is a number of bytes, 'half' or 'all but one', got {limit!r}")
        nr_bytes = _LIMITS[limit]
    elif limit is None:
        if err <= 0:
            raise ValueError(f"err is an errno, got {err}")
        nr_bytes = _NO_LIMIT
    else:
        if limit < 0:
            raise ValueError(f"limit is a number of bytes, got {limit}")
        nr_bytes = limit
    if limit is not None and call not in ("pread", "pwrite"):
        raise ValueError(f"only 'pread' and 'pwrite' can fall short, not {call!r}")
    if limit is not None:
        err = 0  # the call succeeds, but transfers fewer bytes
    with _install_fault_for_block(call, nth, sticky, err, nr_bytes, delay_ns=0) as injected:
        yield injected


@contextmanager
def slow(call: str, seconds: float, *, nth: int = 1, sticky: bool = True) -> Iterator[Injected]:
    """Make the `nth` call and (with `sticky`) every later one sleep first.

    Args:
        call: The name of the call; the module's docstring lists the names, and all can be slow.
        seconds: How long each call sleeps. Leaving the block does not end a sleep that has begun.
        nth: The number of the call, counted from 1 at the block's entry.
        sticky: Make every later call sleep too.

    Raises:
        ValueError: The call is unknown, `nth` is below 1, or `seconds` is below 0.
        RuntimeError: There are more than 16 faults.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    if seconds < 0:
        raise ValueError(f"seconds must not be negative, got {seconds}")
    delay_ns = round(seconds * 1e9)
    with _install_fault_for_block(
        call, nth, sticky, err=0, limit=_NO_LIMIT, delay_ns=delay_ns
    ) as injected:
        yield injected


@contextmanager
def held(call: str, *, nth: int = 1, sticky: bool = True) -> Iterator[Injected]:
    """Hold the `nth` call and (with `sticky`) every later one until the block is left.

    A test can then examine an unfinished save. Do not wait for the end of that save in the block.

    Args:
        call: The name of the call; the module's docstring lists the names, and all can be held.
        nth: The number of the call, counted from 1 at the block's entry.
        sticky: Hold every later call too.

    Raises:
        ValueError: The call is unknown, or `nth` is below 1.
        RuntimeError: There are more than 16 faults.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    with _install_fault_for_block(
        call, nth, sticky, err=0, limit=_NO_LIMIT, delay_ns=_FOREVER_NS
    ) as injected:
        yield injected


# ---- the CUDA path without a GPU ----

_ENV_NAME = "STILLFRAME_LIBCUDA"
_MAX_VIOLATIONS = 64  # the fake driver describes this many violations
_REAL_NUMBER_OF = _device.device_number_of
_host_as_device_depth = 0  # how many blocks of `host_as_device` are entered
_capturing = False  # the last argument of `FakeDriver.capture`


class FakeDriver:
    """The controls of the fake CUDA driver (`tests/c/cuda/fake_cuda.h` lists them).

    Raises:
        RuntimeError: `STILLFRAME_LIBCUDA` does not name the fake driver.
    """

    def __init__(self) -> None:
        path = os.environ.get(_ENV_NAME, "")
        try:
            self._library = ctypes.CDLL(path or None)
            _ = self._library.fake_cuda_reset  # AttributeError: this is another library
        except (OSError, AttributeError):
            raise RuntimeError(
                f"{_ENV_NAME}={path!r} is not the fake CUDA driver: build it with `make build` and"
                f" set {_ENV_NAME}=build/libfake_cuda.so before stillframe first uses CUDA"
            ) from None
        self._library.fake_cuda_violation.restype = ctypes.c_char_p
        self._library.fake_cuda_stream.restype = ctypes.c_void_p
        for name in ("hits", "calls", "calls_here", "nr_violations", "live", "copied_bytes"):
            getattr(self._library, f"fake_cuda_{name}").restype = ctypes.c_int64

    def reset(self) -> None:
        """Clear faults, violations, delays and counts; revive a dead device."""
        self._library.fake_cuda_reset()

    def fail(self, call: str, *, nth: int = 1, sticky: bool = False, code: int) -> None:
        """Make the `nth` call from now on return the CUDA error `code`. With `sticky`, make every
        later call fail too. An error that loses the context kills the device.

        Args:
            call: The symbol of the driver's function, or "*" for any.
        """
        self._library.fake_cuda_fail(call.encode(), ctypes.c_uint64(nth), int(sticky), code)

    def fail_copy(self, nth: int, code: int) -> None:
        """Make the device die with `code` when the `nth` copy from now on completes."""
        self._library.fake_cuda_fail_copy(ctypes.c_uint64(nth), code)

    def delay(self, max_ns: int, seed: int = 1) -> None:
        """Pause for a random time before each operation of a stream."""
        self._library.fake_cuda_delay(ctypes.c_uint64(max_ns), ctypes.c_uint64(seed))

    def segments(self, nbytes: int) -> None:
        """Divide the device's memory into segments of `nbytes`. A batch of copies then refuses a
        copy across two segments, as with expandable segments. 0 removes the segments."""
        self._library.fake_cuda_segments(ctypes.c_uint64(nbytes))

    def hold(self, yes: bool) -> None:
        """Stop all streams if `yes`; otherwise let them run."""
        self._library.fake_cuda_hold(int(yes))

    def capture(self, yes: bool) -> None:
        """Set whether the driver and torch say that the current stream captures a graph."""
        global _capturing
        _capturing = yes
        self._library.fake_cuda_capture(None, int(yes))

    def stream(self) -> int:
        """Return the handle of a new stream on device 0, like that of `torch.cuda.Stream`."""
        return int(self._library.fake_cuda_stream(0))

    def freed(self, address: int, nbytes: int) -> None:
        """Report device memory as freed. It is a violation if a queued copy still reads it."""
        self._library.fake_cuda_freed(ctypes.c_void_p(address), ctypes.c_uint64(nbytes))

    def allow_pageable(self, yes: bool) -> None:
        """Allow copies to unregistered memory if `yes`; otherwise count them as violations."""
        self._library.fake_cuda_allow_pageable(int(yes))

    def calls(self, name: str = "*") -> int:
        """Return how often a call was made; "sync" counts all calls that wait for the device."""
        return int(self._library.fake_cuda_calls(name.encode()))

    def calls_here(self, name: str = "*") -> int:
        """Return how often this thread has made a call since it began."""
        return int(self._library.fake_cuda_calls_here(name.encode()))

    def live(self, what: str) -> int:
        """Return how many "streams", "events", "registered", "allocated" or "contexts" exist."""
        return int(self._library.fake_cuda_live(what.encode()))

    @property
    def hits(self) -> int:
        """Return how often a fault has changed a call."""
        return int(self._library.fake_cuda_hits())

    @property
    def copied_bytes(self) -> int:
        """Return the bytes copied so far."""
        return int(self._library.fake_cuda_copied_bytes())

    @property
    def violations(self) -> list[str]:
        """Return a sentence for each broken rule of the driver."""
        nr = min(int(self._library.fake_cuda_nr_violations()), _MAX_VIOLATIONS)
        return [self._library.fake_cuda_violation(ctypes.c_uint64(i)).decode() for i in range(nr)]


_DEVICE_BIT = 1 << 54  # FAKE_CUDA_DEVICE of the fake driver: above any process's address space
_real_address_of = torch.UntypedStorage.data_ptr


def _fake_device_number(device: torch.device) -> int:
    """Return the number of CUDA device 0, which is 1, for the host, and the usual number for any
    other device."""
    return 1 if device.type == "cpu" else _REAL_NUMBER_OF(device)


def _fake_device_address(storage: torch.UntypedStorage) -> int:
    """Return the fake driver's address of a host storage; 0 for a storage without memory."""
    address = _real_address_of(storage)
    if address == 0:
        return 0
    return address | _DEVICE_BIT


# Replacements of the functions that the observer calls for a tensor or its storage.
_OBSERVER_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "is_cpu": lambda tensor: False,
    "device_index": lambda tensor: 0,
    "is_shared": lambda storage: True,  # as for every storage on a CUDA device
    "data_ptr": _fake_device_address,
}
_originals: list[tuple[Any, str, Any]] = []  # (module, name, original) of each replaced function


@contextmanager
def host_as_device() -> Iterator[FakeDriver]:
    """Make saves, snapshots and loads treat host tensors as tensors on CUDA device 0.

    `STILLFRAME_LIBCUDA` must name the fake driver (`build/libfake_cuda.so`, made by `make build`).
    The current stream is the calling thread, where torch runs CPU work. Tensors get addresses at
    which the host has no memory, so that a read by the host kills the process. Saved files say that
    the tensors are on the CPU. Everything else takes the code path of GPU tensors. Blocks nest, and
    apply to all threads.

    Yields:
        The driver's controls.

    Raises:
        RuntimeError: `STILLFRAME_LIBCUDA` does not name the fake driver.
    """
    global _host_as_device_depth
    driver = FakeDriver()
    with _lock:
        if _host_as_device_depth == 0:
            _replace_device_functions()
        _host_as_device_depth += 1
    try:
        yield driver
    finally:
        with _lock:
            _host_as_device_depth -= 1
            if _host_as_device_depth == 0:
                for module, name, value in _originals:
                    setattr(module, name, value)
                for name in _OBSERVER_REPLACEMENTS:
                    _core.Observer.present(name, None)  # restores torch's own function


def _skeleton_replacements() -> dict[str, Any]:
    """Return replacements of functions that the C code calls for a tensor. They return what they
    would return if a host tensor were on device 0. The keys are fields of `TorchTypes`."""
    return {
        # `_memory_kind_of` returns 0 for host memory and 1 for a CUDA device.
        "where": lambda tensor: 1 if skeleton._memory_kind_of(tensor) == 0 else -1,
        "device_index": lambda tensor: 0,
        "data_ptr": _fake_device_address,
    }


def _replace_device_functions() -> None:
    """Replace every function that says where a tensor is. `_originals` keeps the originals."""
    for_skeleton = _skeleton_replacements()
    tree_dtypes = skeleton._plain_byte_dtypes()
    replacements: list[tuple[Any, str, Any]] = [  # (module, name, replacement)
        (skeleton, "_types", skeleton._make_torch_types(**for_skeleton)),
        (skeleton, "_tree_types", skeleton._make_torch_types(dtypes=tree_dtypes, **for_skeleton)),
        (_device, "device_number_of", _fake_device_number),
        (_device, "on_host", lambda tensor: False),
        (_device, "device_number_of_tensor", lambda tensor: _fake_device_number(tensor.device)),
        (_device, "address_of", _fake_device_address),
        (_device, "current_stream", lambda device: 0),
        (_device, "in_use", lambda: [0]),
        (_device, "has_cuda_device", lambda: True),
        (_device, "cuda_device_of_location", lambda location: torch.device("cpu")),
        (_device, "capturing", lambda: _capturing),
    ]
    _originals[:] = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, value in replacements:
        setattr(module, name, value)
    for name, function in _OBSERVER_REPLACEMENTS.items():
        _core.Observer.present(name, function)
