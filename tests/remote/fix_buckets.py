"""Places for objects: an S3 server, and fsspec's memory."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fix_store import Server
from stillframe._remote.stores import open_store


class Bucket:
    """An S3 bucket, or fsspec's memory."""

    def __init__(self, server: Server | None) -> None:
        self.server = server
        self._root = f"t{uuid.uuid4().hex}"
        self.fs: Any = fsspec.filesystem("memory")

    def url(self, key: str) -> str:
        return f"memory://{self._root}/{key}" if self.server is None else self.server.url(key)

    def put(self, key: str, data: bytes) -> str:
        """Make an object; return its URL."""
        if self.server is None:
            self.fs.pipe(f"/{self._root}/{key}", data)
        else:
            store, name = open_store(self.url(key), self.server.options)
            store.put(name, [data], len(data))
        return self.url(key)

    def delete(self, key: str) -> None:
        store, name = open_store(self.url(key), self.server and self.server.options)
        store.delete([name])

    def upload(self, path: Path, key: str = "") -> str:
        """Copy a file, or all files of a directory; return the URL."""
        if path.is_file():
            return self.put(key or path.name, path.read_bytes())
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            self.put(f"{key or path.name}/{file.relative_to(path)}", file.read_bytes())
        return self.url(key or path.name)

    def made_by(self, write: Callable[[Any, Path], Any], state: Any, tmp_path: Path) -> str:
        """Have a function write a file, and upload it; return its URL."""
        path = tmp_path / "made.pt"
        write(state, path)
        return self.upload(path, "run/x.pt")


@pytest.fixture(params=["s3", "memory"])
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """Return an empty place for objects, of both kinds in turn."""
    server = request.getfixturevalue("server") if request.param == "s3" else None
    made = Bucket(server)
    yield made
    if server is None:
        made.fs.store.clear()


@pytest.fixture
def memory() -> Iterator[Bucket]:
    """Return an empty place in fsspec's memory."""
    made = Bucket(None)
    yield made
    made.fs.store.clear()


def fetchers() -> list[threading.Thread]:
    """Return the threads that fetch bytes of objects."""
    return [each for each in threading.enumerate() if each.name == "sf-fetch"]
