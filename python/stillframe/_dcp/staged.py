"""A state dict copied to pool memory, from the call to the end of the upload that reads it.

    copying ─▶ copied ─an upload takes it─▶ uploading ─ended─▶ memory returned to the pool

stillframe's own uploads start while the state dict is still being copied: they need the tensors'
shapes and types first, and the bytes only later.

A snapshot's memory returns to the pool when its tensors are gone. Some objects keep the tensors
longer than the upload lasts: DCP's planner keeps the tensors of its last save, and an exception
keeps them with its frames. So the end of an upload empties all tensors, and they no longer hold
memory.

Tensors are emptied by assigning `tensor.data`, which keeps the interpreter lock. An operator such
as `set_` would release it, and so would freeing a tensor. While the main thread computes, thousands
of releases take seconds.
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
    snapshot_to_write,
    unfinished_tree,
    will_return,
)
from stillframe._tree.walk import paths

StateDict = dict[str, Any]

_GRACE_S = 5.0  # the time in which DCP's upload is expected to take its state dict


class Staged:
    """The copy of one state dict. It references the tree only while the tree is copied, and while
    an upload reads it.

    Args:
        taken: The snapshot of the state dict.
        changed: The condition that is notified when an upload takes the copy.

    Attributes:
        nbytes: The bytes of the copied storages.
        deferred_nbytes: How many of these bytes are copied after the call.
        num_tensors: The number of tensors in the state dict.
    """

    def __init__(self, taken: Snapshot[Any], changed: threading.Condition) -> None:
        self._changed = changed
        self.nbytes = taken.nbytes
        self.deferred_nbytes = taken.deferred_nbytes
        self.num_tensors = taken.num_tensors
        self._taken: Snapshot[Any] | None = taken  # None after the upload
        self._tree: Any = None  # what an upload reads
        self._made = time.monotonic()
        self._uploading = False  # an upload has taken the tree

    def settle(self, copied: Future[Any]) -> None:
        """Give the tree, or the error, to the future `copied` when the copy has ended. If it has
        not ended yet, the callback thread does that later."""
        taken = self._taken
        assert taken is not None
        settle = functools.partial(self._settle, taken, copied)
        if is_copied(taken):
            settle()
        else:
            call_when_copied(taken, settle)

    def _settle(self, taken: Snapshot[Any], copied: Future[Any]) -> None:
        try:
            tree = taken.tree
        except BaseException as error:
            copied.set_exception(error)
        else:
            taken.release()  # the snapshot is not needed any more: its tensors keep the memory
            copied.set_result(tree)

    def wait_until_copied(self) -> None:
        """Wait until all bytes are copied.

        Raises:
            TornSnapshotError, StillframeError: The copy failed, see `Snapshot.wait`.
        """
        taken = self._taken
        assert taken is not None
        taken.wait()
        taken.release()  # the snapshot is not needed any more: its tensors keep the memory

    def begin_own_upload(self, save: SnapshotSave) -> Any:
        """Begin an upload of stillframe's own. Return the tree, which may not be copied completely
        yet: the upload has to call `wait_until_copied` before it reads bytes.

        Args:
            save: The handle of the upload's save, which is notified when the copy ends.
        """
        taken = self._taken
        assert taken is not None
        self._tree = unfinished_tree(taken)
        self.upload_begins()
        save.set_snapshot(taken)
        if is_copied(taken):
            save.record_copied()
        else:
            call_when_copied(taken, save.record_copied)
        return self._tree

    def upload_begins(self) -> None:
        """Record that an upload has taken the tree, and that `upload_ended` will be called. Until
        then, a new copy that needs memory waits for this copy's memory."""
        taken = self._taken
        if taken is not None:
            will_return(taken)
        with self._changed:
            self._uploading = True
            self._changed.notify_all()

    def upload_reads(self, tree: Any) -> None:
        """Record the tree that the upload reads, so that its end can empty the tensors."""
        self._tree = tree

    def upload_ended(self) -> list[Any]:
        """Return the memory to the pool, because the upload reads it no longer. May be called
        again.

        Returns:
            The tensors, now empty, and their snapshot, so that the caller can free them at a better
            time.
        """
        taken, tree = self._taken, self._tree
        self._tree = None
        tensors = [each for _, each in paths(tree, lambda node: isinstance(node, torch.Tensor))]
        del tree
        if taken is not None and is_leased(taken):
            _empty(tensors)
        if taken is not None:
            # The process of DCP's executor keeps the last state dict that it wrote. End that loan.
            recall(taken)
            will_return(taken, False)  # only references of users may hold the memory from now on
        self._taken = None
        return [*tensors, taken]

    def grace_s(self) -> float:
        """Return for how many more seconds an upload is expected to take the tree; 0 if an upload
        has taken it, or the memory was returned."""
        if self._uploading or not self.holds_memory():
            return 0.0
        return max(0.0, self._made + _GRACE_S - time.monotonic())

    def holds_memory(self) -> bool:
        taken = self._taken
        return taken is not None and is_leased(taken)


# An empty tensor for each dtype, kept because making and freeing one releases the interpreter lock.
_empty_tensors: dict[torch.dtype, torch.Tensor] = {}


def _empty(tensors: list[Any]) -> None:
    """Make the tensors empty, so that they no longer hold their memory."""
    for tensor in _with_memory(tensors):
        if tensor.dtype not in _empty_tensors:
            with torch.inference_mode(False):
                _empty_tensors[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = _empty_tensors[tensor.dtype]


def _with_memory(tensors: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that have memory of their own; of a wrapper subclass, its inner tensors."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            inner = (getattr(tensor, name) for name in names)
            yield from (each for each in inner if isinstance(each, torch.Tensor))
        elif tensor.layout is torch.strided and not tensor.is_quantized:
            yield tensor


class Stages:
    """The copies of one stager. A new copy waits for memory that earlier ones will return."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # notified when an upload takes a copy
        self._before: list[Staged] = []  # earlier copies that may still hold memory

    def stage(self, tree: Any, *, overlap: bool, engine: Engine | None) -> Staged:
        """Copy a tree with a state dict, after uploads have returned enough memory to the pool.

        Raises:
            PoolExhaustedError: The tree does not fit, and no upload under way would change that.
        """
        waiting = self._without_upload()

        def wait_for_an_upload() -> bool:
            """Wait until an upload takes one of the copies in `waiting`; return False if there are
            none. After that, the core itself waits for the memory of the copy."""
            nonlocal waiting
            if not waiting:
                return False
            self._wait_for_any(waiting)
            waiting = self._without_upload()
            return True

        taken = snapshot_to_write(
            tree, overlap=overlap, engine=engine, wait_for_room=wait_for_an_upload
        )
        staged = Staged(taken, self._changed)
        self._before.append(staged)
        return staged

    def _without_upload(self) -> list[Staged]:
        """Return the copies that an upload is expected to take soon."""
        self._before = [each for each in self._before if each.holds_memory()]
        return [each for each in self._before if each.grace_s() > 0]

    def _wait_for_any(self, waiting: list[Staged]) -> None:
        """Wait until an upload takes one of the copies, or until one of them has waited for so long
        that no upload is expected any more."""
        with self._changed:
            grace_s = min(each.grace_s() for each in waiting)
            if grace_s > 0:
                self._changed.wait(grace_s)
