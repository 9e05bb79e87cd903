"""A state dict on pool memory, from its call to the end of the upload that reads it.

    copying ──▶ copied ──an upload takes it──▶ uploading ──ended──▶ given back

An upload of stillframe's own takes it while it is being copied: what it has to know of a tensor is
there from the first, all but its bytes.

The memory of a snapshot goes back when its tensors are gone. Of DCP's parts some live longer than
the upload: a planner that is kept has the tensors of its last save, and so have the frames of an
exception. So the end of an upload empties all of them, and nobody keeps memory by keeping a
planner.

They are emptied by `tensor.data =`. `set_`, as any operator, lets go of the interpreter lock, and
so does the end of every tensor: beside a main thread that computes, thousands of them take seconds.
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
    tree_to_be,
    will_return,
)
from stillframe._tree.walk import paths

StateDict = dict[str, Any]

_GRACE_S = 5.0  # in which whoever was given a state dict takes it


class Staged:
    """One state dict's copy. It keeps the tree only while that is copied, and while an upload reads
    it.

    Attributes:
        nbytes: Of its storages.
        deferred_nbytes: Of them, what is copied after the call.
    """

    def __init__(self, taken: Snapshot[Any], changed: threading.Condition) -> None:
        self._changed = changed
        self.nbytes = taken.nbytes
        self.deferred_nbytes = taken.deferred_nbytes
        self.num_tensors = taken.num_tensors
        self._taken: Snapshot[Any] | None = taken
        self._tree: Any = None
        self._made = time.monotonic()
        self._uploading = False

    def settle(self, copied: Future[Any]) -> None:
        """Gives the future the tree, once all of it is copied, or what went wrong: now where that
        is known, otherwise on the callbacks' thread."""
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
            taken.release()  # the tensors keep the memory
            copied.set_result(tree)

    def wait_until_copied(self) -> None:
        """Returns when all bytes are there.

        Raises:
            TornSnapshotError, StillframeError: They will not be, see `Snapshot.wait`.
        """
        taken = self._taken
        assert taken is not None
        taken.wait()
        taken.release()  # the tensors keep the memory

    def uploads_at_once(self, save: SnapshotSave) -> Any:
        """An upload begins with the tree as it is: see `wait_until_copied`. The save hears of the
        copy's end: now where that is known, otherwise on the callbacks' thread."""
        taken = self._taken
        assert taken is not None
        self._tree = tree_to_be(taken)
        self.upload_begins()
        save.copies(taken)
        if is_copied(taken):
            save.copied()
        else:
            call_when_copied(taken, save.copied)
        return self._tree

    def upload_begins(self) -> None:
        """Somebody reads the tree soon, and says when it is over: who wants memory waits for it."""
        taken = self._taken
        if taken is not None:
            will_return(taken)
        with self._changed:
            self._uploading = True
            self._changed.notify_all()

    def uploads(self, tree: Any) -> None:
        self._tree = tree

    def upload_ended(self) -> list[Any]:
        """Gives the memory back: nothing reads it any more. May be called again.

        Returns:
            The tensors, which are empty now, and the snapshot that they were of, for who knows a
            better time for their end.
        """
        taken, tree = self._taken, self._tree
        self._tree = None
        tensors = [each for _, each in paths(tree, lambda node: isinstance(node, torch.Tensor))]
        del tree
        if taken is not None and is_leased(taken):
            _empty(tensors)
        if taken is not None:
            recall(taken)  # an executor's process keeps the last state dict that it has written
            will_return(taken, False)  # what is left of it is in somebody's hands
        self._taken = None
        return [*tensors, taken]

    def grace_s(self) -> float:
        """How much longer an upload may be about to take it; 0 where one has, or nobody will."""
        if self._uploading or not self.holds_memory():
            return 0.0
        return max(0.0, self._made + _GRACE_S - time.monotonic())

    def holds_memory(self) -> bool:
        taken = self._taken
        return taken is not None and is_leased(taken)


# By dtype. Made once, and kept: both their making and their end let go of the interpreter lock.
_nothing: dict[torch.dtype, torch.Tensor] = {}


def _empty(tensors: list[Any]) -> None:
    for tensor in _with_memory(tensors):
        if tensor.dtype not in _nothing:
            with torch.inference_mode(False):
                _nothing[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = _nothing[tensor.dtype]


def _with_memory(tensors: list[Any]) -> Iterator[torch.Tensor]:
    """Those, and those inside of them, that have memory of their own."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            inner = (getattr(tensor, name) for name in names)
            yield from (each for each in inner if isinstance(each, torch.Tensor))
        elif tensor.layout is torch.strided and not tensor.is_quantized:
            yield tensor


class Stages:
    """Those of one stager, which wait for each other's memory."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._before: list[Staged] = []

    def stage(self, tree: Any, *, overlap: bool, engine: Engine | None) -> Staged:
        """Copies a tree with a state dict, once uploads under way have given back the memory it
        wants.

        Raises:
            PoolExhaustedError: It does not fit, and no upload under way would change that.
        """
        new = self._without_upload()

        def wait_for_an_upload() -> bool:
            """Looks at those that had none when the core was asked: it waits for all others."""
            nonlocal new
            if not new:
                return False
            self._wait_for_any(new)
            new = self._without_upload()
            return True

        taken = snapshot_to_write(
            tree, overlap=overlap, engine=engine, wait_for_room=wait_for_an_upload
        )
        staged = Staged(taken, self._changed)
        self._before.append(staged)
        return staged

    def _without_upload(self) -> list[Staged]:
        """Those that an upload is about to take."""
        self._before = [each for each in self._before if each.holds_memory()]
        return [each for each in self._before if each.grace_s() > 0]

    def _wait_for_any(self, new: list[Staged]) -> None:
        """Until an upload has taken one of them, or is not expected to any more."""
        with self._changed:
            grace_s = min(each.grace_s() for each in new)
            if grace_s > 0:
                self._changed.wait(grace_s)
