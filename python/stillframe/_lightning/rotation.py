"""Removes, links and announces files once saves have ended.

    remove   removes a file after the saves submitted before it, in the log; held back while a link
             points to the file or loggers are still to be told of it
    link     makes `last.ckpt` a link to a file when that exists, in the log
    notify   tells loggers of a checkpoint once it is durable, on the training thread

A signal handler may save, remove and notify in the middle of any method here. So every method takes
an item from a collection in one step, and only the caller that got the item handles it.
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
        remover_of: Returns the CheckpointIO that removes a file; None for stillframe itself.
        durable: Sync the directories of links.

    Attributes:
        held: Removes that wait until nothing needs the file, in order.
        links: The target of each link, once all entries of the log are done.
        publications: Calls that wait for a save to be durable, in order.
        errors: Errors of links that could not be made, until they are collected.
    """

    def __init__(self, remover_of: Callable[[Place], Inner | None], *, durable: bool) -> None:
        self._remover_of = remover_of
        self._durable = durable
        self.held: dict[Place, None] = {}
        self.links: dict[Place, Place] = {}
        self.publications: deque[Publication] = deque()
        self.errors: deque[BaseException] = deque()
        # For files that no link needs any more: the link that pointed to them last.
        self._linked_by: dict[Place, Place] = {}
        # Name in the log of the newest link or remove; all earlier ones end before it.
        self._newest_key: bytes | None = None

    def under_way(self) -> bool:
        return bool(self.publications or self.held or self._newest_key)

    def make_room(self, place: Place) -> None:
        """Submit a remove of this file that is held back, because the file is about to be made."""
        self.links.pop(place, None)
        self._submit_remove(place)

    def remove(self, place: Place) -> None:
        """Remove the file, now or when nothing needs it any more."""
        self.links.pop(place, None)
        self.held[place] = None
        self.release()

    def release(self, *, all_of_them: bool = False) -> None:
        """Submit the removes that nothing holds back."""
        for place in list(self.held):
            if all_of_them or not self._needed(place):
                self._submit_remove(place)

    def _release_last(self) -> None:
        """Submit the removes that are still held back when a run ends.

        After Ctrl-C a link may not have been made again. So each remove keeps the file if a link
        still names it when its entry is at the head of the log.
        """
        for link, target in list(self.links.items()):
            if target in self.held:
                self._linked_by[target] = link
        self.release(all_of_them=True)

    def link(self, target: Place, link: Place) -> None:
        """Make `link` a link to `target` when all saves submitted before have ended."""
        # An exception may come before any line, so the former target is released last.
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
        """Return whether the file will exist once all entries of the log are done.

        `otherwise(path)` answers for remote paths that are not in the log.
        """
        if place in self.held:
            return False
        if not place.remote:
            return exists(place.given)
        known = _core.log_exists(place.key())
        return otherwise(place.given) if known < 0 else bool(known)

    def notify(self) -> None:
        """Make the calls that are due, in order, and submit removes that waited for them."""
        for publication in list(self.publications):
            if not publication.due():
                break
            self._deliver(publication)
        if self.held:
            self.release()

    def finish(self) -> BaseException | None:
        """Make every call, and wait for links and removes, after all saves have ended.

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
        """Wait for links and removes."""
        while (newest := self._newest_key) is not None:
            _ordered.wait_for_key(newest)
            if self._newest_key is newest:
                self._newest_key = None

    def _make_link(self, target: Place, link: Place) -> bool:
        try:
            return _links.make_link(target.name, link.name, durable=self._durable)
        except Exception as error:  # raised later, on the training thread
            self.errors.append(error.with_traceback(None))
            return False

    def _needed(self, place: Place) -> bool:
        """Return whether a link points to the file, or loggers are still to be told of it."""
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
        # It stays in the list, which protects its file, until the call has returned.
        try:
            publication.deliver()
        finally:
            with contextlib.suppress(ValueError):
                self.publications.remove(publication)


def note_unmade(path: Any) -> None:
    """Add a failed save to the log, for a save that failed in its call and was only warned of.

    The caller does not see the failure and removes older files next. After a failed save the log
    drops removes until a save succeeds.
    """
    try:
        name = Place.of(path).key()
    except (TypeError, ValueError):  # not a path
        name = repr(path).encode(errors="replace")
    _ordered.submit(name, _core.WORK_SAVE, lambda after_good: False)
