"""Engines, and the steps of one save: from a call to a ticket in the core.

`submit(engine, obj, path, options)` calls, in this order:

    paths.target     resolves the path, and refuses a path that cannot be saved to
    skeleton.build   makes the pickle and finds its storages (flat.build for safetensors)
    gate.defer       decides which storages are copied after the call
    lay_out          makes the header of safetensors, which depends on that decision
    _core.Ticket     makes the ticket
    save.launch      takes a slot, captures, and makes the next optimizer step wait for the rest
"""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import Any, cast

from stillframe import _core
from stillframe._base import budget, cpus, device, paths, sizes
from stillframe._base.birth import ForkGuard
from stillframe._base.calls import inside_call, no_garbage_collection
from stillframe._save import completion, ordered
from stillframe._save.core_save import CoreSave
from stillframe._save.handle import SaveHandle, SkippedSave, set_mirror, wait_for_end
from stillframe._save.options import (
    DEFAULT_BLOCK,
    DEFAULT_IN_FLIGHT,
    EngineStats,
    Limits,
    SaveOptions,
    Size,
    WhenBusy,
    nr_copiers,
)
from stillframe._tree import flat, skeleton
from stillframe._tree.skeleton import Skeleton
from stillframe._watch import gate
from stillframe.errors import BusyError, PoolExhaustedError, StillframeError

log = logging.getLogger("stillframe")

Path = str | os.PathLike[str]

# The bytes that `warm_up` takes with one call into the core. Signals are answered between calls.
_WARM_UP_STEP = 1 << 30


class Engine:
    """A pool of staging memory, copy and writer threads, and the bounds on their use.

    Sizes are bytes: an int, or a string such as "300MB" or "4GiB".

    Args:
        pool_bytes: Most memory the pool may take. By default `STILLFRAME_POOL_BYTES`, else half of
            the memory that the machine and the cgroup have left, divided by `LOCAL_WORLD_SIZE`.
            Memory is taken when it is first needed and kept for the next save.
        block_bytes: Size of the pool's blocks, a multiple of 4096.
        writer_threads: Threads that compute checksums and write; 2 by default.
        max_in_flight: Most saves that may be unfinished (not yet durable) at one time.
        when_busy: What `async_save` does when so many saves are unfinished: "wait", "skip" (the
            handle's state is "skipped"), or "raise" `BusyError`. `save` always waits.
        shared_memory: Make the pool of memory that other processes can map, even spawned ones, for
            `snapshot(tree, shared="spawn")`. Most systems give such memory small pages only.

    Raises:
        TypeError, ValueError: An option makes no sense, for example `pool_bytes < block_bytes`.
        OSError: With `shared_memory`: the system has no such memory (`memfd_create`), or refuses
            the process a file of that size or another descriptor.

    Use the engine as a context manager, or call `close()`. It belongs to the process that made it.
    """

    def __init__(
        self,
        *,
        pool_bytes: Size | None = None,
        block_bytes: Size = DEFAULT_BLOCK,
        writer_threads: int | None = None,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        when_busy: WhenBusy = "wait",
        shared_memory: bool = False,
    ) -> None:
        limits = Limits.of(
            pool_bytes, block_bytes, writer_threads, max_in_flight, when_busy, shared_memory
        )
        self._birth = ForkGuard("this Engine")
        self._limits = limits
        self._closed = False
        self._used = False
        cpus.spread()
        # Without pool_bytes, the core derives the pool's cap from what the system leaves.
        caps = budget.measure(_core.pools_hold()) if limits.pool_bytes == 0 else (0, 0)
        try:
            self._core = _core.Engine(
                limits.pool_bytes,
                limits.block_bytes,
                limits.writer_threads,
                limits.max_in_flight,
                limits.shared_memory,
                nr_copiers(),
                *caps,
            )
        except MemoryError:
            raise MemoryError(
                "the system has no address space for a pool of"
                f" {limits.pool_bytes or limits.block_bytes} bytes: give a smaller pool_bytes"
            ) from None
        except OSError as error:
            if not shared_memory:
                raise
            raise OSError(error.errno, _explain_shared_memory_error(error)) from None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an Engine belongs to the process that made it: make one over there")

    def __repr__(self) -> str:
        if self._birth.in_forked_child():
            return "<Engine of the parent process>"
        if self._closed:
            return "<Engine closed>"
        stats = self._core.stats()
        return (
            f"<Engine pool {sizes.binary(stats['pool_bytes'])} in blocks of"
            f" {sizes.binary(stats['block_bytes'])},"
            f" {sizes.binary(stats['committed_bytes'])} committed,"
            f" {sizes.binary(stats['leased_bytes'])} in use;"
            f" {stats['saves_in_flight']} of {self._limits.max_in_flight} saves in flight>"
        )

    def warm_up(self, nbytes: Size) -> None:
        """Take `nbytes` of memory now (at most `pool_bytes`), so that the first save is fast.

        If the process has used CUDA, the memory is pinned too, and copy threads are started for the
        devices in use. Memory that cannot be pinned is logged, and listed in the `fallbacks` of
        later saves. Progress is logged at INFO, once a GiB and at the end.

        Args:
            nbytes: An int, or a string such as "4GiB".

        Raises:
            MemoryError: The system does not have so much memory.
            StillframeError: The engine is closed.
        """
        target = sizes.parse(nbytes, "nbytes")
        core = core_of(self)
        self._used = True
        for number in device.in_use():
            problem = core.use_device(number)  # "" if the device can be used
            if problem:
                log.warning("stillframe: %s", problem)
        start, held_before = time.monotonic(), core.stats()["committed_bytes"]
        for size in (*range(_WARM_UP_STEP, target, _WARM_UP_STEP), target):
            if size < target and core.stats()["pool_bytes"] < size:
                continue  # the pool cannot grow to this size: go on with the last call
            core.warm_up(size)  # grows the pool to this size
            held, took_s = core.stats()["committed_bytes"], time.monotonic() - start
            _log_warm_up(held, held_before, target, took_s)

    def trim(self) -> None:
        """Give the memory of unused blocks back to the system.

        Raises:
            StillframeError: The engine is closed.
        """
        core_of(self).trim()

    def close(self) -> None:
        """Wait for the engine's saves and for removes, then end its threads and give the pool back.

        It raises no error of a save. May be called again.

        Raises:
            StillframeError: The caller is a CheckpointIO that stillframe wraps, inside a save or
                load.
        """
        self._birth.refuse_forked_child()
        ordered.refuse_in_external_work()
        with inside_call():
            self._closed = True
            self._core.close(None)

    def stats(self) -> EngineStats:
        """Return the engine's current figures; memory is in bytes.

        - `pool_bytes`, `block_bytes`: the cap of the pool, and the size of a block
        - `committed_bytes`: memory that the pool holds
        - `leased_bytes`: how much of it is in use; `retired_bytes`: how much is never used again
        - `saves_in_flight`, `saves_total`: numbers of saves
        - `driver`: a sentence about the CUDA driver
        """
        self._birth.refuse_forked_child()
        figures = {**self._core.stats(), "driver": self._core.driver()}
        return cast(EngineStats, {name: figures[name] for name in EngineStats.__annotations__})


