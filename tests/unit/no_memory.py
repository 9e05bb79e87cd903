"""Makes each memory allocation in calls of the binding fail in turn.

    python tests/unit/no_memory.py {once,from-then-on} DIRECTORY [CALL ...]

Prints JSON: for each call, how often it failed and what was wrong. A call must raise MemoryError or
do its work, and its object must work afterwards.
"""

from __future__ import annotations

import _testcapi
import array
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stillframe import _core
from stillframe._tree import flat, skeleton
from stillframe._tree.skeleton import SOURCE
from stillframe._watch.memory_owners import Marks

# (first, last): in the present try, the allocations after number `first` up to number `last` fail.
# With 0 as `last`, all after `first` fail.
failing = (0, 0)
MOST = 5000  # the most allocations of a call
QUIET = 15  # after so many calls without a failure, a call makes no more allocations
CALLS: dict[str, Callable[[Path], tuple[Callable[[], Any], Callable[[Any], Any]]]] = {}
GROUPS = [{"params": [torch.nn.Parameter(torch.zeros(4096)) for _ in range(3)]}]
PARAMS = GROUPS[0]["params"]
for each in PARAMS:
    each.grad = torch.ones_like(each)  # without a gradient and without state it counts as untrained
OWNED: dict[Any, Any] = {}
KEPT = torch.ones(5000)


def call(make: Any) -> Any:
    CALLS[make.__name__] = make
    return make


def sources(tensors: list[Any]) -> tuple[_core.Numbers, bytearray]:
    storages = [each.untyped_storage() for each in tensors]
    rows = bytearray()
    for each in storages:
        rows += SOURCE.pack(each.data_ptr(), each.nbytes(), 0, 0)
    return _core.Numbers([each._cdata for each in storages]), rows


# ---- what an optimizer owns -------------------------------------------------------------------


def enrolled() -> _core.Observer:
    observer = _core.Observer(OWNED, 7)
    assert observer.enrol(GROUPS, {}) == []
    assert observer.counts() == (3, 0, 0)
    return observer


def compared() -> _core.Observer:
    observer = enrolled()
    observer.compare()
    return observer


def recorded() -> _core.Observer:
    observer = compared()
    assert observer.stepped(GROUPS, {}) is False
    return observer


def known() -> tuple[_core.Observer, Marks]:
    observer = recorded()
    observer.compare()
    assert observer.counts() == (0, 3, 0)
    return observer, Marks(*sources(PARAMS), [], [], [], [])


def is_marked_wholly(marks: Marks) -> None:
    late = [number for number in range(len(marks.numbers)) if marks.is_deferred(number)]
    assert sorted(marks.indices) == sorted(marks.storage_numbers) == late
    assert len(marks.tensors) == len(marks.versions) == len(late)


@call
def enrol(_: Path) -> Any:
    def tried(observer: _core.Observer) -> None:
        try:
            observer.enrol(GROUPS, {})
        except MemoryError:
            assert observer.counts() == (0, 0, 0)
            raise

    return lambda: _core.Observer(OWNED, 7), tried


@call
def stepped(_: Path) -> Any:
    return compared, lambda observer: observer.stepped(GROUPS, {})


@call
def compare(_: Path) -> Any:
    return recorded, lambda observer: observer.compare()


@call
def defer(_: Path) -> Any:
    def tried(made: tuple[_core.Observer, Marks]) -> None:
        observer, marks = made
        try:
            observer.defer(GROUPS, {}, marks)
        finally:
            _testcapi.remove_mem_hooks()
            is_marked_wholly(marks)

    return known, tried


@call
def defer_memory_owner(_: Path) -> Any:
    kept = [torch.zeros(20_000) for _ in range(3)]

    def tried(marks: Marks) -> None:
        try:
            _core.Observer.defer_memory_owner(kept, marks)
        finally:
            _testcapi.remove_mem_hooks()
            is_marked_wholly(marks)

    return lambda: Marks(*sources(kept), [], [], [], []), tried


# ---- trees ------------------------------------------------------------------------------------

TREE = {"a": [torch.ones(2), (torch.ones(3), {"b": torch.zeros(1)})], "n": [1, "x", None, 2.0]}


@call
def walk(_: Path) -> Any:
    return skeleton.tree_collector, lambda collector: collector.walk([TREE, object()], set())


@call
def rebuilt(_: Path) -> Any:
    return lambda: None, lambda _: _core.rebuilt(TREE, {}, lambda node: node)


