"""`PinnedStager`: the stager for `dcp.async_save`.

DCP does not tell a stager when an upload has ended. But each upload has a thread of its own, which
takes the state dict from the stager's future and exits after the upload. So the exit of this thread
ends the upload. If other code takes the state dict, the memory returns to the pool when the tensors
are gone.
"""

from __future__ import annotations

import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from stillframe._base.arguments import check_booleans
from stillframe._dcp.staged import Staged, Stages, StateDict
from stillframe._save.engine import Engine, require_engine
from stillframe._snapshot.loans import keep_conj_and_neg_bits
from stillframe.errors import StillframeError

_thread = threading.local()  # its attribute `thread_exit` is a `_ThreadExitSentinel`


class _ThreadExitSentinel:
    """An object that only one thread refers to. Its finalizer runs when the thread exits."""


class _StagingFuture(Future[StateDict]):
    """The future that DCP gets.

    `dcp.async_save` assumes that a future that is done has succeeded. So a failed future is done
    only after a callback was added, which then gets the error.
    """

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged
        self._has_callback = False

    def result(self, timeout: float | None = None) -> StateDict:
        """Return the staged state dict. If an executor of DCP calls this, the exit of its thread
        ends the upload."""
        caller_globals = sys._getframe(1).f_globals
        caller = caller_globals.get("__name__", "")  # the calling module
        is_of_dcp = caller.startswith("torch.distributed.checkpoint.")
        if is_of_dcp and caller.endswith("_executor"):
            if caller.endswith("_process_executor"):
                keep_conj_and_neg_bits()  # when this thread pickles tensors
            self._staged.record_upload_start()
            thread_exit = _ThreadExitSentinel()
            finalizer = weakref.finalize(thread_exit, self._staged.release_after_upload)
            finalizer.atexit = False  # only the exit of this thread ends the upload
            _thread.thread_exit = thread_exit  # the thread's exit frees this thread-local object
            self._staged.record_uploaded_tree(super().result(timeout))
        return super().result(timeout)

    def add_done_callback(self, fn: Any) -> None:
        self._has_callback = True
        super().add_done_callback(fn)

    def done(self) -> bool:
        return super().done() and (self._has_callback or self.exception() is None)


class PinnedStager(AsyncStager):
    """Stages state dicts into an engine's pool, for `dcp.async_save(async_stager=)`. It works with
    any storage writer, either executor, and any number of ranks.

    The future that DCP gets is done when all bytes are copied. With `overlap=True`, data that only
    the optimizer's step changes is copied after the call, during the next forward and backward. The
    next step waits for that copy, so you need not wait for `staging_completion`. CPU tensors that
    no optimizer owns, and Python objects, are copied during the call.

    The copy keeps keys, nesting, shared objects, views, tied tensors, strides, conjugate and
    negative bits, tensor attributes, parameters and DTensors. When the upload has ended or failed,
    the memory returns to the pool, and tensors of the copy that are still referenced become empty.
    If the pool is full, staging waits for the uploads under way.

    Args:
        engine: The engine whose pool is used, `stillframe.default_engine()` by default.
        overlap: Copy after the call what only the optimizer's step changes.

    Raises:
        TypeError: `engine` is not an Engine, or `overlap` is not a bool.
    """

    _synchronize_after_execute = False  # DCP need not call `synchronize_staging`

    def __init__(self, engine: Engine | None = None, overlap: bool = True) -> None:
        if engine is not None:
            require_engine(engine)
        check_booleans(overlap=overlap)
        self._engine = engine
        self._overlap = overlap
        self._closed = False
        self._stages = Stages()

    def stage(self, state_dict: StateDict, **_: Any) -> Future[StateDict]:
        """Copy `state_dict`. DCP calls this.

        Returns:
            A future of the state dict on CPU tensors. It fails with `TornSnapshotError` if anything
            but an optimizer's step changed a tensor before it was copied.

        Raises:
            PoolExhaustedError: The state does not fit into the memory of the pool that the user's
                snapshots leave.
            StillframeError: The stager or its engine is closed, or a device failed.
            Exception: As in `stillframe.snapshot`.
        """
        if self._closed:
            raise StillframeError("the stager was closed: make another one")
        staged = self._stages.stage(state_dict, overlap=self._overlap, engine=self._engine)
        future = _StagingFuture(staged)
        staged.complete_future_when_copied(future)
        return future

    def synchronize_staging(self) -> None:
        """Do nothing: the next optimizer step waits for the copy, and the future reports it."""

    def close(self) -> None:
        """Refuse further stages. Uploads under way go on. May be called again."""
        self._closed = True
