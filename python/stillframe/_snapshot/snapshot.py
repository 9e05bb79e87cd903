"""Implements `snapshot`: copies a tree's tensors to the CPU, into memory of an engine's pool.

    snapshot(tree)
      Tree            finds the storages under the tree
      gate.defer      decides which of them may be copied later (with overlap=True)
      _core.Snapshot  leases memory of the pool and copies
      Tree            builds the same tree over the copies

Lanes copy deferred storages and storages on CUDA devices after the call. `Snapshot.tree` and
`Snapshot.wait` wait for these copies. The call waits too if the tree has sparse tensors, which
check their contents when they are made.

The tensors of the new tree keep the memory of the pool, even if the `Snapshot` is dropped.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import torch

from stillframe import _core
from stillframe._base import sizes
from stillframe._base.arguments import check_booleans, seconds
from stillframe._base.birth import ForkGuard
from stillframe._base.calls import inside_call
from stillframe._base.distributed import memory_of
from stillframe._save import completion, ordered
from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine, core_of, describe_pool_usage, limits_of, note_use
from stillframe._snapshot import loans
from stillframe._snapshot.copy import Copy
from stillframe._snapshot.holds import call_at_end, is_unforked_process
from stillframe._tree.walk import Tree, paths
from stillframe._watch import gate
from stillframe.errors import ForkError, PoolExhaustedError, StillframeError

log = logging.getLogger("stillframe")

T = TypeVar("T")
Shared = Literal[False, True, "spawn"]

# The longest wait for memory, in seconds, inside external work of the log. Saves that hold the
# memory may wait for that work, so the wait must end.
_EXTERNAL_WORK_WAIT_S = 10.0


class Snapshot(Generic[T]):
    """A tree of CPU tensors over memory of the pool, made by `snapshot`.

    As a context manager it calls `release()` on exit. In a child of fork every use raises
    `ForkError`, except for `tree` with `shared=True`.
    """

    def __init__(
        self,
        copy: Copy,
        tree: T,
        addresses: list[int],
        shared: bool,
        lender: loans.Lender | None = None,
    ) -> None:
        self._copy = copy
        self._tree: T | None = tree
        self._addresses = addresses  # the address of each storage's copy, by the storage's number
        self._shared = shared  # forked children may read the memory
        self._lender = lender
        self._birth = ForkGuard("this Snapshot")
        self._released = False
        self.num_tensors = 0  # read by CPUOffloadCallback and saves
        self.nbytes = 0
        self.deferred_nbytes = 0

    def __enter__(self) -> Snapshot[T]:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a Snapshot belongs to the process that made it: hand over its .tree")

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Snapshot {'released' if self._released else 'of'} {type(self._tree).__name__}>"

    def __del__(self) -> None:
        copy = getattr(self, "_copy", None)  # missing if `__init__` was interrupted
        if copy is None or copy.error is None or copy.error_seen:
            return
        if not self._birth.in_forked_child():
            log.error("stillframe: a snapshot failed and nobody asked: %s", copy.error)

    @property
    def tree(self) -> T:
        """The same tree over CPU tensors, with the values at the call.

        With `overlap=True`, and if tensors are on a CUDA device, this waits as `wait()` does.

        Raises:
            TornSnapshotError, StillframeError: As `wait`.
            ForkError: In a child of fork, where private memory does not exist.
            StillframeError: `release()` was called.
        """
        if self._birth.in_forked_child():
            # The fork has waited until shared memory was complete.
            if not self._shared:
                raise ForkError(
                    "this Snapshot's memory does not exist in a forked child: take it with"
                    " snapshot(..., shared=True)"
                )
        else:
            self.wait()
        if self._released:
            raise StillframeError("the snapshot was released: its tree is gone")
        return self._tree  # type: ignore[return-value]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every byte is copied, so that the sources may change in any way.

        Raises:
            TornSnapshotError: Something other than an optimizer's step changed a source before it
                was copied (with `overlap=True`). The snapshot is unusable.
            StillframeError: A CUDA device failed. The snapshot is unusable.
            TimeoutError: `timeout` seconds passed.
        """
        self._birth.refuse_forked_child()
        with inside_call():
            copied, _ = self._copy.core.wait(seconds(timeout))
            if not copied:
                raise TimeoutError(f"the snapshot after {timeout:g} s: not copied yet")
            self._copy.settle()
        if self._copy.error is not None:
            self._copy.error_seen = True
            self._tree = None  # otherwise the error's traceback would keep the memory
            raise self._copy.error

    def release(self) -> None:
        """Drop the tree.

        The memory goes back to the pool when the last tensor of the tree is gone, and every process
        or future given to `hold_until` has ended. May be called again.

        Raises:
            ForkError: In a child of fork.
        """
        self._birth.refuse_forked_child()
        self._released = True
        self._tree = None

    def hold_until(self, process_or_future: Any) -> None:
        """Keep the memory until a process or future has ended, whatever becomes of the tensors.

        Args:
            process_or_future: A started `multiprocessing.Process`, a `subprocess.Popen`, or a
                future (anything with `add_done_callback`). A spawned process has copies of its own
                and needs no memory of the pool. With `shared="spawn"`, memory that was offered to
                the process and not mapped is taken back when the process ends.

        Raises:
            TypeError, ValueError: The argument is none of these, or has not been started.
            StillframeError: The memory has gone back to the pool already.
            ForkError: In a child of fork.
        """
        self._birth.refuse_forked_child()
        core = self._copy.core
        is_held = core.hold()
        if not is_held:  # the memory has been returned to the pool
            # A spawned process does not need it: torch's pickling has copied the tensors.
            if is_unforked_process(process_or_future):
                return
            raise StillframeError("the snapshot's memory has gone back to the pool already")
        releases = [core.unhold]
        if self._lender is not None:
            releases.append(self._lender.register_reader())
        try:
            call_at_end(process_or_future, functools.partial(_call_each_once, releases))
        except BaseException:
            _call_each_once(releases)
            raise

    def _names(self, index: int) -> list[str]:
        """Return the key paths of the tensors over the storage with this number."""
        address = self._addresses[index]

        def is_over_storage(node: Any) -> bool:
            if not isinstance(node, torch.Tensor):
                return False
            try:
                return bool(memory_of(node).untyped_storage().data_ptr() == address)
            except RuntimeError:  # a tensor without a storage of its own
                return False

        return [path for path, _ in paths(self._tree, is_over_storage)]


