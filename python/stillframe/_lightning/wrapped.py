"""Saving with another CheckpointIO: `AsyncCheckpointIO(checkpoint_io=other)`.

    save    a snapshot in memory of the pool; `other` saves that on a thread of ours
    remove  `other` removes, on the same thread
    load    `other` loads, once what was submitted before has ended

All of it has its place in the process's log (`_save/ordered.py`), so removes run after the saves
before them and only if the last one did well, and whoever asks for a name sees what is in flight.
The snapshot's memory goes back when `other` has returned. How durable the result is, is up to
`other`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import fsspec

from stillframe import _core
from stillframe._base.calls import inside
from stillframe._base.paths import Place
from stillframe._save import ordered as _ordered
from stillframe._save.engine import Engine, take_slot
from stillframe._save.handle import SaveHandle, wait_for_end
from stillframe._save.options import SaveOptions
from stillframe._save.report import IoMode
from stillframe._snapshot.save import SnapshotSave
from stillframe._snapshot.snapshot import Snapshot, snapshot_to_write, will_return
from stillframe.errors import PoolExhaustedError

log = logging.getLogger("stillframe")


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
        io_mode: IoMode = "wrapped",
    ) -> None:
        self.io = io
        self._sentence = sentence or f"It was written by {type(io).__name__}, in its own way."
        self._io_mode = io_mode
        if getattr(io, "_base_checkpoint_io_configured", True) is False:
            io.checkpoint_io = reader()

    def save(
        self,
        checkpoint: Any,
        place: Place,
        *,
        storage_options: Any,
        options: SaveOptions,
        engine: Engine,
        pending: list[SaveHandle],
    ) -> SnapshotSave:
        """Takes the snapshot and returns; waits while the engine has no free slot.

        A checkpoint that no pool is large enough for is saved as it is, and waited for.

        Args:
            pending: The plugin's saves, oldest first; those that have ended may be among them.

        Raises:
            BusyError: With `when_busy="raise"`.
        """
        entered = time.perf_counter()
        with inside() as nested:
            _ordered.refuse_inside()
            slot = take_slot(engine, nested=nested)
            try:
                save = SnapshotSave(
                    place.text, place.given, options.on_durable, entered=entered, slot=slot
                )
                save.waited()
                taken = _take(checkpoint, options.overlap, engine, pending)
            except BaseException:
                slot.give_back()  # now, and not when the traceback goes
                raise
            fallbacks, live = [self._sentence], None
            if taken is None:
                sentence = "It does not fit into the pool: it was written during the call."
                log.warning("stillframe: %s: %s", place.given, sentence)
                fallbacks.append(sentence)
                live = checkpoint
            else:
                save.copies(taken)

            def work() -> bool:
                return self._work(save, place, live, storage_options, fallbacks)

            _submit(save, place.key(), work)
            if taken is None:
                wait_for_end(save)
            save.call_is_over()
            return save

    def _work(
        self,
        save: SnapshotSave,
        place: Place,
        live: Any,
        storage_options: Any,
        fallbacks: list[str],
    ) -> bool:
        """On the thread that works in the log's order."""
        taken = save.snapshot()
        nbytes = 0
        failed: BaseException | None = None
        try:
            tree = live if taken is None else taken.tree
            save.copied()
            self.io.save_checkpoint(tree, place.given, storage_options=storage_options)
            nbytes = _size(place.text, 0 if taken is None else taken.nbytes, self._io_mode)
        except BaseException as error:  # whatever the other code raises is the save's
            # Its frames hold the tree.
            failed = error.with_traceback(None)
        finally:
            tree = None
            if taken is not None:
                taken.release()
        if failed is None:
            save.end(save.report(nbytes, self._io_mode, fallbacks=fallbacks), None)
        else:
            save.end(None, failed)
        return failed is None

    def remove(self, path: Any, key: bytes, needed: Callable[[], bool] | None) -> None:
        _ordered.submit_remove(path, key, self.io.remove_checkpoint, needed)


def _submit(save: SnapshotSave, key: bytes, work: Callable[[], bool]) -> None:
    """Puts the save into the log."""
    # Who takes this has the save: the thread that works on it, or the lines below after an
    # exception, which Ctrl-C may be at any moment.
    owner = [save]
    try:
        taken = save.snapshot()
        save.begin()
        _ordered.submit(key, _core.WORK_SAVE, lambda after_good: _take_one(owner) and work())
        save.launched()
        if taken is not None:
            will_return(taken)
    except BaseException:
        if _take_one(owner):
            save.was_not_launched()
        raise


def _take_one(items: list[Any]) -> bool:
    try:
        items.pop()
    except IndexError:
        return False
    return True


def _take(
    checkpoint: Any, overlap: bool, engine: Engine, pending: list[SaveHandle]
) -> Snapshot[Any] | None:
    """A snapshot, once earlier ones have given back the memory it wants; None if it is too large
    for the pool."""

    def wait_for_a_save() -> bool:
        """What the other CheckpointIO does may make room: nobody can know."""
        under_way = [save for save in list(pending) if not save.done()]
        if under_way:
            wait_for_end(under_way[0])
        return bool(under_way)

    try:
        return snapshot_to_write(
            checkpoint, overlap=overlap, engine=engine, wait_for_room=wait_for_a_save
        )
    except PoolExhaustedError:
        return None


def _size(path: str, otherwise: int, io_mode: str) -> int:
    """The file's length; `otherwise` where nobody knows what was written."""
    try:
        if io_mode == "fsspec":
            file_system, name = fsspec.core.url_to_fs(path)
            return int(file_system.size(name) or otherwise)
        return os.stat(path).st_size if os.path.isfile(path) else otherwise
    except Exception:  # a remote file system's own errors; the file has been written
        return otherwise
