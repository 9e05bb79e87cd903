"""Saves with another CheckpointIO: `AsyncCheckpointIO(checkpoint_io=other)`.

    save    takes a snapshot in pool memory; `other` saves the snapshot on a thread of stillframe's
    remove  `other` removes, on the same thread
    load    `other` loads, once everything submitted before has ended

Saves and removes are external work of the process's log. So a remove runs after the saves that were
submitted before it, and only if the last of them has succeeded. The snapshot's memory goes back to
the pool when `other` has returned. `other` decides how durable the result is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from stillframe import _core
from stillframe._base.calls import inside_call
from stillframe._base.paths import CheckpointPath
from stillframe._save import ordered as _ordered
from stillframe._save.engine import Engine, take_slot
from stillframe._save.handle import SaveHandle, set_mirror, wait_for_end
from stillframe._save.options import SaveOptions
from stillframe._snapshot.save import SnapshotSave
from stillframe._snapshot.snapshot import Snapshot, snapshot_for_pickling
from stillframe.errors import PoolExhaustedError

log = logging.getLogger("stillframe")


class WrappedIO:
    """The CheckpointIO that a plugin wraps.

    Args:
        io: A CheckpointIO. If it is one of Lightning's wrappers and wraps nothing yet, it gets
            `reader()` to wrap, as Lightning does.
        reader: TorchCheckpointIO of the package.
        sentence: Names the writer in each report. By default it names the class of `io`.
    """

    def __init__(self, io: Any, reader: type[Any], sentence: str | None = None) -> None:
        self.io = io
        self.sentence = sentence or f"It was written by {type(io).__name__}, in its own way."
        # Only Lightning's wrappers have this attribute. It is False if they wrap nothing yet.
        if getattr(io, "_base_checkpoint_io_configured", True) is False:
            io.checkpoint_io = reader()

    def save(
        self,
        checkpoint: Any,
        target: CheckpointPath,
        *,
        storage_options: Any,
        options: SaveOptions,
        engine: Engine,
        pending: list[SaveHandle],
    ) -> SnapshotSave:
        """Take a snapshot and put its save into the log. Wait while the engine has no free slot.

        A checkpoint that is too large for the pool is saved from its own memory, in the call.

        Args:
            pending: The plugin's saves, oldest first. Some may have ended.

        Raises:
            BusyError: With `when_busy="raise"`.
        """
        entered = time.perf_counter()
        with inside_call() as nested:
            _ordered.refuse_in_external_work()
            slot = take_slot(engine, nested=nested)
            try:
                save = SnapshotSave(
                    target.text, target.given, options.on_durable, entered=entered, slot=slot
                )
                set_mirror(save, options.mirror)
                save.record_slot_wait()  # the wait for the slot is over
                taken = _take(checkpoint, options.overlap, engine, pending)
            except BaseException:
                slot.give_back()  # otherwise the traceback would keep the slot
                raise

            fallbacks = [self.sentence]
            uncopied = None
            if taken is None:
                sentence = "It does not fit into the pool: it was written during the call."
                log.warning("stillframe: %s: %s", target.given, sentence)
                fallbacks.append(sentence)
                uncopied = checkpoint
            else:
                save.set_snapshot(taken)

            def work() -> bool:
                return self._work(save, target, uncopied, storage_options, fallbacks)

            save.submit(target.key(), _core.WORK_SAVE, work)
            if taken is None:
                wait_for_end(save)
            save.record_call_end()
            return save

    def _work(
        self,
        save: SnapshotSave,
        target: CheckpointPath,
        uncopied: Any,
        storage_options: Any,
        fallbacks: list[str],
    ) -> bool:
        """Let `io` save, on another thread, and end the save. Return whether the save succeeded.

        Args:
            uncopied: The checkpoint itself if there is no snapshot, otherwise None.
            fallbacks: Sentences for the save's report.
        """
        taken = save.snapshot()
        nbytes = 0
        failed: BaseException | None = None
        try:
            tree = uncopied if taken is None else taken.tree
            save.record_copied()
            self.io.save_checkpoint(tree, target.given, storage_options=storage_options)
            snapshot_nbytes = 0 if taken is None else taken.nbytes
            nbytes = _file_size(target.text, otherwise=snapshot_nbytes)
        except BaseException as error:
            failed = error.with_traceback(None)  # its frames would keep the snapshot's memory
        finally:
            tree = None  # otherwise this reference would keep the snapshot's memory
            if taken is not None:
                taken.release()
        if failed is None:
            save.end(save.report(nbytes, "wrapped", fallbacks=fallbacks), None)
        else:
            save.end(None, failed)
        return failed is None

    def remove(self, path: Any, key: bytes, is_needed: Callable[[], bool] | None) -> None:
        """Append a remove by `io` to the log. See `ordered.submit_remove`."""
        _ordered.submit_remove(path, key, self.io.remove_checkpoint, is_needed)


def _take(
    checkpoint: Any, overlap: bool, engine: Engine, pending: list[SaveHandle]
) -> Snapshot[Any] | None:
    """Take a snapshot. While the pool is full, wait for earlier saves. Return None for a checkpoint
    that is too large for the pool."""

    def wait_for_a_save() -> bool:
        """Wait for the oldest save under way. Return False if there is none."""
        under_way = [save for save in list(pending) if not save.done()]
        if under_way:
            wait_for_end(under_way[0])
        return bool(under_way)

    try:
        return snapshot_for_pickling(
            checkpoint, overlap=overlap, engine=engine, wait_for_room=wait_for_a_save
        )
    except PoolExhaustedError:
        return None


def _file_size(path: str, otherwise: int) -> int:
    """Return the length of a file, or `otherwise` if `path` is no file."""
    try:
        return os.stat(path).st_size if os.path.isfile(path) else otherwise
    except OSError:
        return otherwise
