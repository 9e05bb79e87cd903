"""Helpers for tests: make the system calls under a save fail, fall short, wait, or take their time.

The C core makes every call for files, memory, threads and time through one table. Inside a
``with fault(...)``, ``held(...)`` or ``slow(...)`` block, wrappers in that table count the calls
and do to them what the block says; outside they pass everything on.

    with fault("fdatasync", err=errno.EIO) as injected:
        with pytest.raises(stillframe.SaveError):
            stillframe.save(state, path)
    assert injected.hits == 1

Calls are named as in ``csrc/core/base/sys.h``: "open", "close", "pread", "pwrite", "fdatasync",
"fsync", "fallocate", "flock", "set_flags", "fstat", "lstat", "realpath", "faccessat", "rename",
"unlink", "rmdir",
"opendir", "mmap", "munmap", "mprotect", "madvise", "mincore", "malloc", "calloc", "realloc",
"thread_create", "set_nice", "get_affinity", "set_affinity", and "*" for any of these. "readdir",
"closedir", "free", "thread_join", "clock_gettime" and the copies of tensor bytes, "capture_copy"
(during the call) and "lane_copy" (after it), can only be held or slow.

Faults belong to the process, not to a thread. Blocks nest; up to 16 faults act at a time. Enter
the first one while no save is in flight: it exchanges the table.
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

_FOREVER_NS = (1 << 64) - 1  # SFR_FOREVER
_LIMITS = {"half": -2, "all but one": -3}
_lock = threading.Lock()
_depth = 0


class Injected:
    """What has happened since the outermost block was entered."""

    @property
    def hits(self) -> int:
        """How often a fault, of any block, has acted."""
        return _core.inject_hits()

    def calls(self, call: str = "*") -> int:
        """How often a call was made, failed ones included; "*" counts all that can fail.

        An unknown name counts 0.
        """
        return _core.inject_calls(call)


@contextmanager
def _injected(
    call: str, nth: int, sticky: bool, err: int, limit: int, delay_ns: int
) -> Iterator[Injected]:
    global _depth
    with _lock:
        _core.inject_install()
        if _depth == 0:
            _core.inject_clear()
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
    """Inside the block, makes the `nth` call (counted from 1 at its entry) fail with `err`.

    Args:
        call: which call, see the module.
        nth: which of its calls from now on.
        sticky: also every later one.
        err: the errno it fails with. A failed call has done nothing, but for "close".
        limit: instead of failing, "pread" and "pwrite" transfer at most that many bytes, or
            "half", or "all but one" of those asked for; `err` is then not used. 0 transfers none
            and reports no error.

    Raises:
        ValueError: an unknown call, one that cannot fail, `nth` below 1 or a `limit` that is none.
        RuntimeError: more than 16 faults at a time.
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
        nr_bytes = -1
    else:
        if limit < 0:
            raise ValueError(f"limit is a number of bytes, got {limit}")
        nr_bytes = limit
    if limit is not None and call not in ("pread", "pwrite"):
        raise ValueError(f"only 'pread' and 'pwrite' can fall short, not {call!r}")
    with _injected(call, nth, sticky, 0 if limit is not None else err, nr_bytes, 0) as injected:
        yield injected


@contextmanager
def slow(call: str, seconds: float, *, nth: int = 1, sticky: bool = True) -> Iterator[Injected]:
    """Inside the block, the `nth` call and (with `sticky`) every later one sleeps first.

    Args:
        call: which call, see the module; here all of them will do.
        seconds: how long each sleeps. Leaving the block does not cut short a sleep that has begun.
        nth: which of its calls from now on, counted from 1.
        sticky: also every later one.

    Raises:
        ValueError: an unknown call, `nth` below 1, or `seconds` below 0.
        RuntimeError: more than 16 faults at a time.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    if seconds < 0:
        raise ValueError(f"seconds must not be negative, got {seconds}")
    with _injected(call, nth, sticky, 0, -1, round(seconds * 1e9)) as injected:
        yield injected


@contextmanager
def held(call: str, *, nth: int = 1, sticky: bool = True) -> Iterator[Injected]:
    """Inside the block, the `nth` call and (with `sticky`) every later one stands still.

    So what a save does meanwhile can be looked at without a race: it goes on when the block is
    left. A block that waits for the save itself never ends.

    Args:
        call: which call, see the module; here all of them will do.
        nth: which of its calls from now on, counted from 1.
        sticky: also every later one.

    Raises:
        ValueError: an unknown call, or `nth` below 1.
        RuntimeError: more than 16 faults at a time.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    with _injected(call, nth, sticky, 0, -1, _FOREVER_NS) as injected:
        yield injected


