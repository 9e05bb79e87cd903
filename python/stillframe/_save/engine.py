"""Engines and the functions around them: the way from a call to a ticket in the core.

async_save(obj, path)
  paths.target     where the file goes; refuses what is no place for one
  skeleton.build   the pickle, and the storages it refers to
  gate.defer       which of them may be copied later
  core Ticket      slot, capture, launch
  gate.track       the next optimizer step waits for the rest
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import paths
from stillframe._base.calls import inside, no_collection
from stillframe._base.trace import end_at_exit
from stillframe._save import completion, gate
from stillframe._save import ordered as _ordered
from stillframe._save.handle import SaveHandle, SaveReport, take_failures
from stillframe._tree import skeleton
from stillframe.errors import BusyError, StillframeError

log = logging.getLogger("stillframe")

Path = str | os.PathLike[str]

_PAGE = 4096
_DEFAULT_BLOCK = 16 << 20
_DEFAULT_WRITERS = 2
_WARM_UP_PIECE = 1 << 30
_WHEN_BUSY = ("wait", "skip", "raise")
_POOL_VARIABLE = "STILLFRAME_POOL_BYTES"
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


# What an option may be at most: beyond, it is a slip of the keyboard, and would wrap in the core.
_MOST_BYTES = 1 << 46  # half of the address space that Linux gives a process
_MOST_BLOCKS = 1 << 28
_MOST_WRITERS = 256
_MOST_IN_FLIGHT = 1 << 16


def _positive(name: str, value: object, most: int = _MOST_BYTES) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} has to be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} has to be at least 1, not {value}")
    if value > most:
        raise ValueError(f"{name} has to be at most {most}, not {value}")
    return value


def _pool_bytes_from_environment() -> int | None:
    text = os.environ.get(_POOL_VARIABLE, "").strip()
    if not text:
        return None
    digits = text.rstrip("BKMGTi ").strip()
    unit = text[len(digits) :].strip()
    if not digits.isdigit() or unit not in _UNITS:
        raise ValueError(
            f"{_POOL_VARIABLE}={text!r} is no size: give bytes, or a number with KiB, MiB or GiB"
        )
    return _positive(_POOL_VARIABLE, int(digits) * _UNITS[unit])


class Engine:
    """A pool of staging memory, a copying lane, writer threads, and the bounds on their use.

    Args:
        pool_bytes: Most memory the pool may take, in bytes. By default `STILLFRAME_POOL_BYTES`,
            else half of what the machine and the cgroup leave, divided by `LOCAL_WORLD_SIZE`.
            Memory is taken when it is first needed and kept for the next save.
        block_bytes: Size of the pool's blocks, a multiple of 4096.
        writer_threads: Threads that checksum and write; 2 by default.
        max_in_flight: Saves that may be not yet durable.
        when_busy: What a save does when that many are: "wait", "skip" (the handle's state is
            "skipped"), or "raise" `BusyError`.

    Raises:
        TypeError, ValueError: An option that makes no sense, `pool_bytes < block_bytes` among them.

    Use it as a context manager, or call `close()`. It belongs to the process that made it.
    """

    def __init__(
        self,
        *,
        pool_bytes: int | None = None,
        block_bytes: int = _DEFAULT_BLOCK,
        writer_threads: int | None = None,
        max_in_flight: int = 2,
        when_busy: str = "wait",
    ) -> None:
        source = "pool_bytes"
        if pool_bytes is None:
            pool_bytes, source = _pool_bytes_from_environment(), _POOL_VARIABLE
        else:
            _positive("pool_bytes", pool_bytes)
        if _positive("block_bytes", block_bytes) % _PAGE:
            raise ValueError(f"block_bytes has to be a multiple of {_PAGE}, not {block_bytes}")
        if pool_bytes is not None and pool_bytes < block_bytes:
            raise ValueError(
                f"{source} ({pool_bytes} bytes) is less than one block: give at least block_bytes"
                f" ({block_bytes} bytes)"
            )
        if pool_bytes is not None and pool_bytes // block_bytes > _MOST_BLOCKS:
            raise ValueError(
                f"{source} ({pool_bytes} bytes) is more than {_MOST_BLOCKS} blocks of"
                f" {block_bytes} bytes: give larger block_bytes"
            )
        if when_busy not in _WHEN_BUSY:
            raise ValueError(
                f"when_busy has to be one of {', '.join(map(repr, _WHEN_BUSY))}, not {when_busy!r}"
            )
        writers = (
            _DEFAULT_WRITERS
            if writer_threads is None
            else _positive("writer_threads", writer_threads, _MOST_WRITERS)
        )
        in_flight = _positive("max_in_flight", max_in_flight, _MOST_IN_FLIGHT)
        self._when_busy = when_busy
        self._max_in_flight = max_in_flight
        self._closed = False
        try:
            self._core = _core.Engine(pool_bytes or 0, block_bytes, writers, in_flight)
        except MemoryError:
            raise MemoryError(
                f"the system has no address space for a pool of {pool_bytes or block_bytes} bytes:"
                " give a smaller pool_bytes"
            ) from None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def warm_up(self, nbytes: int) -> None:
        """Takes memory for `nbytes` (at most the cap) now, so that the first save does not have to.

        In a process that has used CUDA the memory is pinned too, and the lanes of the devices it
        has used are made. What cannot be pinned is logged, and in the reports of later saves.

        Raises:
            MemoryError: The system has not that much.
            StillframeError: The engine is closed.
        """
        nbytes = _positive("nbytes", nbytes)
        for device in _device.in_use():
            if why := self._core.use_device(device):
                log.warning("stillframe: %s", why)
        # A piece at a time: between two of them signals are answered. What has memory is skipped.
        for upto in range(_WARM_UP_PIECE, nbytes, _WARM_UP_PIECE):
            if self._core.stats()["pool_bytes"] < upto:
                break
            self._core.warm_up(upto)
        self._core.warm_up(nbytes)

    def trim(self) -> None:
        """Gives the memory of blocks that are not in use back to the system."""
        self._core.trim()

    def close(self) -> None:
        """Waits for the engine's saves and for removes, then ends its threads and gives the pool
        back.

        Raises none of the saves' errors (their handles and `wait_all` do). May be called again.

        Raises:
            StillframeError: A CheckpointIO that stillframe wraps calls it in the middle of its work.
        """
        _ordered.refuse_inside()
        with inside():
            self._closed = True
            self._core.close(None)

    def stats(self) -> dict[str, int | str]:
        """Figures of the moment: `pool_bytes`, `block_bytes`, `committed_bytes` (memory the pool
        holds), `leased_bytes` (of it, in use), `retired_bytes` (never to be used again),
        `saves_in_flight`, `saves_total`, and `driver`, a sentence."""
        return {**self._core.stats(), "driver": self._core.driver()}

    def _submit(
        self,
        obj: object,
        path: Path,
        *,
        overlap: bool = True,
        durable: bool = True,
        check_mutation: bool = False,
        on_durable: Callable[[Any, SaveReport], object] | None = None,
        follow_link: bool = True,
        create_parents: bool = False,
    ) -> SaveHandle:
        entered = time.perf_counter()
        began = _core.trace_begin()
        if on_durable is not None and not callable(on_durable):
            raise TypeError(f"on_durable has to be callable, not {type(on_durable).__name__}")
        _ordered.refuse_inside()  # it might wait for a slot
        with inside() as nested:
            self._core.stats()  # refuses a child's use of its parent's engine
            target = paths.target(
                path, follow_link=follow_link, create_parents=create_parents, durable=durable
            )
            with no_collection():
                tree = skeleton.build(obj)
                deferral = gate.defer(tree, overlap=overlap)
            flags = (
                (_core.SAVE_DURABLE if durable else 0)
                | (_core.SAVE_NESTED if nested else 0)
                | (_core.SAVE_CHECK_BYTES if check_mutation else 0)
                | (_core.SAVE_NO_WAIT if self._when_busy != "wait" else 0)
            )
            handle = SaveHandle(target.shown)
            handle._given_path = path
            handle._on_durable = on_durable
            handle._skeleton = tree
            handle._num_tensors = tree.num_tensors
            handle._devices = tree.devices
            handle._fallbacks = list(tree.fallbacks)
            handle._entered_to_ticket_s = time.perf_counter() - entered
            completion.completion.start()
            ticket = _core.Ticket(
                self._core, target.directory, target.name, tree.data, tree.rows, flags
            )
            handle._ticket = ticket
            _core.trace_end(_core.TRACE_PLAN, began, ticket.number, tree.num_tensors)
            if deferral.indices:
                handle._deferral = deferral
            try:
                completion.in_flight[ticket.number] = handle
                ticket.submit(_device.streams(tree.devices))
            except BaseException as error:
                if ticket.report()["launched_after_ns"] >= 0:
                    # Ctrl-C came just after. The save goes on; its verdict and its sources are
                    # the handle's business, and later saves stand behind it.
                    _after_launch(handle, tree, deferral)
                    raise
                completion.in_flight.pop(ticket.number, None)
                deferral.close()
                handle._ticket = None
                if isinstance(error, BusyError) and self._when_busy == "skip":
                    handle._settled = True
                    handle._skeleton = handle._on_durable = None
                    return handle
                raise
            _after_launch(handle, tree, deferral)
            handle._blocked_s = time.perf_counter() - entered
            _core.trace_end(_core.TRACE_CALL, began, ticket.number, tree.num_tensors)
            if completion.completion.over:
                handle.settle_here()
            for sentence in tree.fallbacks:
                log.info("stillframe: %s: %s", target.shown, sentence)
            return handle


def _after_launch(handle: SaveHandle, tree: skeleton.Skeleton, deferral: gate.Deferral) -> None:
    """Steps wait for what is still to be copied; what is not is let go of."""
    if deferral.indices:
        gate.track(handle)
        if handle._copied:  # the completion thread said so before this line
            gate.untrack(handle)
    else:
        deferral.close()
        if not tree.devices:  # those are still being copied
            handle._release_sources()


# ---- the default engine ----

_lock = threading.RLock()
_default: Engine | None = None
_default_options: dict[str, Any] = {}


def default_engine() -> Engine:
    """The process's own engine, made at its first use. A forked child gets one of its own."""
    global _default
    with _lock:
        if _default is None or _default._closed:
            _default = Engine(**_default_options)
        return _default


