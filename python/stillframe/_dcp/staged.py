"""A state dict copied to pool memory, from the call to the end of the upload that reads it.

    copying ─▶ copied ─an upload takes it─▶ uploading ─ended─▶ memory returned to the pool

stillframe's own uploads start during the copy: they need shapes and types first, bytes only later.

A snapshot's memory returns to the pool when its tensors are gone. But DCP's planner keeps the
tensors of its last save, and an exception keeps them with its frames. So the end of an upload makes
all tensors empty.

Assigning `tensor.data` empties a tensor and keeps the interpreter lock. `set_`, or freeing the
tensor, would release the lock. While the main thread computes, thousands of releases take seconds.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stillframe._save.engine import Engine
from stillframe._snapshot.save import SnapshotSave
from stillframe._snapshot.snapshot import (
    Snapshot,
    call_when_copied,
    is_copied,
    is_leased,
    recall,
    snapshot_for_pickling,
    tree_without_waiting,
    will_return,
)
from stillframe._tree.walk import paths

StateDict = dict[str, Any]

_GRACE_S = 5.0  # the time in which DCP's upload is expected to take the copy


class Staged:
    """The copy of one state dict. The condition `changed` is notified when an upload takes the
    copy."""

    def __init__(self, snapshot: Snapshot[Any], changed: threading.Condition) -> None:
        self._changed = changed
        self.nbytes = snapshot.nbytes  # of the copied storages
        self.deferred_nbytes = snapshot.deferred_nbytes  # the part that is copied after the call
        self.num_tensors = snapshot.num_tensors
        self._snapshot: Snapshot[Any] | None = snapshot  # None after the upload
        self._tree: Any = None  # what an upload reads
        self._created_at = time.monotonic()
        self._upload_has_begun = False  # an upload has taken the tree

    def complete_future_when_copied(self, copied: Future[Any]) -> None:
        """Give the tree, or the error, to the future `copied` when the copy has ended: now, or
        later on the callback thread."""
        snapshot = self._snapshot
        assert snapshot is not None
        complete = functools.partial(self._complete_future, snapshot, copied)
        if is_copied(snapshot):
            complete()
        else:
            call_when_copied(snapshot, complete)

    def _complete_future(self, snapshot: Snapshot[Any], copied: Future[Any]) -> None:
        """Give the tree, or the error of the copy, to the future."""
        try:
            tree = snapshot.tree
        except BaseException as error:
            copied.set_exception(error)
        else:
            snapshot.release()  # from now on the tensors keep the memory
            copied.set_result(tree)

    def wait_until_copied(self) -> None:
        """Wait until all bytes are copied. Raise the error of a copy that failed, like
        `Snapshot.wait`."""
        snapshot = self._snapshot
        assert snapshot is not None
        snapshot.wait()
        snapshot.release()  # from now on the tensors keep the memory

    def take_tree_for_own_upload(self, save: SnapshotSave) -> Any:
        """Begin an upload of stillframe's own, and return the tree. The upload has to call
        `wait_until_copied` before it reads bytes. The handle `save` is notified when the copy
        ends."""
        snapshot = self._snapshot
        assert snapshot is not None
        self._tree = tree_without_waiting(snapshot)
        self.record_upload_start()
        save.set_snapshot(snapshot)
        if is_copied(snapshot):
            save.record_copied()
        else:
            call_when_copied(snapshot, save.record_copied)
        return self._tree

    def record_upload_start(self) -> None:
        """Record that an upload has taken the tree. `release_after_upload` has to follow: until
        then, a new copy that needs memory waits for this copy's memory."""
        snapshot = self._snapshot
        if snapshot is not None:
            will_return(snapshot)
        with self._changed:
            self._upload_has_begun = True
            self._changed.notify_all()

    def record_uploaded_tree(self, tree: Any) -> None:
        """Record the tree that the upload reads, so that `release_after_upload` can empty its
        tensors."""
        self._tree = tree

    def release_after_upload(self) -> list[Any]:
        """Empty the tensors, which returns their memory to the pool. Return the empty tensors and
        their snapshot: the caller chooses when to free them, because this releases the interpreter
        lock. May be called again."""
        snapshot, tree = self._snapshot, self._tree
        self._tree = None
        tensors = [each for _, each in paths(tree, lambda node: isinstance(node, torch.Tensor))]
        del tree
        if snapshot is not None and is_leased(snapshot):
            _drop_tensor_data(tensors)
        if snapshot is not None:
            recall(snapshot)  # ends the loan to DCP's process, which keeps its last state dict
            # Only users may keep the memory now, and nobody knows how long.
            will_return(snapshot, False)
        self._snapshot = None
        return [*tensors, snapshot]

    def grace_s(self) -> float:
        """Return how many seconds are left for an upload to take the tree; 0 after an upload has
        taken it, or if the memory was returned."""
        if self._upload_has_begun or not self.holds_memory():
            return 0.0
        return max(0.0, self._created_at + _GRACE_S - time.monotonic())

    def holds_memory(self) -> bool:
        """Return whether the copy's memory has not returned to the pool."""
        snapshot = self._snapshot
        return snapshot is not None and is_leased(snapshot)


# An empty tensor for each dtype. Making one each time would release the interpreter lock.
_empty_tensors: dict[torch.dtype, torch.Tensor] = {}


def _drop_tensor_data(tensors: list[Any]) -> None:
    """Make tensors empty, so that they no longer refer to their memory."""
    for tensor in _tensors_with_memory(tensors):
        if tensor.dtype not in _empty_tensors:
            with torch.inference_mode(False):  # an ordinary tensor, for later saves
                _empty_tensors[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = _empty_tensors[tensor.dtype]


def _tensors_with_memory(tensors: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that have memory of their own: for a wrapper, its inner tensors."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            for name in names:
                inner = getattr(tensor, name)
                if isinstance(inner, torch.Tensor):
                    yield inner
        elif tensor.layout is torch.strided and not tensor.is_quantized:
            yield tensor


class Stages:
    """The copies of one stager. A new copy waits for memory that earlier ones will return."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # notified when an upload takes a copy
        self._earlier: list[Staged] = []  # earlier copies that may still hold memory

    def stage(self, tree: Any, *, overlap: bool, engine: Engine | None) -> Staged:
        """Copy a tree, after uploads under way have returned enough memory to the pool. Raise
        PoolExhaustedError if the tree does not fit even then."""
        waiting = self._list_copies_awaiting_upload()

        def wait_for_an_upload() -> bool:
            """Wait until an upload takes one of the copies in `waiting`, after which the core waits
            for that copy's memory. Return False if `waiting` is empty."""
            nonlocal waiting
            if not waiting:
                return False
            self._wait_until_any_is_taken(waiting)
            waiting = self._list_copies_awaiting_upload()
            return True

        snapshot = snapshot_for_pickling(
            tree, overlap=overlap, engine=engine, wait_for_room=wait_for_an_upload
        )
        staged = Staged(snapshot, self._changed)
        self._earlier.append(staged)
        return staged

    def _list_copies_awaiting_upload(self) -> list[Staged]:
        """Return the copies that an upload is expected to take soon."""
        self._earlier = [each for each in self._earlier if each.holds_memory()]
        return [each for each in self._earlier if each.grace_s() > 0]

    def _wait_until_any_is_taken(self, waiting: list[Staged]) -> None:
        """Wait until an upload takes one of the copies, or until the time is over in which an
        upload is expected to take one of them."""
        with self._changed:
            grace_s = min(each.grace_s() for each in waiting)
            if grace_s > 0:
                self._changed.wait(grace_s)
