"""`snapshot`: a tree's tensors as they are now, on the CPU, over memory of an engine's pool.

    snapshot(tree)
      Tree        which storages are under it
      gate.defer  which of them may be copied later (with overlap=True)
      core        memory of the pool, the copy; what lives on CUDA devices is copied on streams of
                  their lanes, and nobody waits for that before `wait()` or `tree`
      Tree        the same tree over the copies

The memory belongs to whoever holds one of the tensors: each refers to an object of the core that
gives the memory back when the last of them is gone. So the tree may be handed on, its `Snapshot`
dropped, and nothing is overwritten while somebody can still read it.

`tree` waits for the copy: a tree whose bytes are not there yet would be garbage that looks like
tensors. Trees with tensors that check what they are made from (sparse ones) wait in the call.
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
from stillframe._base.birth import Birth
from stillframe._base.calls import inside
from stillframe._base.dtensor import memory_of
from stillframe._base.flags import refuse_unclear
from stillframe._base.timeouts import seconds
from stillframe._save import completion, ordered
from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine, core_of, limits_of, note_use, usage
from stillframe._snapshot import lent
from stillframe._snapshot.copy import Copy
from stillframe._snapshot.holds import call_at_end, has_memory_of_its_own
from stillframe._tree.walk import Tree, paths
from stillframe._watch import gate
from stillframe.errors import ForkError, PoolExhaustedError, StillframeError

log = logging.getLogger("stillframe")

T = TypeVar("T")
Shared = Literal[False, True, "spawn"]

_INSIDE_S = 10.0  # of a wait inside work in the order of the log, which may itself hold the memory


class Snapshot(Generic[T]):
    """A tree on CPU tensors over pool memory. Made by `snapshot`.

    Use it as a context manager to have `release()` called. It belongs to the process that made it:
    in a child of fork every use raises `ForkError`, but for `tree` where `shared=True`.
    """

    def __init__(
        self,
        copy: Copy,
        tree: T,
        begins: list[int],
        shared: bool,
        lender: lent.Lender | None = None,
    ) -> None:
        self._copy = copy
        self._tree: T | None = tree
        self._begins = begins  # by number of the storage: the address of its copy
        self._shared = shared
        self._lender = lender
        self._birth = Birth("this Snapshot")
        self._released = False
        self.num_tensors = 0  # for the callback
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
        copy = getattr(self, "_copy", None)
        if (
            copy is not None
            and copy.error is not None
            and not copy.seen
            and not self._birth.foreign()
        ):
            log.error("stillframe: a snapshot failed and nobody asked: %s", copy.error)

    @property
    def tree(self) -> T:
        """The same tree on CPU tensors, with the bytes of the call. With `overlap=True`, and where
        tensors live on a CUDA device, this waits for the copy, as `wait()` does.

        Raises:
            TornSnapshotError, StillframeError: As `wait`.
            ForkError: In a child of fork, where private memory does not exist.
            StillframeError: `release()` was called.
        """
        if self._birth.foreign():
            # Shared memory was complete before the fork.
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
        """Waits until every byte is copied: from then on the sources may change in any way.

        Raises:
            TornSnapshotError: Something other than an optimizer's step changed a source before it
                was copied (with `overlap=True`). The snapshot is unusable.
            StillframeError: A CUDA device failed. The snapshot is unusable.
            TimeoutError: `timeout` seconds passed.
        """
        self._birth.refuse_child()
        with inside():
            copied, _ = self._copy.core.wait(seconds(timeout))
            if not copied:
                raise TimeoutError(f"the snapshot after {timeout:g} s: not copied yet")
            self._copy.settle()
        if self._copy.error is not None:
            self._copy.seen = True
            self._tree = None  # not to be had any more; the traceback would keep its memory
            raise self._copy.error

    def release(self) -> None:
        """Gives up the tree. The memory goes back to the pool at once, or, where tensors of the
        tree are still alive elsewhere or something is held, when these are gone. May be called
        again.

        Raises:
            ForkError: In a child of fork.
        """
        self._birth.refuse_child()
        self._released = True
        self._tree = None

    def hold_until(self, process_or_future: Any) -> None:
        """Keeps the memory until a writer has ended, whatever becomes of the tensors here.

        Args:
            process_or_future: A started `multiprocessing.Process`, a `subprocess.Popen`, or a
                future (anything with `add_done_callback`). A process that was spawned has
                copies of its own and needs nothing of the pool, but for `shared="spawn"`: what was
                pickled for it and never arrived is taken back when it has ended.

        Raises:
            TypeError, ValueError: It is none of these, or has not been started.
            StillframeError: The memory has gone back already.
            ForkError: In a child of fork.
        """
        self._birth.refuse_child()
        core = self._copy.core
        if not core.hold():
            # Pickling the tensors for a spawned process has moved them out of the pool.
            if has_memory_of_its_own(process_or_future):
                return
            raise StillframeError("the snapshot's memory has gone back to the pool already")
        held = [core.unhold]
        if self._lender is not None:
            held.append(self._lender.reader())
        try:
            call_at_end(process_or_future, functools.partial(_end_once, held))
        except BaseException:
            _end_once(held)
            raise

    def _names(self, index: int) -> list[str]:
        """Key paths of the tensors over a storage."""
        begin = self._begins[index]

        def over(node: Any) -> bool:
            try:
                return isinstance(node, torch.Tensor) and (
                    memory_of(node).untyped_storage().data_ptr() == begin
                )
            except RuntimeError:  # a tensor without a storage of its own
                return False

        return [path for path, _ in paths(self._tree, over)]


def is_copied(taken: Snapshot[Any]) -> bool:
    """Whether `wait` would return at once, and raise nothing."""
    copied, _ = taken._copy.core.wait(0)
    return copied and taken._copy.error is None


def _end_once(held: list[Callable[[], None]]) -> None:
    """Ends a hold, however often a future calls back."""
    while held:
        try:
            end = held.pop()
        except IndexError:
            return
        end()


def snapshot(
    tree: T, *, overlap: bool = False, shared: Shared = False, engine: Engine | None = None
) -> Snapshot[T]:
    """Copies the tensors of `tree` into memory of the pool and returns the same tree over the
    copies.

    Dicts, lists, tuples (their subclasses too), deques and sets are made anew; tensors of any
    device, layout, dtype and class become CPU tensors, parameters parameters, views and ties of
    the same storage views and ties of its copy. NumPy arrays are copied. Every other object is
    left whole: it is the same object, with whatever tensors it has (give a module's `state_dict()`,
    not the module).

    Args:
        tree: Containers with tensors, such as a checkpoint.
        overlap: Copy what only an optimizer's step changes under the next forward and backward, as
            `async_save` does. The next step waits for it; so do `.wait()` and `.tree`.
        shared: True lets processes that are forked from now on read the memory. Without it,
            reading a tensor of the tree in a forked child crashes the child. "spawn" lets
            processes that are not forked map it: whatever multiprocessing pickles of the tree (the
            arguments of a Process, a Queue, a Pipe) is no copy, and the memory is kept until the
            tensors over there are gone too, or the process is. What a process writes into the
            tensors, only it sees, either way. It needs an `Engine(shared_memory=True)`, and True
            one without.
        engine: The engine whose pool is used, `default_engine()` by default.

    Returns:
        The snapshot. Shapes, strides, dtypes and storage offsets in its `.tree` are those of
        `tree`. It takes as many bytes of the pool as the storages under `tree` have, in whole
        blocks, and keeps them until its tensors are gone and what was given to `.hold_until` has
        ended.

    Raises:
        PoolExhaustedError: The tree does not fit beside what other snapshots hold. Waiting for
            saves happens here; waiting for snapshots is the caller's business.
        MemoryError: The system has no memory for the pool.
        ForkError: See `Engine`.
        ValueError: `shared` is none of these, or the engine's memory is not of that kind.
        StillframeError: The engine is closed; the tensors of a CUDA device cannot be copied (no
            usable driver, a device that is dead); a CUDA graph is being captured.
        Exception: What a tensor of an unusual kind raises when it is asked what it is made of, as
            for `torch.save`.

    Tensors on a CUDA device are copied on a stream of ours straight into pinned memory of the pool:
    they take no memory of the device, all of it is queued in the call, the caller's current stream
    waits for the copies and the host does not (`.wait()` and `.tree` do). Their storages are held
    until then. Tensors on other devices are copied by torch during the call.
    """
    refuse_unclear(overlap=overlap)
    with inside():
        return _take(tree, overlap, shared, _able(engine_or_default(engine), shared))


def snapshot_at_once(tree: T) -> Snapshot[T]:
    """`snapshot(tree)`, for those who have other memory and need not wait.

    Raises:
        PoolExhaustedError: The tree does not fit beside what is in use at the moment.
    """
    with inside():
        return _take(tree, False, False, engine_or_default(None), wait=False)


def snapshot_to_write(
    tree: T,
    *,
    overlap: bool,
    engine: Engine | None,
    wait_for_room: Callable[[], bool] = lambda: False,
) -> Snapshot[T]:
    """`snapshot(tree)` for a writer that pickles the tree later: the objects in it are copied too,
    as they are at the call.

    The core waits for saves, and for memory that will return by itself. Where that is not enough,
    this looks again as long as the caller knows of something else to wait for.

    Args:
        wait_for_room: Waits for something that may give memory back, and returns False where there
            is nothing left to wait for. It raises only what a signal handler does.

    Raises:
        PoolExhaustedError: The tree does not fit, and `wait_for_room` has returned False.
    """
    while True:
        try:
            with inside():
                used = engine_or_default(engine)
                shared: Shared = "spawn" if limits_of(used).shared_memory else False
                # The writer's end is known: until then others wait, however long it takes.
                return _take(tree, overlap, shared, used, own_objects=True, patience_s=None)
        except PoolExhaustedError:
            if not wait_for_room():
                raise


def recall(taken: Snapshot[Any]) -> None:
    """No other process reads its memory any more, whatever tensors it has left."""
    if taken._lender is not None:
        taken._lender.recall()


def _able(engine: Engine, shared: Shared) -> Engine:
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
    """Has the callbacks' thread call `function` once `taken.wait()` would return, or raise, at
    once."""
    taken._copy.tell(function)


def will_return(taken: Snapshot[Any], yes: bool = True) -> None:
    """Whoever wants memory waits for this snapshot's from now on: it ends by itself, whatever they
    do. False takes that back."""
    taken._copy.core.will_return(yes)


def copy_error(taken: Snapshot[Any]) -> StillframeError | None:
    """What its copy failed with, where that is known."""
    return taken._copy.error


def gate_wait_s(taken: Snapshot[Any]) -> float:
    """How long steps have waited for its copy so far."""
    return taken._copy.gate_wait_s


def _most_s() -> float | None:
    return _INSIDE_S if ordered.is_inside() else None


def tree_to_be(taken: Snapshot[T]) -> T | None:
    """Its tree, whose bytes need not be there before `taken.wait()` has returned; None once it has
    failed or was released."""
    return taken._tree


def is_leased(taken: Snapshot[Any]) -> bool:
    """Whether its memory has not gone back to the pool."""
    return taken._copy.core.leased()


def _take(
    tree: T,
    overlap: bool,
    shared: Shared,
    engine: Engine,
    *,
    wait: bool = True,
    own_objects: bool = False,
    patience_s: float | None = lent.PATIENCE_S,
) -> Snapshot[T]:
    engine_core = core_of(engine)
    source = Tree(tree)
    objects = source.own_objects() if own_objects else {}
    _warn_of_modules(source, objects)
    # At exit nobody would come to give the verdict.
    deferral = gate.defer(source, overlap=overlap and not completion.completion.exiting)
    try:
        forks = shared is True
        core = _core.Snapshot(engine_core, source.rows, _core.SNAPSHOT_SHARED if forks else 0)
        memory = _lease(core, source, engine, _most_s() if wait else 0.0)
        lender = lent.lend(core, memory, patience_s) if shared == "spawn" else None
        copy = Copy(core, source, deferral, shared=forks)
        copy.start()
    except BaseException:
        deferral.close()
        raise
    # What failed in the call is raised by it. Making the tree may look at the bytes.
    if source.devices and (source.reads_bytes or core.error()):
        copy.finish()
        if copy.error is not None:
            del memory  # a traceback would keep it
            raise StillframeError(str(copy.error))
    offsets = core.offsets()
    built, address = source.rebuild(memory, offsets, objects=objects)
    taken = Snapshot(copy, built, [address + each for each in offsets], forks, lender)
    taken.num_tensors, taken.nbytes = source.num_tensors(), source.nbytes()
    if deferral.indices:
        nbytes = [nbytes for _, nbytes in source.sources()]
        taken.deferred_nbytes = sum(nbytes[index] for index in deferral.indices)
    copy.owner = weakref.ref(taken)
    if copy.error is not None:  # found before there was an owner to tell
        del memory, built
        taken.wait()
    source.forget()
    return taken


def _warn_of_modules(source: Tree, objects: dict[int, Any]) -> None:
    for node in source.left_whole:
        if id(node) not in objects and isinstance(node, torch.nn.Module):
            log.warning(
                "stillframe: a %s is left as it is in a snapshot, with its live tensors: give its"
                " state_dict()",
                type(node).__name__,
            )


def _lease(core: _core.Snapshot, source: Tree, engine: Engine, most_s: float | None) -> Any:
    """Memory of the pool for the copies: the object that the new tensors refer to."""
    try:
        memory = core.lease(most_s)
    except PoolExhaustedError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # a signal handler's, whose snapshot did not fit
        raise PoolExhaustedError(
            f"a snapshot of {sizes.decimal(source.nbytes())} does not fit into the pool."
            f" {usage(engine)}{lent.sentence()}"
        ) from None
    note_use(engine)
    return memory
