"""A save of many ranks in the order of this process's other saves, removes and links.

Each rank has an entry for it in its own log (`_save/ordered.py`). The save goes on while others
stand in front of it; only two things wait for them:

    writing    for removes and saves of the same directory, or a remove would take the new files
    commit     for everything, on the coordinator: so what was saved first is there first

What stands behind waits for the end of the save: a remove of the checkpoint before it runs only
where it ended well, and `wait_all`, `exists` and the end of the process know of it.
"""

from __future__ import annotations

import contextlib
import threading

from stillframe import _core
from stillframe._base.paths import Place
from stillframe._save import ordered


class Turn:
    """
    Args:
        place: The directory of the checkpoint; a remote one has a name of its own in the log.

    Raises:
        StillframeError: The interpreter is exiting.
    """

    def __init__(self, place: Place) -> None:
        key = place.key(follow_link=True)
        self._come, self._over = threading.Event(), threading.Event()
        self._before = _core.LogLoad(key)
        self._entry = ordered.submit(key, _core.WORK_SAVE, self._stand)

    def _stand(self, after_good: bool) -> bool:
        """In its turn; the log stands still until the save has ended."""
        self._come.set()
        self._over.wait()
        return False  # `end` has said how

    def wait_to_write(self) -> None:
        """Waits until what was submitted before has done with the directory."""
        with contextlib.suppress(OSError):  # it need not be there
            self._before.open()
            self._before.close()

    def wait_to_commit(self) -> None:
        """Waits until all that was submitted before has ended."""
        self._come.wait()

    def end(self, well: bool) -> None:
        """The save has ended: what stands behind it goes on."""
        ordered.end(self._entry, well)
        self._come.set()
        self._over.set()