def copied(take: Callable[[list[Any]], Any], ahead: bool) -> Any:
    """Copy with `take` instead of torch's function that consumes the handles.

    That function may wait forever without memory. With `ahead`, an earlier step fails.
    """
    types = skeleton._make_torch_types(dtypes=skeleton._plain_byte_dtypes(), from_handles=take)
    memory = bytearray(4096)
    tensors = [torch.ones(4), torch.nn.Parameter(torch.ones(3)), torch.ones(2).view(torch.int32)]
    tensors += [tensors[0][1:], tensors[2].view(torch.float32)]
    before = sys.getrefcount(memory)

    def containers() -> Any:
        gc.collect()
        assert sys.getrefcount(memory) == before, "a failure keeps the memory"
        collector = _core.Collector(types, True, True, True, True)
        assert collector.collect(tensors) == []
        return collector, [64 * i for i in range(len(collector.finish()[0]))]

    def tried(made: Any) -> None:
        collector, offsets = made
        if not ahead:
            _testcapi.remove_mem_hooks()
        news, firsts, left = collector.copies(memory, offsets, True)
        assert (len(news), len(firsts), len(left)) == (4, 3, 1)
        assert firsts[0] is news[id(tensors[0])]

    return containers, tried


@call
def copies_made(_: Path) -> Any:
    def take(handles: list[Any]) -> Any:
        _testcapi.remove_mem_hooks()
        return skeleton._from_handles(handles)

    return copied(take, ahead=True)


@call
def copies_entered(_: Path) -> Any:
    def take(handles: list[Any]) -> Any:
        _testcapi.remove_mem_hooks()
        made = skeleton._from_handles(handles)
        _testcapi.set_nomemory(*failing)
        return made

    return copied(take, ahead=False)


# ---- files ------------------------------------------------------------------------------------


@call
def resolve(directory: Path) -> Any:
    path = os.fsencode(directory / "new.pt")
    return lambda: None, lambda _: _core.resolve(path, True)


@call
def take_steps(directory: Path) -> Any:
    path = os.fsencode(directory / "nothing")

    def tried(_: None) -> None:
        assert _core.take_steps([(_core.STEP_UNLINK, path, b"")] * 300) == (300, 0)

    return lambda: None, tried


@call
def names(directory: Path) -> Any:
    path = os.fsencode(directory)
    return lambda: None, lambda _: _core.names(path)


@call
def read(directory: Path) -> Any:
    path = directory / "some"
    path.write_bytes(b"x" * 1000)
    descriptor = os.open(path, os.O_RDONLY)

    def tried(_: None) -> None:
        file = _core.File(descriptor, 1000)
        assert file.seek(1, 1) + file.tell() == 2
        assert len(file.read()) == 999

    return lambda: None, tried


@call
def check(directory: Path) -> Any:
    path = directory / "damaged.pt"
    torch.save({"a": torch.ones(5000), "b": torch.zeros(5000)}, path)
    whole = bytearray(path.read_bytes())
    offset = whole.find(torch.ones(5000).numpy().tobytes())
    whole[offset] ^= 1
    path.write_bytes(whole)
    descriptor = os.open(path, os.O_RDONLY)

    def tried(_: None) -> None:
        found = _core.check(descriptor, True, lambda done, of: None)
        assert (found["ok"], found["num_bad"], len(found["bad_records"])) == (False, 1, 1)

    return lambda: None, tried


@call
def restore(directory: Path) -> Any:
    path = directory / "whole.pt"
    torch.save({"a": torch.ones(5000), "b": torch.zeros(5000)}, path)
    descriptor = os.open(path, os.O_RDONLY)

    def tried(_: None) -> None:
        found, made = _core.restore(descriptor, True)
        assert found["ok"] and made.find("data.pkl") >= -1 and made.done() >= 0
        assert len(made.sizes(0, 1 << 30)) == made.nr
        made.close()

    return lambda: None, tried


@call
def restore_bare(directory: Path) -> Any:
    path = directory / "stretches"
    path.write_bytes(bytes(100))
    descriptor = os.open(path, os.O_RDONLY)
    numbers = array.array("Q", (8, 20, 40, 60))

    def tried(_: None) -> None:
        made = _core.restore_bare(descriptor, numbers, 100)
        assert made.find("data.pkl") == -1 and made.sizes(0, 1 << 30) == [20, 60]
        made.close()

    return lambda: None, tried


# ---- what the core has to tell ----------------------------------------------------------------