def is_copied(taken: Snapshot[Any]) -> bool:
    """Return whether the snapshot is copied, and no error is known."""
    copied, _ = taken._copy.core.wait(0)
    return copied and taken._copy.error is None


def _call_each_once(functions: list[Callable[[], None]]) -> None:
    """Call each function once, even if a future calls its callback twice."""
    while functions:
        try:
            function = functions.pop()
        except IndexError:  # another thread has taken the last one
            return
        function()


def snapshot(
    tree: T, *, overlap: bool = False, shared: Shared = False, engine: Engine | None = None
) -> Snapshot[T]:
    """Copy the tensors of `tree` into memory of the pool, and return the same tree over the copies.

    Dicts, lists, tuples (their subclasses too), deques and sets are made again. Tensors of any
    device, layout, dtype and class become CPU tensors, and parameters stay parameters. Views and
    ties of one storage become views and ties of its copy. NumPy arrays are copied. Every other
    object stays the same object, with its tensors. So give a module's `state_dict()`, not the
    module.

    Args:
        tree: Containers with tensors, such as a checkpoint.
        overlap: Copy some storages after the call, as `async_save` does: those that only an
            optimizer's step changes. The next step, `.wait()` and `.tree` wait for these copies.
        shared: Which other processes may read the tensors of the tree:
            - False: none. Reading a tensor in a forked child crashes the child.
            - True: processes that are forked from now on. The engine must be made without
              `shared_memory`.
            - "spawn": all processes. multiprocessing then pickles the tensors (as arguments of a
              Process, through a Queue or a Pipe) without a copy. The memory is kept until the
              tensors in the other process are gone, or the process has ended. The engine must be
              made with `shared_memory=True`.
            Writes to a tensor are only seen by the process that writes.
        engine: The engine whose pool is used, `default_engine()` by default.

    Returns:
        The snapshot. Shapes, strides, dtypes and storage offsets in its `.tree` are those of
        `tree`. It takes as many bytes of the pool as the storages under `tree` have, in whole
        blocks. It keeps them until its tensors are gone and every process or future given to
        `.hold_until` has ended.

    Raises:
        PoolExhaustedError: The tree does not fit into the pool besides the memory that other
            snapshots hold. The call waits for memory of saves, but not of snapshots.
        MemoryError: The system has no memory for the pool.
        ForkError: See `Engine`.
        ValueError: `shared` is not False, True or "spawn", or does not fit the engine's memory.
        StillframeError: The engine is closed; the tensors of a CUDA device cannot be copied (no
            usable driver, or the device has failed); a CUDA graph is being captured.
        Exception: An error that a tensor of an unusual kind raises when it is taken apart, as in
            `torch.save`.

    Tensors on a CUDA device are copied on a separate stream directly into pinned memory of the
    pool. The copies take no memory of the device, and all of them are queued in the call. The
    caller's current stream waits for them, and so do `.wait()` and `.tree`, but not the call. The
    copied storages are kept until the copies are done. Tensors on other devices are copied by torch
    during the call.
    """
    check_booleans(overlap=overlap)
    with inside_call():
        return _take(tree, overlap, shared, _check_shared(engine_or_default(engine), shared))


