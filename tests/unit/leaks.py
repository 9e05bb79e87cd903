"""Repeats operations and counts what they leave: mappings, descriptors, threads, memory of malloc,
blocks of the pool, objects of the package, references to saved objects.

    python tests/unit/leaks.py ROUNDS DIRECTORY [KIND ...]

Prints JSON: for each kind of operation, the counts that grew. Prints its progress on stderr every
ten seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import stillframe
import torch
from stillframe.testing import fault

KIB = 1024
# A small integer is shared by the whole process: its references tell nothing.
STATE = {"w": torch.ones(4096), "b": torch.ones(2000), "n": 3.25}


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo


class Round:
    """Runs each kind of operation once; `handles` are all objects handed out that are alive."""

    def __init__(self, engine: stillframe.Engine, directory: Path) -> None:
        self.engine, self.directory = engine, directory
        self.path = directory / "a.pt"
        self.handles: weakref.WeakSet[object] = weakref.WeakSet()

    def _save(self) -> stillframe.SaveHandle:
        handle = stillframe.async_save(STATE, self.path, durable=False, engine=self.engine)
        self.handles.add(handle)
        return handle

    def saves(self) -> None:
        self._save().result()

    def loads(self) -> None:
        if not self.path.exists():
            self.saves()
        stillframe.load(self.path)

    def flat_loads(self) -> None:
        path = self.directory / "a.safetensors"
        if not path.exists():
            stillframe.save({"w": STATE["w"]}, path, engine=self.engine)
        stillframe.load(path)
        stillframe.load(path, into={"w": torch.empty_like(STATE["w"])})

    def damaged_loads(self) -> None:
        bad = self.directory / "bad.pt"
        bad.write_bytes(b"PK\3\4" + bytes(100))
        with contextlib.suppress(stillframe.CorruptCheckpointError):
            stillframe.load(bad)

    def snapshots(self) -> None:
        with stillframe.snapshot(STATE, engine=self.engine) as snap:
            self.handles.add(snap)
            assert int(snap.tree["w"].sum()) == 4096

    def failures(self) -> None:
        for call in ("open", "pwrite", "rename"):
            with fault(call, err=errno.EIO, sticky=True):
                assert self._save().exception() is not None

    def cancels(self) -> None:
        handle = self._save()
        handle.cancel()
        with contextlib.suppress(BaseException):
            handle.result()

    def refusals(self) -> None:
        with contextlib.suppress(stillframe.SaveError):
            stillframe.save(STATE, self.directory / "none" / "a.pt", engine=self.engine)
        with contextlib.suppress(AttributeError, TypeError):
            stillframe.save({"f": lambda: 0}, self.path, engine=self.engine)

    def removes(self) -> None:
        self.saves()
        stillframe.remove(self.path)
        stillframe.wait_all()

    def engines(self) -> None:
        with stillframe.Engine(pool_bytes=256 * KIB, block_bytes=64 * KIB) as own:
            stillframe.save(STATE, self.path, durable=False, engine=own)

    def forks(self) -> None:
        self.saves()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def count(engine: stillframe.Engine, done: Round) -> dict[str, int]:
    stillframe.wait_all()
    gc.collect()
    # A cancelled save ends for its callers before its threads have dropped it.
    end = time.monotonic() + 60
    while done.handles and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    return {
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "malloc": mallinfo().uordblks + mallinfo().hblkhd,
        "leased": int(engine.stats()["leased_bytes"]),
        "committed": int(engine.stats()["committed_bytes"]),
        "handles": len(done.handles),
        "references": sum(sys.getrefcount(value) for value in STATE.values()),
        "objects": len(gc.get_objects()),
        "files": len(os.listdir(done.directory)),
    }


def repeat(one: Round, kind: str, times: int) -> None:
    call: Callable[[], None] = getattr(one, kind)
    printed = time.monotonic()
    for number in range(times):
        call()
        if time.monotonic() > printed + 10:
            printed = time.monotonic()
            print(f"{kind}: {number} of {times}", file=sys.stderr, flush=True)


def main(rounds: int, directory: Path, kinds: list[str]) -> dict[str, dict[str, int]]:
    found = {}
    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=64 * KIB) as engine:
        for kind in kinds or [name for name in vars(Round) if not name.startswith("_")]:
            one = Round(engine, directory)
            repeat(one, kind, 30)  # fills caches and touches pages for the first time
            before = count(engine, one)
            repeat(one, kind, rounds // 5 if kind == "forks" else rounds)
            after = count(engine, one)
            found[kind] = {name: after[name] - before[name] for name in before}
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
