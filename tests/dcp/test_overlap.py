"""The work of a `stillframe.dcp` save that runs during the copy, and the work that must wait."""

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
import torch.distributed.checkpoint as stock
from fix_dcp import Trained, copied, equal, loaded
from fix_waits import eventually, leased
from stillframe import dcp
from stillframe._dcp.joint import JointSave
from stillframe._dcp.ranks import Ranks
from stillframe._save import completion
from stillframe.testing import held, slow
from torch.distributed.checkpoint.api import CheckpointException


@pytest.fixture
def engine():
    with stillframe.Engine(pool_bytes=8 << 20, block_bytes=1 << 20) as engine:
        yield engine


def begin(state: Any, path: Path, **options: Any) -> Any:
    return dcp.async_save(state, path, no_dist=True, **options)


class Steps:
    """Records the steps that saves have reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[str] = []
        for owner, name in ((JointSave, "prepare"), (Ranks, "exchange"), (JointSave, "_write")):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, call: Any) -> Any:
        def noted(*given: Any) -> Any:
            found = call(*given)
            self.taken.append(name)
            return found

        return noted


@pytest.fixture
def copying(monkeypatch):
    """Return a list for the test's `held("lane_copy")`.

    A save is planned only when the lane is stopped inside the only chunk, because a thread that
    waits for the copy copies chunks that the lane has not begun.
    """
    prepare = JointSave.prepare
    copying: list[Any] = []

    def prepare_behind_the_lane(*given: Any) -> Any:
        assert eventually(lambda: copying[-1].hits > 0)
        return prepare(*given)

    monkeypatch.setattr(JointSave, "prepare", prepare_behind_the_lane)
    return copying


def test_ranks_plan_during_the_copy_and_write_after_it(tmp_path, engine, copying, monkeypatch):
    trained, steps = Trained(), Steps(monkeypatch)
    mine = {"a structure": "that no other test saves"}
    for planned in (["prepare", "exchange", "exchange", "exchange"], ["prepare", "exchange"]):
        steps.taken.clear()
        wanted = copied(trained.state())
        with held("lane_copy") as holding:
            copying.append(holding)
            response = begin({**trained.state(), **mine}, tmp_path / "c", engine=engine)
            assert eventually(lambda: steps.taken == planned)  # noqa: B023
            before = {each: each.stat().st_ino for each in (tmp_path / "c").glob("*")}
            assert not eventually(lambda: steps.taken != planned, 0.05)  # noqa: B023
            assert not response.staging_completion.done()
            assert {each: each.stat().st_ino for each in (tmp_path / "c").glob("*")} == before
        trained.step()
        response.upload_completion.result()
        assert response.staging_completion.done()
        assert equal(loaded(wanted, tmp_path / "c"), wanted)


@pytest.mark.parametrize("kind", ["view", "queue", "planner"])
def test_layout_that_reads_bytes_waits_for_the_copy(tmp_path, kind, copying):
    """The second save has a kept plan, so it is laid out at once."""

    class CopyingPlanner(stock.DefaultSavePlanner):
        def transform_object(self, item: Any, value: Any) -> Any:
            new = value.clone() if isinstance(value, torch.Tensor) else value
            return super().transform_object(item, new)

    trained = Trained()
    weight = trained.model[0].weight
    for number in range(2):
        state = {
            "view": {"w": weight.detach()[1:5, ::2]},
            "queue": {"w": deque([weight.detach()])},
            "planner": {"w": weight.detach()},
        }[kind]
        wanted = weight.detach().clone()
        planner = CopyingPlanner() if kind == "planner" else None
        with held("lane_copy") as holding:
            copying.append(holding)
            response = begin({**state, **trained.state()}, tmp_path / "c", planner=planner)
            assert not eventually(response.staging_completion.done, 0.05)
        trained.step()
        response.upload_completion.result()
        found = {"w": torch.zeros_like(state["w"]) if kind != "queue" else None}
        stock.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
        (got,) = found["w"] if kind == "queue" else [found["w"]]
        assert torch.equal(got, wanted[1:5, ::2] if kind == "view" else wanted), number


def test_change_during_the_copy_fails_the_whole_save(tmp_path, engine):
    trained = Trained()
    begin(trained.state(), tmp_path / "c", engine=engine).upload_completion.result()
    wanted = copied(trained.state())
    with slow("lane_copy", 0.02):
        response = begin(trained.state(), tmp_path / "c", engine=engine)
        with torch.no_grad():
            trained.model[0].weight.add_(1.0)
        with pytest.raises(CheckpointException, match="changed outside"):
            response.upload_completion.result()
    with pytest.raises(stillframe.TornSnapshotError):
        response.staging_completion.result(60)
    assert equal(loaded(wanted, tmp_path / "c"), wanted)
    assert eventually(lambda: leased(engine) == 0)
    begin(trained.state(), tmp_path / "c", engine=engine).upload_completion.result()
    assert equal(loaded(wanted, tmp_path / "c"), copied(trained.state()))


def test_stage_waits_for_the_memory_of_a_save_under_way(tmp_path, engine):
    size = engine.stats()["pool_bytes"] // 2 + 1
    state, found = {"w": torch.ones(size, dtype=torch.uint8)}, []
    with held("pwrite"):
        response = begin(state, tmp_path / "c", engine=engine)
        thread = threading.Thread(
            target=lambda: found.append(stillframe.snapshot(state, engine=engine))
        )
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join()
    response.upload_completion.result()
    assert found and (found[0].tree["w"] == 1).all()


def test_callbacks_of_a_save_may_save_and_wait(tmp_path, engine):
    """A callback may block its thread, and the save still continues."""
    trained, ended, go = Trained(), [], threading.Event()

    def then(name: str) -> None:
        begin({"w": torch.ones(3)}, tmp_path / name).upload_completion.result(60)
        ended.append(name)

    completion.callbacks.put(lambda: go.wait(60))
    with held("lane_copy"):
        response = begin(trained.state(), tmp_path / "c", engine=engine)
        response.staging_completion.add_done_callback(lambda _: then("staged"))
        response.upload_completion.add_done_callback(lambda _: then("uploaded"))
    response.upload_completion.result(60)
    assert response.staging_completion.done() and ended == []
    go.set()
    assert eventually(lambda: ended == ["staged", "uploaded"])