# ---- the CUDA path without a GPU ----

_VARIABLE = "STILLFRAME_LIBCUDA"
_REAL_PLACE_OF = _device.place_of
_shown_depth = 0
_capturing = False


class FakeDriver:
    """The controls of the fake CUDA driver (`tests/c/cuda/fake_cuda.h` has the list).

    Raises:
        RuntimeError: `STILLFRAME_LIBCUDA` does not name it.
    """

    def __init__(self) -> None:
        path = os.environ.get(_VARIABLE, "")
        try:
            self._library = ctypes.CDLL(path or None)
            _ = self._library.fake_cuda_reset
        except (OSError, AttributeError):
            raise RuntimeError(
                f"{_VARIABLE}={path!r} is not the fake CUDA driver: build it with `make build` and"
                f" set {_VARIABLE}=build/libfake_cuda.so before stillframe first uses CUDA"
            ) from None
        self._library.fake_cuda_violation.restype = ctypes.c_char_p
        self._library.fake_cuda_stream.restype = ctypes.c_void_p
        for name in ("hits", "calls", "calls_here", "nr_violations", "live", "copied_bytes"):
            getattr(self._library, f"fake_cuda_{name}").restype = ctypes.c_int64

    def reset(self) -> None:
        """No faults, violations, delays and counts; a dead device lives again."""
        self._library.fake_cuda_reset()

    def fail(self, call: str, *, nth: int = 1, sticky: bool = False, code: int) -> None:
        """Has the `nth` call of that name (its exact symbol, or "*") return a CUDA error `code`;
        with `sticky` every later one too. One after which a context is lost kills the device."""
        self._library.fake_cuda_fail(call.encode(), ctypes.c_uint64(nth), int(sticky), code)

    def fail_copy(self, nth: int, code: int) -> None:
        """Has the device die of `code` when the `nth` copy from now on lands."""
        self._library.fake_cuda_fail_copy(ctypes.c_uint64(nth), code)

    def delay(self, max_ns: int, seed: int = 1) -> None:
        """Pauses of random length before each thing that a stream does."""
        self._library.fake_cuda_delay(ctypes.c_uint64(max_ns), ctypes.c_uint64(seed))

    def segments(self, nbytes: int) -> None:
        """Has memory of the device consist of segments that long, as an allocator that expands them
        has it: batches refuse a copy across the edge of one. 0: of none."""
        self._library.fake_cuda_segments(ctypes.c_uint64(nbytes))

    def hold(self, yes: bool) -> None:
        """Whether the streams stand still."""
        self._library.fake_cuda_hold(int(yes))

    def capture(self, yes: bool) -> None:
        """Whether the current stream is said to capture a graph."""
        global _capturing
        _capturing = yes
        self._library.fake_cuda_capture(None, int(yes))

    def stream(self) -> int:
        """The handle of a new stream on device 0, such as `torch.cuda.current_stream()` has one."""
        return int(self._library.fake_cuda_stream(0))

    def freed(self, address: int, nbytes: int) -> None:
        """Says that memory of the device is freed: a violation while a copy is to read from it."""
        self._library.fake_cuda_freed(ctypes.c_void_p(address), ctypes.c_uint64(nbytes))

    def allow_pageable(self, yes: bool) -> None:
        """Whether a copy to memory that is not registered is no violation."""
        self._library.fake_cuda_allow_pageable(int(yes))

    def calls(self, name: str = "*") -> int:
        """How often a call was made; "sync" counts those that wait for the device."""
        return int(self._library.fake_cuda_calls(name.encode()))

    def calls_here(self, name: str = "*") -> int:
        """How often this thread has made a call since it began."""
        return int(self._library.fake_cuda_calls_here(name.encode()))

    def live(self, what: str) -> int:
        """How many "streams", "events", "registered", "allocated" or "contexts" there are."""
        return int(self._library.fake_cuda_live(what.encode()))

    @property
    def hits(self) -> int:
        """How many faults have acted."""
        return int(self._library.fake_cuda_hits())

    @property
    def copied_bytes(self) -> int:
        """Bytes that have landed."""
        return int(self._library.fake_cuda_copied_bytes())

    @property
    def violations(self) -> list[str]:
        """What broke a rule of the driver's, as sentences."""
        nr = min(int(self._library.fake_cuda_nr_violations()), 64)
        return [self._library.fake_cuda_violation(ctypes.c_uint64(i)).decode() for i in range(nr)]


