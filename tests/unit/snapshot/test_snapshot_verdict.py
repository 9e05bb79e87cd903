"""The verdict on a snapshot's copy, and which callers get it, over a fake core."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import stillframe
import torch
from fix_snapshots import MIB, engine, state_of, trained
from fix_waits import leased
from stillframe._save import completion
from stillframe._save.engine import is_used
from stillframe._snapshot import copy as copies
from stillframe._snapshot.copy import Copy
from stillframe._snapshot.snapshot import Snapshot, snapshot_for_pickling
from stillframe._watch import gate

__all__ = ["engine"]  # a fixture


class Core:
    number = -7

    def __init__(self) -> None:
        self.ended, self.torn, self.failed = False, -1, None
        self.gates: list[bool] = []
        self.holds = 0
        self.started: BaseException | None = None

    def wait(self, timeout: float | None) -> tuple[bool, int]:
        return self.ended, self.torn

    def gate(self, streams: object) -> bool:
        return self.gates.pop(0)

    def error(self) -> str | None:
        return self.failed

    def start(self, streams: object) -> None:
        if self.started is not None:
            raise self.started

    def hold(self) -> bool:
        self.holds += 1
        return True

    def unhold(self) -> None:
        self.holds -= 1


class Deferral(gate.Deferral):
    """A fake deferral that gives prepared answers in order."""

    def __init__(self, *torn: int) -> None:
        super().__init__()
        self.indices, self.says = [0], list(torn)
        self.distrusted: list[int] = []
        self.nr_released = self.nr_closed = 0

    def torn(self) -> int:
        return self.says.pop(0)

    def distrust(self, index: int) -> None:
        self.distrusted.append(index)

    def release(self) -> None:
        self.nr_released += 1

    def close(self) -> None:
        self.nr_closed += 1
        super().close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return `made(deferral, devices)`, which starts a copy."""
    monkeypatch.setattr(copies._device, "streams", lambda devices: ())
    found: list[Copy] = []

    def make(deferral: Deferral, devices: tuple[int, ...] = ()) -> Any:
        tree: Any = SimpleNamespace(storages=["its memory"], devices=devices)
        core: Any = Core()
        found.append(Copy(core, tree, deferral, shared=False))
        found[-1].start()
        return found[-1]

    yield make
    completion.copying.pop(Core.number, None)
    for each in found:
        gate.untrack(each)


def ended(copy: Any) -> Any:
    copy.core.ended = True
    copy.settle()
    return copy


def test_step_without_a_wait_asks_once_for_the_verdict_before_writing(made):
    deferral = Deferral(-1, 0, 0)
    copy = made(deferral, devices=(0,))
    copy.core.gates = [False, False]
    assert not copy.gate() and not copy.gate()
    assert ended(copy).error is None  # later changes are the step's own
    assert copy.gate_wait_s > 0


def test_write_before_a_step_without_a_wait_is_reported(made):
    deferral = Deferral(0)
    copy = made(deferral, devices=(0,))
    copy.core.gates = [False]
    assert not copy.gate()
    deferral.says = [-1]
    assert isinstance(ended(copy).error, stillframe.TornSnapshotError)
    assert deferral.distrusted == [0]


def test_the_samples_verdict_and_a_devices_failure_come_before_the_versions(made):
    torn, failed = made(Deferral()), made(Deferral())
    torn.core.torn = 0
    assert isinstance(ended(torn).error, stillframe.TornSnapshotError)
    failed.core.failed, failed.core.torn = "the device died", 0
    assert not isinstance(ended(failed).error, stillframe.TornSnapshotError)
    assert "the device died" in str(failed.error)
    assert failed.verdict._deferral.distrusted == []


def test_settled_copy_releases_its_sources_and_delays_no_step(made):
    copy = made(Deferral(-1))
    copy.settle()
    assert not copy.is_settled() and copy.sources and id(copy) in gate._pendings
    ended(copy)
    copy.settle()
    assert copy.verdict._deferral.nr_released == 1
    assert copy.sources == [] and id(copy) not in gate._pendings


