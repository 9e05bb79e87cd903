"""Records the calls by which Python changes directories, and finds every state that a power failure
may leave.

A change of a directory (a name made, replaced or removed) is on the disk once that directory was
synced. Until then each change may be there or not, independently of the others. The model in
tests/c/save/crash_model.h does the same for the core's calls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stillframe import _core

Step = tuple[int, bytes, bytes]
State = dict[str, str]  # path -> "directory", "file", or "-> " and the target of a link


@dataclass(frozen=True)
class Call:
    """One change of a directory, or its sync."""

    kind: str
    directory: str
    change: dict[str, str | None] = field(default_factory=dict)  # None: the name was removed


def kind_at(path: str) -> str | None:
    """Return the entry at a path as in `State`; None if there is none."""
    if os.path.islink(path):
        return f"-> {os.readlink(path)}"
    if os.path.isdir(path):
        return "directory"
    return "file" if os.path.exists(path) else None


def stepping(
    on_step: Callable[[Step, bool], int | None],
) -> Callable[[Sequence[Step]], tuple[int, int]]:
    """Run `_core.take_steps` one step at a time, and call `on_step` before and after each step.

    Before a step, `on_step` may return an errno with which the step fails.
    """
    take = _core.take_steps

    def call(steps: Sequence[Step]) -> tuple[int, int]:
        for done, step in enumerate(steps):
            code = on_step(step, False) or take([step])[1]
            if code:
                return done, code
            on_step(step, True)
        return len(steps), 0

    return call


class Recorded:
    """Runs a block as a context manager, and records its calls below the directory `top`."""

    def __init__(self, top: Path, identity: Callable[[str], str | None] = kind_at) -> None:
        self.top = os.path.realpath(top)
        self._identity = identity  # distinguishes files of the same name, if the test needs that
        self.calls: list[Call] = []
        self.before: State = {}

    @contextlib.contextmanager
    def __call__(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
        for folder, folders, files in os.walk(self.top):
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                self.before[path] = self._identity(path) or ""
        with monkeypatch.context() as patched:
            for name in (
                "mkdir",
                "symlink",
                "link",
                "unlink",
                "remove",
                "rmdir",
                "rename",
                "replace",
            ):
                patched.setattr(os, name, self._recording(name, getattr(os, name)))
            fsync = os.fsync

            def synced(fd: int) -> None:
                fsync(fd)
                self.calls.append(Call("sync", os.readlink(f"/proc/self/fd/{fd}")))

            patched.setattr(os, "fsync", synced)
            patched.setattr(_core, "take_steps", stepping(self._note))
            yield self

    def _note(self, step: Step, taken: bool) -> None:
        kind, name, content = step
        path = self._full(os.fsdecode(name))
        if not taken:
            self._was_there = os.path.lexists(path)
        elif kind == _core.STEP_SYNC:
            self.calls.append(Call("sync", os.path.realpath(path)))
        elif kind == _core.STEP_WRITE_SYNCED:
            self.calls.append(Call("sync", path))
        elif kind == _core.STEP_RENAME:
            paths = (path, self._full(os.fsdecode(content)))
            change = {each: self._identity(each) for each in paths}
            self.calls.append(Call("rename", os.path.dirname(path), change))
        elif kind == _core.STEP_UNLINK and self._was_there:
            self.calls.append(Call("unlink", os.path.dirname(path), {path: None}))

    def _recording(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **named: Any) -> Any:
            answer = call(*args, **named)
            paths = [os.fspath(each) for each in args if isinstance(each, (str, os.PathLike))]
            if name in ("symlink", "link"):
                paths = paths[1:]
            full = [self._full(each) for each in paths]
            change = {each: self._identity(each) for each in full}
            self.calls.append(Call(name, os.path.dirname(full[-1]), change))
            return answer

        return recording

    def _full(self, path: str) -> str:
        return os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))

    def synced(self) -> list[str]:
        return [each.directory for each in self.calls if each.kind == "sync"]

    def states(self, calls: int | None = None) -> Iterator[State]:
        """Return every state after the first `calls` calls and a power failure; by default after
        all."""
        made = self.calls[:calls]
        durable, doubtful = dict(self.before), []
        for call in made:
            if call.kind != "sync":
                doubtful.append(call)
                continue
            for each in doubtful:
                if each.directory == call.directory:
                    _change(durable, each)
            doubtful = [each for each in doubtful if each.directory != call.directory]
        for kept in itertools.product((False, True), repeat=len(doubtful)):
            state = dict(durable)
            for is_kept, call in zip(kept, doubtful, strict=True):
                if is_kept:
                    _change(state, call)
            yield {path: what for path, what in state.items() if _reachable(path, state, self.top)}

    def every_state(self) -> Iterator[State]:
        """Return the states after each of the calls, and before the first."""
        for calls in range(len(self.calls) + 1):
            yield from self.states(calls)


def _change(state: State, call: Call) -> None:
    for path, what in call.change.items():
        if what is None:
            state.pop(path, None)
        else:
            state[path] = what


def _reachable(path: str, state: State, top: str) -> bool:
    above = os.path.dirname(path)
    return above == top or (above in state and _reachable(above, state, top))