_DEVICE = 1 << 54  # FAKE_CUDA_DEVICE: no process has memory so far up
_real_address_of = torch.UntypedStorage.data_ptr


def _place_on_device(device: torch.device) -> int:
    return 1 if device.type == "cpu" else _REAL_PLACE_OF(device)


def _device_address(storage: torch.UntypedStorage) -> int:
    """Where the driver finds the storage, and the host nothing."""
    address = _real_address_of(storage)
    return address and address | _DEVICE


@contextmanager
def host_as_device() -> Iterator[FakeDriver]:
    """Inside the block, saves, snapshots and loads take host tensors for ones on CUDA device 0.

    `STILLFRAME_LIBCUDA` has to name the fake driver (`build/libfake_cuda.so`, left by `make
    build`), whose "current stream" is the calling thread: that is where torch runs CPU work.
    Whoever asks hears what torch says of CUDA tensors, and addresses where the host has no memory:
    to read there kills the process. What is saved says in the file that it lives on the CPU, as it
    does. Everything else is the path that tensors of a GPU take. Blocks nest; saves that begin in
    other threads are meant too.

    Yields:
        The driver's controls.

    Raises:
        RuntimeError: `STILLFRAME_LIBCUDA` does not name the fake driver.
    """
    global _shown_depth
    driver = FakeDriver()
    with _lock:
        if _shown_depth == 0:
            _show_on_device()
        _shown_depth += 1
    try:
        yield driver
    finally:
        with _lock:
            _shown_depth -= 1
            if _shown_depth == 0:
                for module, name, value in _hidden:
                    setattr(module, name, value)
                for name in _SEEN:
                    _core.Observer.present(name, None)


def _said() -> dict[str, Any]:
    """What a skeleton asks of torch."""
    return {
        "place": lambda tensor: 1 if skeleton._place(tensor) == 0 else -1,
        "device_index": lambda tensor: 0,
        "data_ptr": _device_address,
    }


def _show_on_device() -> None:
    said = _said()
    shown: list[tuple[Any, str, Any]] = [
        (skeleton, "_types", skeleton._make_types(**said)),
        (skeleton, "_tree_types", skeleton._make_types(dtypes=skeleton._whole_dtypes(), **said)),
        (_device, "place_of", _place_on_device),
        (_device, "on_host", lambda tensor: False),
        (_device, "place_of_tensor", lambda tensor: _place_on_device(tensor.device)),
        (_device, "address_of", _device_address),
        (_device, "current_stream", lambda device: 0),
        (_device, "in_use", lambda: [0]),
        (_device, "may_be_loaded_to", lambda: True),
        (_device, "of_location", lambda location: torch.device("cpu")),
        (_device, "capturing", lambda: _capturing),
    ]
    _hidden[:] = [(module, name, getattr(module, name)) for module, name, _ in shown]
    for module, name, value in shown:
        setattr(module, name, value)
    for name, answer in _SEEN.items():
        _core.Observer.present(name, answer)


# What an observer asks of torch, and hears of a tensor on a device and of its storage.
_SEEN: dict[str, Callable[[Any], Any]] = {
    "is_cpu": lambda tensor: False,
    "device_index": lambda tensor: 0,
    "is_shared": lambda storage: True,
    "data_ptr": _device_address,
}
_hidden: list[tuple[Any, str, Any]] = []
