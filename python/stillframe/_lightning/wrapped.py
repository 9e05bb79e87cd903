"""Saving with another CheckpointIO: `AsyncCheckpointIO(checkpoint_io=other)`.

    save    a snapshot in memory of the pool; `other` saves that on a thread of ours
    remove  `other` removes, on the same thread
    load    `other` loads, once what was submitted before has ended

All of it has its place in the process's log (`_ordered.py`), so removes run after the saves before
them and only if the last one did well, and whoever asks for a name sees what is in flight. The
snapshot's memory is held until `other` has returned. How durable the result is, is up to `other`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import fsspec
import torch

from stillframe import _core
from stillframe._base.calls import inside
from stillframe._save import completion
from stillframe._save import ordered as _ordered
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle, SaveReport, note_failure
from stillframe._snapshot.snapshot import Snapshot, snapshot
from stillframe.errors import BusyError, PoolExhaustedError

log = logging.getLogger("stillframe")

_MAX_WRAPPERS = 16
# Below zero, where no ticket's is.
_numbers = itertools.count(-1, -1)
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)


class InnerSave(SaveHandle):
    """A save that another CheckpointIO makes."""

    def __init__(self, path: str, taken: Snapshot[Any] | None) -> None:
        super().__init__(path)
        self._number = next(_numbers)
        self._taken = taken
        self._over = threading.Event()
        self._nbytes = 0 if taken is None else taken.nbytes

    @property
    def state(self) -> str:
        if not self._settled:
            return "writing"
        return "durable" if self._error is None else "failed"

    def done(self) -> bool:
        return self._settled

    def progress(self) -> tuple[int, int]:
        """Nobody counts what another CheckpointIO has written: all of it or nothing."""
        return (self._nbytes if self._settled else 0), self._nbytes

    def cancel(self) -> bool:
        return False

    def wait_staged(self, timeout: float | None = None) -> None:
        if self._taken is not None and not self._settled:
            self._taken.wait(timeout)

    def _finish(self, deadline: float | None) -> None:
        if self._settled:
            return
        _ordered.refuse_inside()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._over.wait(left):
            raise TimeoutError(f"the save of {self.path} has not ended yet")

    def end(self, report: SaveReport | None, error: BaseException | None) -> None:
        with self._lock:
            self._report, self._error = report, error
            if error is not None:
                self._failure = note_failure(self.path, error)
            self._settled = True
            self._taken = None
            waiting, self._callbacks = self._callbacks, []
            on_durable, self._on_durable = self._on_durable, None
        completion.in_flight.pop(self._number, None)
        self._over.set()
        if on_durable is not None and report is not None:
            completion.callbacks.put(lambda: on_durable(self._given_path, report))
        for function in waiting:
            completion.callbacks.put(lambda function=function: function(self))  # type: ignore[misc]


class Inner:
    """The CheckpointIO inside, and the way to it.

    Args:
        io: A CheckpointIO. One of Lightning's wrappers with nothing inside gets `reader()`.
        reader: TorchCheckpointIO of the package.
        sentence: Says in each report who wrote.
        io_mode: Of each report; "fsspec" if `io` writes so.
    """

    def __init__(
        self,
        io: Any,
        reader: type[Any],
        sentence: str | None = None,
        io_mode: str = "wrapped",
    ) -> None:
        self.io = io
        self._sentence = sentence or f"It was written by {type(io).__name__}, in its own way."
        self._io_mode = io_mode
        if getattr(io, "_base_checkpoint_io_configured", True) is False:
            io.checkpoint_io = reader()

    def save(
        self,
        checkpoint: Any,
        path: Any,
        key: bytes,
        *,
        storage_options: Any,
        overlap: bool,
        engine: Engine,
        pending: list[SaveHandle],
        max_in_flight: int,
        when_busy: str,
        on_durable: Callable[[Any, SaveReport], object] | None,
    ) -> InnerSave:
        """Takes the snapshot and returns; waits while `max_in_flight` of `pending` have not ended.

        A checkpoint that no pool is large enough for is saved as it is, and waited for.

        Raises:
            BusyError: With `when_busy="raise"`.
        """
        entered = time.perf_counter()
        with inside() as nested:
            _ordered.refuse_inside()
            if not nested:
                _wait_for_slot(pending, max_in_flight, when_busy)
            fallbacks = [self._sentence]
            waited = time.perf_counter() - entered
            taken = _take(checkpoint, overlap, engine, pending)
            if taken is None:
                sentence = "It does not fit into the pool: it was written inside the call."
                log.warning("stillframe: %s: %s", path, sentence)
                fallbacks.append(sentence)
            else:
                _make_own(taken.tree if not overlap else taken._tree, {})
            save = InnerSave(os.fsdecode(path), taken)
            save._given_path, save._on_durable = path, on_durable
            save._num_tensors = 0 if taken is None else taken.num_tensors
            save._fallbacks = fallbacks
            held: Future[None] = Future()
            live = checkpoint if taken is None else None
            # Who takes this has the snapshot: the thread that saves it, or the lines below after
            # an exception, which Ctrl-C may be at any moment.
            owner = [save]

            def work(after_good: bool) -> bool:
                if not _take_one(owner):
                    return False
                return self._work(save, live, held, storage_options, entered, waited)

            try:
                if taken is not None and taken.nbytes:
                    taken.hold_until(held)
                completion.in_flight[save._number] = save
                _ordered.submit(key, _core.WORK_SAVE, work)
            except BaseException:
                if _take_one(owner):
                    completion.in_flight.pop(save._number, None)
                    held.set_result(None)
                raise
            save._blocked_s = time.perf_counter() - entered
            if taken is None:
                save._finish(None)
                save._blocked_s = time.perf_counter() - entered
            return save

    def _work(
        self,
        save: InnerSave,
        live: Any,
        held: Future[None],
        storage_options: Any,
        entered: float,
        waited: float,
    ) -> bool:
        """On the thread that works in the log's order."""
        taken = save._taken
        staged = 0.0
        report: SaveReport | None = None
        failed: BaseException | None = None
        try:
            tree = live if taken is None else taken.tree
            staged = time.perf_counter() - entered
            self.io.save_checkpoint(tree, save._given_path, storage_options=storage_options)
            report = SaveReport(
                path=save.path,
                nbytes=_size(save.path, save._nbytes, self._io_mode),
                num_tensors=save._num_tensors,
                captured_nbytes=save._nbytes,
                deferred_nbytes=0,
                blocked_s=save._blocked_s,
                gate_wait_s=0.0,
                backpressure_s=waited,
                staged_after_s=staged,
                durable_after_s=time.perf_counter() - entered,
                peak_pool_bytes=save._nbytes,
                io_mode=self._io_mode,
                fallbacks=tuple(save._fallbacks),
            )
        except BaseException as error:  # whatever the other code raises is the save's
            # Its frames hold the tree.
            failed = error.with_traceback(None)
        finally:
            tree = None
            if taken is not None:
                taken.release()
            held.set_result(None)
        save.end(report, failed)
        return failed is None

    def remove(self, path: Any, key: bytes, needed: Callable[[], bool] | None) -> None:
        _ordered.submit_remove(path, key, self.io.remove_checkpoint, needed)