def snapshot_without_waiting(tree: T) -> Snapshot[T]:
    """Take a snapshot without waiting for memory, for callers that can use other memory instead.

    Raises:
        PoolExhaustedError: The tree does not fit into the memory that is free at the moment.
    """
    with inside_call():
        engine = engine_or_default(None)
        return _take(tree, overlap=False, shared=False, engine=engine, wait=False)


def snapshot_for_pickling(
    tree: T,
    *,
    overlap: bool,
    engine: Engine | None,
    wait_for_room: Callable[[], bool] = lambda: False,
) -> Snapshot[T]:
    """Take a snapshot for code that pickles the tree later. Copy objects that are neither
    containers nor tensors too. If the tree does not fit, call `wait_for_room` and try again.

    Args:
        wait_for_room: Waits for something that may give memory back, and returns True. Returns
            False if there is nothing to wait for. Raises only exceptions of signal handlers.

    Raises:
        PoolExhaustedError: The tree does not fit, and `wait_for_room` has returned False.
    """
    while True:
        try:
            with inside_call():
                chosen = engine_or_default(engine)
                shared: Shared = "spawn" if limits_of(chosen).shared_memory else False
                # The writer ends by itself, so other callers wait for this memory without a limit.
                return _take(tree, overlap, shared, chosen, copy_objects=True, patience_s=None)
        except PoolExhaustedError:
            if not wait_for_room():  # nothing is left that may give memory back
                raise


def recall(taken: Snapshot[Any]) -> None:
    """End the loans of a snapshot's memory, even if the borrowers still have tensors."""
    if taken._lender is not None:
        taken._lender.recall()


def _check_shared(engine: Engine, shared: Shared) -> Engine:
    """Return `engine`, or raise ValueError if its memory cannot be shared as `shared` says."""
    if not (isinstance(shared, bool) or shared == "spawn"):
        raise ValueError(f"shared has to be False, True or 'spawn', not {shared!r}")
    if shared == "spawn" and not limits_of(engine).shared_memory:
        raise ValueError(
            "shared='spawn' needs an engine whose memory other processes can map: give"
            " engine=stillframe.Engine(shared_memory=True), or call"
            " stillframe.configure(shared_memory=True) first"
        )
    if shared is True and limits_of(engine).shared_memory:
        raise ValueError(
            "shared=True is for forked processes, which see an engine's memory as it is at the"
            " fork; of an Engine(shared_memory=True) they would see what it holds later. Use"
            " another engine for them, or shared='spawn' for processes that are spawned"
        )
    return engine


def call_when_copied(taken: Snapshot[Any], function: Callable[[], object]) -> None:
    """Call `function` on the callback thread when the copy has ended, successfully or not."""
    taken._copy.call_when_settled(function)


def will_return(taken: Snapshot[Any], yes: bool = True) -> None:
    """Declare that a snapshot's memory comes back by itself. Calls that need it then wait, and do
    not raise PoolExhaustedError. `yes=False` withdraws the declaration."""
    taken._copy.core.will_return(yes)


def get_copy_error(taken: Snapshot[Any]) -> StillframeError | None:
    return taken._copy.error


def gate_wait_s(taken: Snapshot[Any]) -> float:
    return taken._copy.gate_wait_s


