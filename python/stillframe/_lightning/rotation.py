"""What becomes of files once saves have ended: removes, links, and who is told of a checkpoint.

    remove   a file is removed behind the saves submitted before, in the log; it is held back while
             a link points to it or loggers are still to be told of it
    link     `last.ckpt` becomes a link to a file when that is there, in the log
    notify   loggers are told of a checkpoint once it is durable, on the thread that trains

A signal handler may save, remove and notify in the middle of any method here. So what is taken from
a collection is taken in one step, and done only by who got it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stillframe import _core
from stillframe._base.paths import Place
from stillframe._lightning import links as _links
from stillframe._save import ordered as _ordered
from stillframe._save.api import exists, remove
from stillframe._save.ordered import submit_remove

if TYPE_CHECKING:
    from stillframe._lightning.publish import Publication
    from stillframe._lightning.wrapped import Inner


class Rotation:
    """The files of one plugin in one process.

    Args:
        remover_of: Who removes a file, if that is not stillframe.
        durable: Sync the directories of links.

    Attributes:
        held: Removes that wait until nothing needs the file, in order.
        links: What each link that was made points to, as of the log's end.
        publications: Calls that wait for a save to be durable, in order.
        errors: Of links that could not be made, until somebody takes them.
    """

    def __init__(self, remover_of: Callable[[Place], Inner | None], *, durable: bool) -> None:
        self._remover_of = remover_of
        self._durable = durable
        self.held: dict[Place, None] = {}
        self.links: dict[Place, Place] = {}
        self.publications: deque[Publication] = deque()
        self.errors: deque[BaseException] = deque()
        # Which link pointed to a file last, for files that no link needs any more.
        self._linked_by: dict[Place, Place] = {}
        # Name in the log of the newest link or remove; all earlier ones end before.
        self._newest_key: bytes | None = None

    def under_way(self) -> bool:
        return bool(self.publications or self.held or self._newest_key)

    def make_room(self, place: Place) -> None:
        """Something is about to be submitted that makes this file: removes of it come first."""
        self.links.pop(place, None)
        self._submit_remove(place)

    def remove(self, place: Place) -> None:
        """Removes the file, now or when nothing needs it any more."""
        self.links.pop(place, None)
        self.held[place] = None
        self.release()

    def release(self, *, all_of_them: bool = False) -> None:
        """Submits the removes that nothing holds back."""
        for place in list(self.held):
            if all_of_them or not self._needed(place):
                self._submit_remove(place)

    def _release_last(self) -> None:
        """Submits what is still held back when a run ends. A link that was to be made anew may
        never have been, as after Ctrl-C: what it names when the turn comes is kept."""
        for link, target in list(self.links.items()):
            if target in self.held:
                self._linked_by[target] = link
        self.release(all_of_them=True)

    def link(self, target: Place, link: Place) -> None:
        """Makes `link` a link to `target` when all saves submitted before have ended."""
        # An exception may come before any line. The former target is let go of last.
        former = self.links.get(link)
        if former is not None:
            self._linked_by[former] = link
        self._submit_remove(link)
        key = link.key()
        _ordered.submit(key, _core.WORK_LINK, lambda after_good: self._make_link(target, link))
        self._newest_key = key
        self.links[link] = target
        self.release()

    def will_exist(self, place: Place, otherwise: Callable[[Any], bool]) -> bool:
        """Whether the file will be there when the log has run out; `otherwise(path)` says so of
        remote paths that are not in the log."""
        if place in self.held:
            return False
        if not place.remote:
            return exists(place.given)
        known = _core.log_exists(place.key())
        return otherwise(place.given) if known < 0 else bool(known)

    def notify(self) -> None:
        """Makes the calls that are due, in order, and lets go of files."""
        for publication in list(self.publications):
            if not publication.due():
                break
            self._deliver(publication)
        if self.held:
            self.release()

    def finish(self) -> BaseException | None:
        """Makes every call, and waits for links and removes. Saves have ended.

        Returns:
            The first error of a call.
        """
        raised: BaseException | None = None
        for publication in list(self.publications):
            try:
                self._deliver(publication)
            except Exception as error:
                raised = raised or error
        self._release_last()
        self.wait()
        self._linked_by.clear()
        return raised

    def wait(self) -> None:
        """Waits for links and removes."""
        while (newest := self._newest_key) is not None:
            _ordered.wait_for_key(newest)
            if self._newest_key is newest:
                self._newest_key = None

    def _make_link(self, target: Place, link: Place) -> bool:
        try:
            return _links.make_link(target.name, link.name, durable=self._durable)
        except Exception as error:  # raised on the thread that trains
            self.errors.append(error.with_traceback(None))
            return False

    def _needed(self, place: Place) -> bool:
        """Whether a link points to the file, or loggers are still to be told of it."""
        return place in self.links.values() or any(
            each.place == place for each in list(self.publications)
        )

    def _submit_remove(self, place: Place) -> None:
        if self.held.pop(place, False) is False:
            return
        key = place.key()
        link = self._linked_by.pop(place, None)
        needed = None if link is None else functools.partial(_links.names, link.name, place.name)
        inner = self._remover_of(place)
        if inner is not None:
            inner.remove(place.name, key, needed)
        elif needed is not None:
            submit_remove(place.name, key, _links.remove_tree, needed)
        else:
            remove(place.name)
        self._newest_key = key

    def _deliver(self, publication: Publication) -> None:
        # It is taken off the list, and its file let go of, after the call.
        try:
            publication.deliver()
        finally:
            with contextlib.suppress(ValueError):
                self.publications.remove(publication)


def note_unmade(path: Any) -> None:
    """A save failed in its call, and who asked for it is not told: it goes on and removes older
    files. So the log gets a save that failed, after which removes are dropped until one does well.
    """
    try:
        name = Place.of(path).key()
    except (TypeError, ValueError):  # no path at all
        name = repr(path).encode(errors="replace")
    _ordered.submit(name, _core.WORK_SAVE, lambda after_good: False)