def _take_one(items: list[Any]) -> bool:
    try:
        items.pop()
    except IndexError:
        return False
    return True


def wraps_ours(io: Any, ours: type[Any]) -> bool:
    """Whether one of our plugins is `io` or inside it."""
    for _ in range(_MAX_WRAPPERS):
        if io is None:
            return False
        if isinstance(io, ours):
            return True
        io = getattr(io, "_checkpoint_io", None)
    return False


def _wait_for_slot(pending: list[SaveHandle], max_in_flight: int, when_busy: str) -> None:
    while True:
        under_way = [save for save in list(pending) if not save.done()]
        if len(under_way) < max_in_flight:
            return
        if when_busy == "raise":
            raise BusyError(
                f"{len(under_way)} saves are under way, as many as max_in_flight allows"
            )
        under_way[0]._finish(None)


def _take(
    checkpoint: Any, overlap: bool, engine: Engine, pending: list[SaveHandle]
) -> Snapshot[Any] | None:
    """A snapshot, once earlier ones have given back the memory it wants; None if it is too large
    for the pool."""
    while True:
        try:
            return snapshot(checkpoint, overlap=overlap, engine=engine)
        except PoolExhaustedError:
            under_way = [save for save in list(pending) if not save.done()]
            if not under_way:
                return None
            under_way[0]._finish(None)


def _make_own(node: Any, memo: dict[int, Any]) -> Any:
    """Copies what a snapshot leaves whole: objects that training may change before they are
    pickled. Containers and tensors of the snapshot are its own already."""
    if isinstance(node, (torch.Tensor, *_IMMUTABLE)) or hasattr(node, "__array_interface__"):
        return node
    if isinstance(node, dict):
        for key, value in list(node.items()):
            own = _make_own(value, memo)
            if own is not value:
                node[key] = own
        return node
    if isinstance(node, list):
        node[:] = [_make_own(value, memo) for value in node]
        return node
    if isinstance(node, tuple):
        own_values = [_make_own(value, memo) for value in node]
        if all(own is value for own, value in zip(own_values, node, strict=True)):
            return node
        return type(node)(*own_values) if hasattr(node, "_fields") else type(node)(own_values)
    try:
        return copy.deepcopy(node, memo)
    except Exception:
        return node  # it cannot be copied; if it cannot be pickled either, the save says so


def _size(path: str, otherwise: int, io_mode: str) -> int:
    """The file's length; `otherwise` where nobody knows what was written."""
    try:
        if io_mode == "fsspec":
            file_system, name = fsspec.core.url_to_fs(path)
            return int(file_system.size(name) or otherwise)
        return os.stat(path).st_size if os.path.isfile(path) else otherwise
    except Exception:  # a remote file system's own errors; the file has been written
        return otherwise