def test_verdict_callback_is_called_once_before_or_after_it(made, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(completion.callbacks, "put", calls.append)
    copy = made(Deferral(-1))
    copy.call_when_settled("before")
    assert calls == []
    ended(copy)
    copy.call_when_settled("after")
    assert calls == ["before", "after"]


def test_interrupted_copy_keeps_its_sources_until_it_ends(made, monkeypatch):
    monkeypatch.setattr(Core, "start", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made(Deferral(), devices=(0,))
    assert Core.number in completion.copying
    monkeypatch.setattr(Core, "wait", lambda *given: (True, -1))
    with pytest.raises(KeyboardInterrupt):
        made(Deferral(), devices=(0,))
    assert Core.number not in completion.copying


def test_a_copy_made_in_the_call_is_over_with_it(made):
    deferral = Deferral(-1)
    deferral.indices = []
    core: Any = Core()
    core.ended = True
    tree: Any = SimpleNamespace(storages=[1], devices=())
    copy = Copy(core, tree, deferral, shared=False)
    copy.start()
    assert copy.is_settled() and deferral.nr_closed == 1
    assert Core.number not in completion.copying


def test_signal_handler_during_the_verdict_gives_no_second_one(made, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(completion.callbacks, "put", calls.append)
    deferral = Deferral(0, 0)
    copy = made(deferral)
    copy.call_when_settled("once")
    says, handled = deferral.torn, []

    def torn() -> int:
        if not handled:
            handled.append(True)
            copy.settle()
        return says()

    monkeypatch.setattr(deferral, "torn", torn, raising=False)
    ended(copy)
    assert isinstance(copy.error, stillframe.TornSnapshotError)
    assert (deferral.nr_released, deferral.distrusted, calls) == (1, [0], ["once"])


def test_torn_copy_known_only_to_its_tensors_is_logged(made, caplog):
    copy = made(Deferral(0))
    copy.weak_snapshot = lambda: None
    ended(copy)
    assert "a snapshot that is in use is damaged" in caplog.text


# ---- the snapshot over it ----


def snapshot_over(**copy: Any) -> Any:
    """Return a snapshot over a fake copy with these attributes."""
    made: Any = SimpleNamespace(
        core=Core(), error=None, error_seen=False, settle=lambda: None, **{**copy, "is_fake": True}
    )
    return Snapshot(made, {"a": 1}, [], False)


def test_uncollected_snapshot_error_is_logged_once(caplog):
    error = stillframe.StillframeError("torn")
    for seen, foreign in ((True, False), (False, True)):
        snapshot = snapshot_over()
        snapshot._copy.error, snapshot._copy.error_seen = error, seen
        if foreign:
            snapshot._birth = SimpleNamespace(in_forked_child=lambda: True)
        del snapshot
    assert caplog.text == ""
    snapshot = snapshot_over()
    snapshot._copy.error = error
    del snapshot
    assert "nobody asked: torn" in caplog.text
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


def test_torn_tensor_is_named_among_wrapper_tensors():
    torn = torch.ones(3)
    sparse, meta = torch.eye(2).to_sparse(), torch.ones(1, device="meta")
    tree = {"sparse": sparse, "meta": meta, "mkldnn": torch.ones(4).to_mkldnn(), "torn": torn}
    snapshot: Any = Snapshot(
        snapshot_over()._copy, tree, [torn.untyped_storage().data_ptr()], False
    )
    assert snapshot._names(0) == ["torn"]


def test_failed_snapshot_raises_and_its_error_counts_as_collected():
    snapshot = snapshot_over()
    copy = snapshot._copy
    copy.core.ended = True

    def settle() -> None:  # a waiting thread may ask first
        copy.error = stillframe.StillframeError("torn")

    copy.settle = settle
    with pytest.raises(stillframe.StillframeError, match="torn"):
        snapshot.wait()
    assert snapshot._copy.error_seen and snapshot._tree is None


def test_future_that_calls_back_twice_ends_only_its_hold():
    class Twice:
        def add_done_callback(self, function: Callable[[object], object]) -> None:
            function(self)
            function(self)

    snapshot = snapshot_over()
    snapshot._copy.core.holds = 1  # the hold of another caller
    snapshot.hold_until(Twice())
    assert snapshot._copy.core.holds == 1
    with pytest.raises(TypeError):
        snapshot.hold_until(7)
    assert snapshot._copy.core.holds == 1


def test_hold_until_after_release_works_only_for_private_copies(monkeypatch):
    snapshot = snapshot_over()
    snapshot._copy.core.hold = lambda: False
    for method in ("spawn", "forkserver"):
        snapshot.hold_until(multiprocessing.get_context(method).Process(target=print))
    with pytest.raises(stillframe.StillframeError, match="gone back"):
        snapshot.hold_until(multiprocessing.get_context("fork").Process(target=print))
    # A method that was not given runs as in the program.
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    snapshot.hold_until(multiprocessing.Process(target=print))
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "fork")
    with pytest.raises(stillframe.StillframeError, match="gone back"):
        snapshot.hold_until(multiprocessing.Process(target=print))


def test_a_forked_child_reads_what_is_shared_and_nothing_else():
    private, shared = snapshot_over(), snapshot_over()
    shared._shared = True
    for each in (private, shared):
        each._birth = SimpleNamespace(in_forked_child=lambda: True)
    assert shared.tree == {"a": 1}
    with pytest.raises(stillframe.ForkError, match="shared=True"):
        _ = private.tree


# ---- the call ----


def test_refused_snapshot_delays_no_step_of_another_thread():
    model, optimizer = trained()
    with stillframe.Engine(pool_bytes=MIB, block_bytes=MIB) as small:
        # The exception keeps the call's frames, and the frames keep the call's objects.
        with pytest.raises(stillframe.PoolExhaustedError) as refused:
            stillframe.snapshot(
                {**state_of(model, optimizer), "big": torch.ones(MIB)}, overlap=True, engine=small
            )
        assert refused.tb is not None
        assert not gate.unlaunched_calls and not is_used(small)


def test_a_snapshot_is_a_use_of_its_engine_and_keeps_no_source(engine):
    source = torch.ones(1000)
    gone = weakref.ref(source)
    assert not is_used(engine)
    snapshot = stillframe.snapshot({"x": source}, engine=engine)
    del source
    gc.collect()
    assert is_used(engine) and gone() is None
    assert torch.equal(snapshot.tree["x"], torch.ones(1000))


def test_a_copy_that_was_torn_before_the_call_returned_is_not_handed_out(engine, monkeypatch):
    start = Copy.start

    def torn(copy: Copy) -> None:
        start(copy)
        copy._ends.insert(0, stillframe.TornSnapshotError("too late", []))

    monkeypatch.setattr(Copy, "start", torn)
    with pytest.raises(stillframe.TornSnapshotError, match="too late") as refused:
        stillframe.snapshot({"x": torch.ones(1000)}, engine=engine)
    assert refused.tb is not None and leased(engine) == 0  # although the call's frames are kept


class Part:
    """A user's object, which is left whole."""

    def __init__(self, shared: list[int]) -> None:
        self.shared = shared


def test_objects_shared_by_copied_objects_stay_shared(engine):
    shared = [1]
    taken = snapshot_for_pickling([Part(shared), Part(shared)], overlap=False, engine=engine)
    shared.append(2)
    one, other = taken.tree
    assert one.shared is other.shared and one.shared == [1]


def test_object_that_cannot_be_copied_is_in_the_snapshot_itself(engine):
    """A lock, for example. It cannot be pickled either, and the error of that attempt names it."""
    lock, part = threading.Lock(), Part([1])
    taken = snapshot_for_pickling([lock, part], overlap=False, engine=engine)
    assert taken.tree[0] is lock and taken.tree[1] is not part


def test_module_is_warned_of_only_if_it_is_not_copied(engine, caplog):
    tree = {"module": torch.nn.Linear(2, 2)}
    taken = snapshot_for_pickling(tree, overlap=False, engine=engine)
    assert taken.tree["module"] is not tree["module"]
    assert caplog.text == ""
    assert stillframe.snapshot(tree, engine=engine).tree["module"] is tree["module"]
    assert "a Linear is left as it is" in caplog.text