def configure(**engine_options: Any) -> None:
    """Sets the options of the default engine (those of `Engine`) before its first use.

    Raises:
        StillframeError: The default engine is in use already.
        TypeError, ValueError: As `Engine` does.
    """
    with _lock:
        if _default is not None and not _default._closed:
            raise StillframeError(
                "configure() has to come before the first use of the default engine"
            )
        Engine(**engine_options).close()  # refuses what an engine would refuse
        _default_options.clear()
        _default_options.update(engine_options)


# ---- the functions ----


def async_save(
    obj: object,
    path: Path,
    *,
    overlap: bool = True,
    durable: bool = True,
    check_mutation: bool = False,
    on_durable: Callable[[Any, SaveReport], object] | None = None,
    engine: Engine | None = None,
) -> SaveHandle:
    """Saves `obj` to `path` as `torch.save` would, without stopping training. The file holds the
    state as it is now.

    What only an optimizer's step changes is copied after the call, under the next forward and
    backward; the next step waits for the copy by itself. Everything else is copied before the call
    returns. See "What a save promises" in README.

    Args:
        obj: Anything `torch.save` takes.
        path: A local path. A link is followed, a parent directory has to be there.
        overlap: False copies everything inside the call.
        durable: Sync the file and its directory. False gives up power failures: after one the path
            holds the old file, the new one, or a damage that `load` notices.
        check_mutation: Compare a checksum of all deferred bytes at the call and when copied, to
            find code that writes at the wrong time. Slow.
        on_durable: Called as `on_durable(path, report)` on a thread of its own when the file is
            durable.
        engine: The engine to use, `default_engine()` by default.

    Raises:
        TypeError, ValueError: Unusable arguments, a `scheme://` path among them.
        SaveError: (phase "open") The parent is missing, or the path is a directory or no regular
            file.
        BusyError, ForkError, StillframeError: See `Engine`.
        Exception: What `torch.save` raises for an object it cannot save.
    """
    return (engine or default_engine())._submit(
        obj,
        path,
        overlap=overlap,
        durable=durable,
        check_mutation=check_mutation,
        on_durable=on_durable,
    )