@call
def notice(_: Path) -> Any:
    """Check that a notice that one call could not return for lack of memory reaches the next
    call."""

    def tried(_: None) -> None:
        # Python reuses the memory of up to 2,000 tuples like the one that the call makes.
        held = [(i, i, i) for i in range(2100)]  # noqa: F841
        _core.notice_stop()
        try:
            notice = _core.notice_wait()
        except MemoryError:
            _testcapi.remove_mem_hooks()
            signal.alarm(60)  # ends this process if the next call waits forever
            assert _core.notice_wait() == (_core.NOTICE_STOP, 0, "")
            signal.alarm(0)
            raise
        assert notice == (_core.NOTICE_STOP, 0, "")

    return lambda: None, tried


# ---- saves and snapshots ----------------------------------------------------------------------


def engine() -> _core.Engine:
    return _core.Engine(1 << 20, 1 << 16, 1, 2)


@call
def save(directory: Path) -> Any:
    made = engine()
    rows = sources([KEPT])[1]
    where = os.fsencode(directory)

    def tried(_: None) -> None:
        ticket = _core.Ticket(made, where, b"a.pt", b"x" * 100, rows, 0)
        assert ticket.state() and ticket.progress()[0] == 0
        ticket.submit()
        assert ticket.wait(_core.WAIT_ENDED)
        assert ticket.report()["state"] == "durable" and made.stats()["pool_bytes"] > 0

    return lambda: None, tried


@call
def flat_save(directory: Path) -> Any:
    made = engine()
    rows = sources([KEPT])[1]
    where = os.fsencode(directory)
    members = flat._MEMBER.pack(4, 400, 0, 0) + flat._MEMBER.pack(800, 4, 0, 0)

    def tried(_: None) -> None:
        ticket = _core.Ticket(made, where, b"a.flat", b"x" * 100, rows, 0, 0, members)
        ticket.submit()
        assert ticket.wait(_core.WAIT_ENDED)
        assert ticket.report()["nbytes"] == 504

    return lambda: None, tried


@call
def parts(directory: Path) -> Any:
    made = engine()
    where = os.fsencode(directory)
    items = [b"xyz", ("FloatStorage", 2, (2,), (1,), 1 << 20, 8)]

    def tried(_: None) -> None:
        file = _core.Parts()
        assert [offset for offset, _ in file.append(items)] == [0, 3]
        assert file.nbytes > 3
        _core.Ticket.of_parts(made, where, b"p.pt", file, 0)

    return lambda: None, tried


@call
def snapshot(_: Path) -> Any:
    made = engine()
    rows = sources([KEPT, PARAMS[0]])[1]

    def tried(_: None) -> None:
        snap = _core.Snapshot(made, rows, 0)
        memory = snap.lease()
        snap.start(())
        assert snap.wait() == (True, -1)
        first, second = snap.offsets()
        assert first != second and snap.error() == ""
        assert memoryview(memory)[first : first + 4] == b"\0\0\x80\x3f"
        assert snap.number > 0 and snap.copying_s == 0.0

    def nothing_leased() -> None:
        gc.collect()
        assert made.stats()["leased_bytes"] == 0, "a failure keeps a lease"

    return nothing_leased, tried


# ---- all of them ------------------------------------------------------------------------------


def fail_in_turn(name: str, directory: Path, once: bool) -> tuple[int, list[str]]:
    """Repeat a call; each time another one of its allocations is the first to fail.

    Args:
        once: Only that allocation fails; otherwise all later ones fail too.

    Returns:
        The number of calls that raised, and the errors that were not MemoryError.
    """
    global failing
    make, tried = CALLS[name](directory)
    tried(make())  # the first call has memory and fills caches
    _testcapi.remove_mem_hooks()
    failed = quiet = 0
    ended = False
    wrong: list[str] = []
    for n in range(MOST):
        made, raised = make(), ""
        failing = n, n + 1 if once else 0
        _testcapi.set_nomemory(*failing)
        try:
            tried(made)
        except MemoryError:
            _testcapi.remove_mem_hooks()
            raised = "MemoryError"
        except BaseException as error:
            _testcapi.remove_mem_hooks()
            raised = f"{n}: {error!r}"
        _testcapi.remove_mem_hooks()
        if raised:
            failed += 1
            quiet = 0
        else:
            quiet += 1
        if raised not in ("", "MemoryError"):
            wrong.append(raised)
        if quiet > (QUIET if once else 0):
            ended = True
            break
    if not ended:
        wrong.append("it asks again and again")
    make()  # nothing that a failure left is in its way
    return failed, wrong


def main(mode: str, directory: Path, *wanted: str) -> None:
    gc.freeze()  # imported objects stay, and are not scanned again
    found = {name: fail_in_turn(name, directory, mode == "once") for name in wanted or CALLS}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