def _max_memory_wait_s() -> float | None:
    """Return how many seconds a call may wait for memory. None: without a limit, because the call
    is not external work, for which saves that hold the memory may wait."""
    return _EXTERNAL_WORK_WAIT_S if ordered.is_in_external_work() else None


def tree_without_waiting(taken: Snapshot[T]) -> T | None:
    """Return the tree without waiting for the copy; None after a failure or `release()`. The bytes
    of its tensors are undefined until `taken.wait()` has returned."""
    return taken._tree


def is_leased(taken: Snapshot[Any]) -> bool:
    return taken._copy.core.leased()


def _take(
    tree: T,
    overlap: bool,
    shared: Shared,
    engine: Engine,
    *,
    wait: bool = True,
    copy_objects: bool = False,
    patience_s: float | None = loans.PATIENCE_S,
) -> Snapshot[T]:
    """Take a snapshot.

    Args:
        tree, overlap, shared, engine: See `snapshot`.
        wait: Wait for memory of the pool. With False, raise PoolExhaustedError at once.
        copy_objects: Also copy objects that are neither containers nor tensors.
        patience_s: See `loans.Lender`.
    """
    engine_core = core_of(engine)
    source = Tree(tree)
    objects = source.copy_objects() if copy_objects else {}
    _warn_of_uncopied_modules(source, objects)
    # Nothing is deferred at exit, because the completion thread no longer gives verdicts.
    deferral = gate.defer(source, overlap=overlap and not completion.thread.is_exiting)
    try:
        for_forks = shared is True
        flags = _core.SNAPSHOT_SHARED if for_forks else 0
        core = _core.Snapshot(engine_core, source.rows, flags)
        longest_wait_s = _max_memory_wait_s() if wait else 0.0
        memory = _lease(core, source, engine, longest_wait_s)
        lender = loans.lend(core, memory, patience_s) if shared == "spawn" else None
        copy = Copy(core, source, deferral, shared=for_forks)
        copy.start()
    except BaseException:
        deferral.close()
        raise
    # Wait now if `rebuild` reads copied bytes, or if the copy has failed already.
    if source.devices and (source.reads_bytes or core.error()):
        copy.finish()
        if copy.error is not None:
            del memory  # otherwise the error's traceback would keep it
            raise StillframeError(str(copy.error))
    offsets = core.offsets()
    built, address = source.rebuild(memory, offsets, objects=objects)
    taken = Snapshot(copy, built, [address + each for each in offsets], for_forks, lender)
    taken.num_tensors, taken.nbytes = source.num_tensors(), source.nbytes()
    if deferral.indices:
        nbytes = [nbytes for _, nbytes in source.sources()]
        taken.deferred_nbytes = sum(nbytes[index] for index in deferral.indices)
    copy.weak_snapshot = weakref.ref(taken)
    if copy.error is not None:
        del memory, built  # otherwise the error's traceback would keep them
        taken.wait()  # raises the error
    source.forget()  # drops the user's tensors; the storages are kept until they are copied
    return taken


def _warn_of_uncopied_modules(source: Tree, objects: dict[int, Any]) -> None:
    """Log a warning for each module that is not copied. `objects` has the copied objects, by id."""
    for node in source.left_whole:
        if id(node) not in objects and isinstance(node, torch.nn.Module):
            log.warning(
                "stillframe: a %s is left as it is in a snapshot, with its live tensors: give its"
                " state_dict()",
                type(node).__name__,
            )


def _is_from_signal_handler(error: PoolExhaustedError) -> bool:
    """Return whether a signal handler has raised the error during a call into the core. Then the
    traceback has the handler's frame besides the caller's."""
    traceback = error.__traceback__
    return traceback is not None and traceback.tb_next is not None


def _lease(core: _core.Snapshot, source: Tree, engine: Engine, most_s: float | None) -> Any:
    """Lease memory of the pool, after a wait of at most `most_s` seconds. The new tensors keep the
    returned object alive."""
    try:
        memory = core.lease(most_s)
    except PoolExhaustedError as error:
        if _is_from_signal_handler(error):  # the handler's own snapshot does not fit
            raise
        raise PoolExhaustedError(
            f"a snapshot of {sizes.decimal(source.nbytes())} does not fit into the pool."
            f" {describe_pool_usage(engine)}{loans.explain_loans()}"
        ) from None
    note_use(engine)
    return memory