def save(
    obj: object, path: Path, *, durable: bool = True, engine: Engine | None = None
) -> SaveReport | None:
    """Saves `obj` to `path` and waits until it is durable. Raises and returns what
    `async_save(...).result()` does."""
    handle = async_save(obj, path, overlap=False, durable=durable, engine=engine)
    return handle.result()


def remove(path: Path) -> None:
    """Removes a file, link or directory tree, in the order of submission; returns at once.

    It runs when every save submitted before it has ended, and only if the last of them became
    durable: otherwise the name stays and a warning is logged. So removing an old checkpoint after
    saving a new one never leaves fewer than one. A missing name is no error.
    """
    key = paths.key(path, follow_link=False)
    completion.completion.start()
    _core.log_remove(key)
    if completion.completion.over and not _ordered.is_inside():
        _core.log_drain(None)


def exists(path: Path) -> bool:
    """Whether `path` will be there when the saves and removes submitted so far have ended."""
    known = _core.log_exists(paths.key(path, follow_link=False))
    if known < 0 and os.path.islink(path):
        known = _core.log_exists(paths.key(path, follow_link=True))
    return os.path.exists(path) if known < 0 else bool(known)


def wait_all(timeout: float | None = None) -> None:
    """Waits until every save and remove of the process has ended; raises the first error nobody has
    collected.

    Raises:
        TimeoutError: `timeout` seconds passed.
    """
    _ordered.refuse_inside()
    with inside():
        if not _core.log_drain(timeout):
            raise TimeoutError(f"{_core.log_pending()} saves and removes have not ended yet")
        _settle_all()
    for error in take_failures():
        raise error


