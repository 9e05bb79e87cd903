"""The arguments of `stillframe.dcp.save` and `async_save`, valid and invalid."""

import gc
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import stillframe
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from fix_dcp import Trained, copied, equal, loaded
from fix_entries import Recorded
from fix_waits import eventually
from stillframe import dcp
from stillframe._dcp.staged import Staged
from stillframe.testing import held, slow


def async_save(*given: Any, **options: Any) -> Any:
    response = dcp.async_save(*given, no_dist=True, **options)
    response.upload_completion.result()
    return response.report


def save(*given: Any, **options: Any) -> Any:
    return dcp.save(*given, no_dist=True, **options)


both = pytest.mark.parametrize("call", [async_save, save])
Call = Callable[..., Any]


class Halved(stock.DefaultSavePlanner):
    def transform_object(self, item: Any, value: Any) -> Any:
        return super().transform_object(item, value / 2)


@both
def test_dcp_save_with_durable_false_skips_syncs(call, tmp_path, monkeypatch):
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        call({"w": torch.ones(5)}, tmp_path / "a", durable=False)
    assert recorded.synced() == []
    with recorded(monkeypatch):
        call({"w": torch.ones(5)}, tmp_path / "b")
    assert recorded.synced() != []


@both
def test_users_planner_is_used(call, tmp_path):
    call({"w": torch.ones(5)}, tmp_path, planner=Halved())
    assert loaded({"w": torch.ones(5)}, tmp_path)["w"].tolist() == [0.5] * 5


@both
def test_users_engine_copies_and_writes(call, tmp_path):
    with stillframe.Engine(pool_bytes="8MiB", block_bytes="1MiB") as engine:
        call({"w": torch.ones(5)}, tmp_path, engine=engine)
        assert engine.stats()["saves_total"] == 1
        assert engine.stats()["committed_bytes"] > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_only_deferrable_tensors_are_copied_after_the_call(overlap, tmp_path):
    trained = Trained()
    report = async_save(trained.state(), tmp_path, overlap=overlap)
    assert (report.deferred_nbytes > 0) == overlap
    assert save(trained.state(), tmp_path).deferred_nbytes == 0


@pytest.mark.parametrize(
    ("state", "options", "error", "says"),
    [
        ([1], {}, TypeError, "state_dict has to be a dict, not list"),
        ({"a": 1}, {"when_busy": "skip"}, ValueError, "'wait' or 'raise', not 'skip'"),
        ({"a": 1}, {"engine": "e"}, TypeError, r"stillframe\.Engine"),
    ],
)
def test_invalid_argument_is_refused_and_fails_no_later_save(state, options, error, says, tmp_path):
    with pytest.raises(error, match=says):
        async_save(state, tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()
    save({"a": 1}, tmp_path / "c")


def test_group_without_a_cpu_backend_is_refused(tmp_path, one_rank, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    with pytest.raises(ValueError, match="none of them for the CPU"):
        dcp.async_save({"a": 1}, tmp_path / "c", process_group=dist.group.WORLD)
    assert not (tmp_path / "c").exists()


def test_report_has_sizes_and_times_of_a_save(tmp_path):
    trained = Trained()
    with (
        stillframe.Engine(pool_bytes="32MiB", block_bytes="1MiB") as engine,
        slow("lane_copy", 0.002),
    ):
        calls = [
            dcp.async_save(trained.state(), tmp_path / "c", no_dist=True, engine=engine)
            for _ in range(2)
        ]
        for call in calls:
            call.upload_completion.result()
    reports = [call.report for call in calls]
    for report in reports:
        assert report.path == str(tmp_path / "c")
        assert report.num_tensors == 8 + 3 * 8
        assert 0 < report.captured_nbytes < report.deferred_nbytes < report.nbytes
        assert report.peak_pool_bytes > report.captured_nbytes + report.deferred_nbytes
        assert 0 < report.backpressure_s < report.blocked_s
        assert report.blocked_s < report.staged_after_s < report.durable_after_s


def test_traceback_of_a_refused_call_has_no_frames_of_another_thread(tmp_path):
    with stillframe.Engine(pool_bytes=4096, block_bytes=4096) as engine:
        with pytest.raises(stillframe.StillframeError) as caught:
            dcp.async_save({"a": torch.zeros(9999)}, tmp_path / "c", no_dist=True, engine=engine)
        stillframe.wait_all(60)  # the thread that was to write the checkpoint has the error too
    frames = traceback.walk_tb(caught.value.__traceback__)
    modules = {frame.f_globals["__name__"] for frame, _ in frames}
    assert "stillframe._dcp.api" in modules and "stillframe._dcp.rounds" not in modules


def test_empty_state_is_saved(tmp_path):
    report = save({}, tmp_path)
    assert (report.num_tensors, report.nbytes, report.io_mode) == (0, 0, "buffered")
    loaded({}, tmp_path)


def test_remote_save_is_staged_before_it_is_written(monkeypatch):
    """A waiting thread copies what the lane has not begun, so the test waits while the lane is
    stopped."""
    wait = Staged.wait_until_copied

    def wait_behind_the_lane(staged: Staged) -> None:
        assert eventually(lambda: copying[-1].hits > 0)
        wait(staged)

    copying: list[Any] = []
    monkeypatch.setattr(Staged, "wait_until_copied", wait_behind_the_lane)
    trained = Trained()
    for number in range(2):
        wanted = copied(trained.state())
        with held("lane_copy") as holding:
            copying.append(holding)
            call = dcp.async_save(trained.state(), f"memory://calls/{number}", no_dist=True)
            assert not eventually(call.upload_completion.done, 0.1)
        trained.step()
        call.upload_completion.result()
        assert call.report.io_mode == "fsspec" and call.report.nbytes > 0
        found = loaded(wanted, f"memory://calls/{number}")
        assert equal(found, wanted)


def test_remote_save_uses_the_users_planner():
    save({"w": torch.ones(5)}, "memory://calls/planned", planner=Halved())
    found = loaded({"w": torch.ones(5)}, "memory://calls/planned")
    assert found["w"].tolist() == [0.5] * 5


class Counting:
    """A `Stateful` of DCP."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.tensor(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])


@both
def test_stateful_values_are_asked_for_their_state_dict(call, tmp_path):
    call({"counting": Counting(3.0)}, tmp_path)
    found = Counting(0.0)
    stock.load({"counting": found}, checkpoint_id=tmp_path, no_dist=True)
    assert found.value == 3.0


def test_forked_child_saves_with_its_own_saver(tmp_path):
    """It works even if garbage of the parent would wait for the parent's threads."""
    save({"w": torch.ones(3)}, tmp_path / "parent")
    garbage: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
    garbage.append(garbage)
    del garbage
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(60)
        try:
            gc.collect()
            save({"w": torch.ones(3)}, tmp_path / "child")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert loaded({"w": torch.zeros(3)}, tmp_path / "child")["w"].tolist() == [1.0] * 3
