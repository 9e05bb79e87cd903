"""`PinnedStager`: what `dcp.async_save` stages with.

DCP tells a stager nothing of the upload's end. Its executors run each upload on a thread of its
own, which first asks the stager's future for the state dict and ends with the upload. So the future
notes the end of a thread of DCP's that asked it. Where somebody else asks, the memory goes back
when the tensors are gone.
"""

from __future__ import annotations

import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from stillframe._base.arguments import refuse_unclear
from stillframe._dcp.staged import Staged, Stages, StateDict
from stillframe._save.engine import Engine, refuse_no_engine
from stillframe._snapshot.lent import keep_bits
from stillframe.errors import StillframeError

_thread = threading.local()


class _End:
    """Dies with the thread that it is kept in."""


class _Staging(Future[StateDict]):
    """The future that DCP gets.

    `dcp.async_save` takes a future that is done already for one that went well. So one that has
    failed is done only once somebody has asked to be told.
    """

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged
        self._asked = False

    def result(self, timeout: float | None = None) -> StateDict:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("torch.distributed.checkpoint.") and caller.endswith("_executor"):
            if caller.endswith("_process_executor"):
                keep_bits()
            self._staged.upload_begins()
            _thread.end = end = _End()
            weakref.finalize(end, self._staged.upload_ended).atexit = False
            self._staged.uploads(super().result(timeout))
        return super().result(timeout)

    def add_done_callback(self, fn: Any) -> None:
        self._asked = True
        super().add_done_callback(fn)

    def done(self) -> bool:
        return super().done() and (self._asked or self.exception() is None)


class PinnedStager(AsyncStager):
    """Stages state dicts into an engine's pool, for `dcp.async_save(async_stager=)`: with any
    storage writer, either executor, one rank or many.

    The future that DCP waits for is done when all bytes are copied. With `overlap=True`, what only
    the optimizer's step changes is copied after the call, under the next forward and backward, and
    the next step waits for it by itself: there is no need to wait for `staging_completion`. CPU
    tensors that no optimizer owns, and Python objects, are copied during the call.

    The state dict keeps its keys, nesting, shared objects, views, ties, strides, conjugate and
    negative bits, tensor attributes, parameters and DTensors. Nothing writes to its memory until
    the upload that reads it has ended, successfully or not. Then the memory goes back to the pool,
    and tensors of the state dict that are still referenced (by a planner that is kept, by the
    frames of an exception) are empty. If the pool is full, staging waits for the uploads under way.

    Args:
        engine: The engine whose pool is used, `stillframe.default_engine()` by default.
        overlap: Copy after the call what only the optimizer's step changes.

    Raises:
        TypeError: `engine` is no Engine, or `overlap` neither True nor False.
    """

    _synchronize_after_execute = False

    def __init__(self, engine: Engine | None = None, overlap: bool = True) -> None:
        if engine is not None:
            refuse_no_engine(engine)
        refuse_unclear(overlap=overlap)
        self._engine = engine
        self._overlap = overlap
        self._closed = False
        self._stages = Stages()

    def stage(self, state_dict: StateDict, **_: Any) -> Future[StateDict]:
        """Copies `state_dict`; DCP calls this.

        Returns:
            The state dict on CPU tensors, once all of it is copied. `TornSnapshotError` where
            something other than an optimizer's step changed a tensor before.

        Raises:
            PoolExhaustedError: It does not fit into the pool beside what snapshots hold.
            StillframeError: The stager or its engine is closed; a device failed.
            Exception: As `stillframe.snapshot`.
        """
        if self._closed:
            raise StillframeError("the stager was closed: make another one")
        staged = self._stages.stage(state_dict, overlap=self._overlap, engine=self._engine)
        future = _Staging(staged)
        staged.settle(future)
        return future

    def synchronize_staging(self) -> None:
        """Nothing: the future tells of the end, and the next optimizer step waits for it."""

    def close(self) -> None:
        """Refuses further stages. Uploads under way go on. May be called again."""
        self._closed = True
