"""A store in a local directory that tests can stop and break: URLs `stub://disk/DIRECTORY`.

Files in the directory `control` beside the process say what the store does, so several processes
may use one: `down` makes every upload fail, and `held` stops it after its first piece. The file
`puts` lists the uploads: a line when one begins and one when the object is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import stillframe
import stillframe._save.exit as at_exit
import torch
from fix_waits import eventually
from fsspec.implementations.local import LocalFileSystem
from stillframe._remote import journal, mirror

_POLL_S = 0.001


class StubFileSystem(LocalFileSystem):
    """A local file system under another name, with the switches above."""

    protocol = ("stub",)
    control = Path("control")

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(re.sub("^stub://([^/@]*@)?disk/", "/", path)))

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode:
            return super().open(path, mode, *args, **kwargs)
        if (self.control / "down").exists():
            raise ConnectionError("the store is down")
        self.note("begin", path)
        return _Held(super().open(path, mode, *args, **kwargs), self.control / "held")

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.note("content", f"{hashlib.sha256(Path(path1).read_bytes()).hexdigest()}")
        os.replace(path1, path2)
        self.note("end", path2)

    def rm_file(self, path: str) -> None:
        super().rm_file(path)
        self.note("delete", path)

    def note(self, what: str, path: str) -> None:
        name = Path(path).name.split(".stillframe-tmp")[0]
        if what == "begin":  # a temporary: NAME.RANDOM.stillframe-tmp
            name = name.rpartition(".")[0]
        line = f"{what} {name} {os.getpid()}\n".encode()
        fd = os.open(self.control / "puts", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(fd, line)
        os.close(fd)


class _Held:
    """A file whose second write waits while the switch `held` is there."""

    def __init__(self, file: Any, switch: Path) -> None:
        self._file, self._switch, self._written = file, switch, 0

    def close(self) -> None:
        self._file.close()

    def write(self, data: Any) -> None:
        self._file.write(data)
        while self._switch.exists():
            time.sleep(_POLL_S)


fsspec.register_implementation("stub", StubFileSystem, clobber=True)


class StubStore:
    """The store as a test sees it.

    Attributes:
        url: The URL of its directory "run".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.control = path / "control"
        self.control.mkdir(parents=True)
        StubFileSystem.control = self.control
        self.url = f"stub://disk{path}/run/"

    def read(self, name: str) -> bytes:
        return (self.path / "run" / name).read_bytes()

    def names(self) -> set[str]:
        run = self.path / "run"
        found = {str(each.relative_to(run)) for each in run.rglob("*") if each.is_file()}
        return {name for name in found if not name.endswith(".stillframe-tmp")}

    def puts(self, what: str = "end") -> list[str]:
        """Return the names of the uploads that have begun or ended, in order.

        what: "begin" or "end"; "delete" for the names of deleted objects; "content" for the SHA-256
        of each object.
        """
        lines = [each.split(" ") for each in self.lines()]
        return [name for kind, name, _ in lines if kind == what]

    def lines(self) -> list[str]:
        """Return the lines of `puts`: what, the name, and the process."""
        file = self.control / "puts"
        return file.read_text().splitlines() if file.exists() else []

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Make uploads fail inside the block."""
        with self._switched("down"):
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop uploads inside the block; they go on after it."""
        with self._switched("held"):
            yield

    def switch(self, name: str, on: bool) -> None:
        if on:
            (self.control / name).touch()
        else:
            (self.control / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _switched(self, name: str) -> Iterator[None]:
        self.switch(name, True)
        try:
            yield
        finally:
            self.switch(name, False)

    def wait_for(self, what: str, name: str) -> None:
        assert eventually(lambda: name in self.puts(what)), (what, name, self.puts(what))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubStore]:
    """Return a store, with short pauses between tries; afterwards nothing is left to upload."""
    monkeypatch.setattr(mirror, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(mirror, "_LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(mirror, "_POLL_S", 0.02)
    store = StubStore(tmp_path / "store")
    yield store
    for child in list(Child.living):
        child.kill()
    for name in ("down", "held"):
        store.switch(name, False)
    try:
        with contextlib.suppress(stillframe.StillframeError):
            uploaded()
    finally:  # the next test must not upload files that a failed test has left
        for directory in list(mirror.uploader._directories):
            shutil.rmtree(os.path.join(directory, journal.NAME), ignore_errors=True)


def uploaded() -> None:
    """Wait until every upload is made; fail after 30 s if a store does not take one."""
    stillframe.wait_all(timeout=30, mirrors=True)


def state(value: float, numel: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((numel,), float(value))}


def entries(directory: Path) -> list[str]:
    """Return the states of the entries in a directory's journal, the oldest first."""
    return [each.entry_name.rpartition(".")[2] for each in journal.entries(str(directory))]


def has_entries(directory: Path, *states: str) -> bool:
    """Wait until the entries of a directory's journal have these states."""
    return eventually(lambda: entries(directory) == [*states])


def options_used(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets the options of every upload."""
    used: list[object] = []

    def open_store(url: str, options: Any, open_store: Any = mirror.open_store) -> Any:
        used.append(options)
        return open_store(url, options)

    monkeypatch.setattr(mirror, "open_store", open_store)
    return used


def put(path: Path, url: str) -> None:
    """Have the mirror upload a file that other code has written."""
    entry = journal.Entry(str(path.parent), path.name, url, path.name)
    journal.add_due(entry, durable=True)
    mirror.uploader.request_journal_check(entry.directory)


def leave(directory: Path, url: str, name: str, content: bytes) -> None:
    """Leave a file and its journal entry, as a process does that ends before the upload."""
    (directory / name).write_bytes(content)
    journal.add_due(journal.Entry(str(directory), name, url, name), durable=False)


def drop(directory: Path) -> None:
    """Drop what waits. The mirror's thread may be using the journal, so its directory stays."""
    for entry in journal.entries(str(directory)):
        entry.remove()


class Child:
    """A forked process that runs a function and then stillframe's part of the exit.

    The fixture `store` kills children that a failed test has not waited for.
    """

    living: ClassVar[list[Child]] = []

    def __init__(self, work: Callable[[], object], printed: Path) -> None:
        self._printed = printed
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work)
        self.living.append(self)

    def _run(self, work: Callable[[], object]) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            log = os.open(self._printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(log, 2)
            sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)  # OpenMP's threads exist only in the parent
            at_exit._QUIET_S = 60  # on a slow machine the line about a wait must not appear
            logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
            work()
            at_exit._drain()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def kill(self) -> None:
        for kill in (os.kill, os.killpg):  # it may have no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.living.remove(self)
        return self.status

    def printed(self) -> str:
        """Wait for the end; return what the process printed. Fail unless its status is 0."""
        assert self.wait() == 0, self._printed.read_text()
        return self._printed.read_text()


def when_said(words: str, function: Callable[[], object]) -> None:
    """Make the exit of a child print its line at once, and call `function` if `words` are in it."""

    def saying(sentence: str, say: Callable[[str], None] = at_exit._print_line) -> None:
        say(sentence)
        if words in sentence:
            function()

    at_exit._print_line, at_exit._QUIET_S = saying, 0.05