def wait_for_path(path: Path, *, follow_link: bool = True) -> None:
    """Waits until no save or remove of `path` that was submitted before is pending."""
    with contextlib.suppress(OSError):  # whoever reads it next says why it cannot
        os.close(open_in_order(path, follow_link=follow_link))


def open_in_order(path: Path, *, follow_link: bool = True) -> int:
    """Waits as `wait_for_path` does and returns a descriptor of what the path is at that point of
    the log.

    Raises:
        OSError: As `os.open`.
    """
    _ordered.refuse_inside()
    with inside():
        if follow_link and os.path.islink(path):
            # It may be about to become another link.
            with contextlib.suppress(OSError):
                os.close(_core.LogLoad(paths.key(path, follow_link=False)).open())
        load = _core.LogLoad(paths.key(path, follow_link=follow_link))
        try:
            return load.open()
        except OSError as error:
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


# ---- the end of the process ----


def _announce_wait() -> None:
    handles = [handle for handle in list(completion.in_flight.values()) if not handle.done()]
    if handles:
        names = ", ".join(handle.path for handle in handles)
        _say(f"stillframe: waiting for {names} to reach the disk")
    elif not _core.log_drain(0.2):  # an entry leaves the log a moment after its save has ended
        _say("stillframe: waiting for removes of checkpoints")


def _warn_once() -> None:
    _say("stillframe: still writing; Ctrl-C again gives up and leaves the old files")


def _give_up() -> None:
    for handle in list(completion.in_flight.values()):
        handle.cancel()
    _say("stillframe: given up")


def _drain_at_exit() -> None:
    """Saves in flight finish. Says what is waited for; a second Ctrl-C gives the rest up."""
    interrupts = 1 if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) else 0
    steps: list[Callable[[], object]] = [
        completion.completion.begin_exit,
        _announce_wait,
        lambda: _core.log_drain(None),
        _settle_all,
        completion.callbacks.finish,
        lambda: _core.log_drain(None),  # what the callbacks saved
        _close_default,
        _core.log_stop,
        completion.completion.stop,
        end_at_exit,  # saves that finish here are still in the timeline
    ]
    while steps:
        try:
            steps[0]()
            del steps[0]
        except KeyboardInterrupt:
            interrupts += 1
            steps.insert(0, _give_up if interrupts > 1 else _warn_once)
    _settle_all()
    for error in take_failures(first_only=False):
        _say(f"stillframe: a save failed: {error}")


def _settle_all() -> None:
    for handle in list(completion.in_flight.values()):
        handle.done()


def _close_default() -> None:
    if _default is not None:
        _default.close()


def _say(sentence: str) -> None:
    if sys.stderr is not None:
        print(sentence, file=sys.stderr, flush=True)


def _forked() -> None:
    """In the child: a new default engine at its first use; the parent's is left alone."""
    global _default, _lock
    _lock = threading.RLock()
    _default = None


atexit.register(_drain_at_exit)
os.register_at_fork(after_in_child=_forked)