# ---- what the package asks of an engine ----


def core_of(engine: Engine) -> _core.Engine:
    """Return the core's engine. Raise ForkError in a forked child, and StillframeError if the
    engine is closed."""
    engine._birth.refuse_forked_child()
    if engine._closed:
        raise StillframeError(
            "the engine was closed: make another one, or give no engine= to use"
            " stillframe.default_engine()"
        )
    return engine._core


def limits_of(engine: Engine) -> Limits:
    return engine._limits


def is_closed(engine: Engine) -> bool:
    return engine._closed


def is_used(engine: Engine) -> bool:
    """Return whether the engine has saved, taken a snapshot or been warmed up."""
    return engine._used


def note_use(engine: Engine) -> None:
    engine._used = True


def require_engine(engine: object) -> None:
    """Raise TypeError for an object that is no `Engine`."""
    if isinstance(engine, Engine):
        return
    if engine is Engine:
        raise TypeError(
            "engine has to be an Engine that was made, as in engine=Engine(): not the class"
        )
    raise TypeError(
        f"engine has to be a stillframe.Engine, not {engine!r}: tensors of every device go through"
        " any of them"
    )


def take_slot(engine: Engine, *, nested: bool, wait: bool = False) -> _core.Slot:
    """Return a slot of the engine for an external save. The caller gives the slot back.

    Args:
        nested: The thread is inside another of our calls, so this call must not wait for a slot.
        wait: Wait for a slot, whatever the engine's `when_busy` says.

    Raises:
        BusyError: No slot is free, and `when_busy` is not "wait".
        ForkError, StillframeError: See `core_of`.
    """
    core = core_of(engine)
    options = SaveOptions(wait_for_slot=wait)
    flags = options.flags(nested=nested, when_busy=engine._limits.when_busy)
    try:
        slot = _core.Slot(core, flags)
    except BusyError:
        raise _busy_error(engine) from None
    engine._used = True
    return slot


def describe_pool_usage(engine: Engine) -> str:
    """Return sentences about the users of the pool's memory, for an error message."""
    stats = engine._core.stats()
    by_saves, leased = stats["save_bytes"], stats["leased_bytes"]
    return (
        f"The pool has {sizes.binary(stats['pool_bytes'])} in blocks of"
        f" {sizes.binary(stats['block_bytes'])}: snapshots hold"
        f" {sizes.binary(max(0, leased - by_saves))} of it, saves under way"
        f" {sizes.binary(by_saves)}. Release snapshots (and the tensors of their trees), or give"
        " the pool more memory: Engine(pool_bytes=...), or STILLFRAME_POOL_BYTES for the default"
        " engine."
    )


def _explain_shared_memory_error(error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return (
            "shared_memory=True: the pool would be a file longer than the process may have"
            " (RLIMIT_FSIZE, ulimit -f): give a smaller pool_bytes"
        )
    return (
        f"shared_memory=True: the system gives no memory that processes can share"
        f" ({error.strerror}). It needs memfd_create, which kernels have since 3.17, and one"
        " descriptor"
    )


# ---- one save ----


def submit(engine: Engine, obj: object, path: Path, options: SaveOptions) -> SaveHandle:
    """Start a save, and return its handle: a `SkippedSave` if the engine is busy and may skip.

    Raises:
        Exception: See `stillframe.async_save`.
    """
    entered = time.perf_counter()
    began = _core.trace_begin()
    ordered.refuse_in_external_work()  # because the call may wait for a slot
    _refuse_swapped_arguments(obj, path)
    with inside_call() as nested:
        core = core_of(engine)
        if options.stream:
            target = paths.make_remote_target(path)
        else:
            target = paths.target(
                path,
                follow_link=options.follow_link,
                create_parents=options.create_parents,
                durable=options.durable,
            )
        with no_garbage_collection():
            if options.format == "safetensors":
                tree: Skeleton = flat.build(obj, options.metadata)
            else:
                tree = skeleton.build(obj)
            deferral = gate.defer(tree, overlap=options.overlap)
            # A stream sends the file in order, so what one lane copies later must be adjacent.
            members = tree.lay_out(by_lane=options.stream)  # None for torch's format
        flags = options.flags(nested=nested, when_busy=engine._limits.when_busy)
        completion.thread.start()
        shown = options.shown or target.shown
        ticket = _core.Ticket(
            core,
            target.directory,
            target.name,
            tree.data,
            tree.rows,
            flags,
            target.file_system,
            members,
        )
        save = CoreSave(
            ticket,
            tree,
            deferral,
            path=shown,
            given=path,
            on_durable=options.on_durable,
            entered=entered,
            ordered=options.ordered,
        )
        set_mirror(save, options.mirror)
        if options.before_launch is not None:
            options.before_launch(save)
        _core.trace_end(_core.TRACE_PLAN, began, ticket.number, tree.num_tensors)
        try:
            save.launch()
        except BusyError:
            if engine._limits.when_busy == "skip":
                return SkippedSave(shown)
            raise _busy_error(engine) from None
        except PoolExhaustedError:
            raise PoolExhaustedError(
                f"{shown} was not saved: the save needs memory of the pool that only"
                f" snapshots could give back. {describe_pool_usage(engine)}"
            ) from None
        engine._used = True
        _core.trace_end(_core.TRACE_CALL, began, ticket.number, tree.num_tensors)
        # At exit nobody settles the save after this call.
        if completion.thread.drain_is_over:
            wait_for_end(save)
        for sentence in tree.fallbacks:
            log.info("stillframe: %s: %s", shown, sentence)
        return save


def _refuse_swapped_arguments(obj: object, path: object) -> None:
    """Raise TypeError if the arguments look like `save(path, obj)`."""
    if isinstance(obj, (str, os.PathLike)) and not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"a path has to be a str or os.PathLike, not {type(path).__name__}: the arguments seem"
            " to be swapped, the object comes first, then the path"
        )


def _busy_error(engine: Engine) -> BusyError:
    most = engine._limits.max_in_flight
    names = ", ".join(save.path for save in list(completion.in_flight.values()))
    return BusyError(
        f"as many saves are under way as max_in_flight={most} allows ({names}). Wait for one with"
        " handle.result(), or make the engine with a larger max_in_flight or when_busy='wait'."
    )


def _log_warm_up(held: int, held_before: int, target: int, seconds: float) -> None:
    """Log the progress of a warm-up that began `seconds` ago.

    Args:
        held, held_before: The bytes that the pool holds now, and before the warm-up.
        target: The bytes that the user asked for.
    """
    speed = ""
    if held > held_before and seconds:
        speed = f" ({(held - held_before) / 1e9 / seconds:.1f} GB/s)"
    log.info(
        "stillframe: warm-up: the pool holds %s, %s were asked for%s",
        sizes.binary(held),
        sizes.binary(target),
        speed,
    )
