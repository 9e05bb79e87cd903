"""PinnedStager under DCP's own async_save: staged trees, returned memory and failures."""

import gc
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
import torch.distributed.checkpoint as dcp
from fix_dcp import Trained, copied, equal, loaded
from fix_waits import eventually, leased
from stillframe._dcp.ranks import Groups
from stillframe.dcp import PinnedStager, async_save
from stillframe.testing import slow
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse


class Held(dcp.FileSystemWriter):
    """A writer that waits before it writes, and raises the given error."""

    def __init__(self, path: Path, error: Exception | None = None) -> None:
        super().__init__(path)
        self.began, self.go = threading.Event(), threading.Event()
        self.error = error

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.began.set()
        self.go.wait(60)
        if self.error is not None:
            raise self.error
        return super().write_data(plan, planner)


def save(state: Any, stager: PinnedStager, **arguments: Any) -> AsyncSaveResponse:
    response = dcp.async_save(state, async_stager=stager, no_dist=True, **arguments)
    assert isinstance(response, AsyncSaveResponse)
    return response


def filling(engine: stillframe.Engine) -> dict[str, torch.Tensor]:
    """Return a state that fits once into the pool."""
    return {"w": torch.ones(engine.stats()["pool_bytes"] // 2 + 1, dtype=torch.uint8)}


@pytest.fixture
def engine():
    with stillframe.Engine(pool_bytes=8 << 20, block_bytes=1 << 20) as engine:
        yield engine


def test_a_state_is_saved_as_it_was_at_the_call_while_training_goes_on(tmp_path, engine):
    trained, stager = Trained(), PinnedStager(engine)
    for number in range(2):
        state = {**trained.state(), "list": [number], "object": Counter(number)}
        wanted = copied(state)
        with slow("lane_copy", 0.005):
            response = save(state, stager, checkpoint_id=tmp_path / str(number))
            assert not response.staging_completion.done()
            state["list"].append(-1)
            state["object"].number = -1
            trained.step()  # waits for the copy by itself
        response.upload_completion.result()
        found = loaded({**state, "list": [0]}, tmp_path / str(number))
        assert equal(found["model"], wanted["model"])
        assert equal(found["optimizer"], wanted["optimizer"])
        assert found["list"] == [number] and found["object"].number == number
    assert eventually(lambda: leased(engine) == 0)


class Counter:
    def __init__(self, number: int) -> None:
        self.number = number


def test_staged_tree_keeps_ties_views_strides_bits_and_attributes(engine, one_rank):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    base.note = ["kept"]
    mesh = init_device_mesh("cpu", (1,))
    state = {
        "base": base,
        "tied": base,
        "view": base[1:3, ::2],
        "t": base.t(),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "d": DTensor.from_local(base.clone(), mesh, [Replicate()]),
        "p": torch.nn.Parameter(torch.ones(3)),
    }
    staged = PinnedStager(engine).stage(state).result()
    assert list(staged) == list(state)
    assert staged["base"] is staged["tied"] and staged["base"].note == ["kept"]
    assert staged["base"].note is not base.note or base.note == ["kept"]
    storages = {staged[name].untyped_storage()._cdata for name in ("base", "view", "t")}
    assert len(storages) == 1
    for name, tensor in state.items():
        new = staged[name]
        assert type(new) is type(tensor) and new.stride() == tensor.stride(), name
        assert (new.is_conj(), new.is_neg()) == (tensor.is_conj(), tensor.is_neg()), name
        new, tensor = (getattr(each, "_local_tensor", each) for each in (new, tensor))
        assert torch.equal(new, tensor) and new.data_ptr() != tensor.data_ptr(), name
    assert staged["d"].placements == state["d"].placements


def test_memory_is_not_reused_before_the_upload_that_reads_it_has_ended(
    tmp_path, engine, monkeypatch
):
    """The pool has room for one state, so the second stage waits for the first upload."""
    stager, state = PinnedStager(engine), filling(engine)
    writers = [Held(tmp_path / str(number)) for number in range(2)]
    first = save(state, stager, storage_writer=writers[0])
    assert writers[0].began.wait(60)
    monkeypatch.setattr("stillframe._dcp.staged._GRACE_S", 0.0)  # whatever time the upload takes
    state["w"].fill_(2)
    later: Future[Any] = Future()
    thread = threading.Thread(
        target=lambda: later.set_result(save(state, stager, storage_writer=writers[1]))
    )
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()  # it waits for memory
    for writer in writers:
        writer.go.set()
    first.upload_completion.result()
    thread.join()
    later.result().upload_completion.result()
    for number in range(2):
        assert (loaded(state, tmp_path / str(number))["w"] == number + 1).all()


@pytest.mark.parametrize("error", [None, RuntimeError("no space")])
def test_memory_returns_when_the_upload_ends_even_if_the_tree_is_held(tmp_path, engine, error):
    stager, state = PinnedStager(engine), filling(engine)
    planner = dcp.DefaultSavePlanner()  # keeps the staged tensors
    held = []
    for number in range(2):
        writer = Held(tmp_path / str(number), error)
        writer.go.set()
        response = save(state, stager, storage_writer=writer, planner=planner)
        held.append(response)
        if error is None:
            response.upload_completion.result()
        else:  # the frames reference the staged tensors too
            caught = response.upload_completion.exception()
            assert type(caught).__name__ == "CheckpointException"
            held.append(caught)
    assert eventually(lambda: leased(engine) == 0)
    assert planner.state_dict["w"].numel() == 0


def test_stage_is_refused_at_once_if_nothing_will_free_the_pool(engine, monkeypatch):
    monkeypatch.setattr("stillframe._dcp.staged._GRACE_S", 0.0)
    stager, state = PinnedStager(engine), filling(engine)
    mine = stager.stage(state).result()
    with pytest.raises(stillframe.PoolExhaustedError, match="Release snapshots"):
        stager.stage(state)
    assert (mine["w"] == 1).all()
    del mine
    assert (stager.stage(state).result()["w"] == 1).all()


def test_stage_waits_for_an_earlier_stage_whose_upload_is_about_to_begin(engine, monkeypatch):
    monkeypatch.setattr("stillframe._dcp.staged._GRACE_S", 60.0)
    stager, state = PinnedStager(engine), filling(engine)
    future = stager.stage(state)
    later: Future[Any] = Future()
    thread = threading.Thread(target=lambda: later.set_result(stager.stage(state).result()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    future._staged.record_upload_start()
    thread.join(0.05)
    assert thread.is_alive()
    future._staged.record_uploaded_tree(future.result())
    future._staged.release_after_upload()
    assert later.result(60)["w"][0] == 1
    thread.join()


def test_stage_does_not_wait_for_memory_kept_after_an_upload(engine):
    stager, state = PinnedStager(engine), filling(engine)
    future = stager.stage(state)
    future._staged.record_upload_start()
    tree = future.result()
    future._staged.record_uploaded_tree(tree)
    kept = tree["w"].detach()  # a reference like that of a planner, which no walk of the tree finds
    del tree
    future._staged.release_after_upload()
    with pytest.raises(stillframe.PoolExhaustedError):
        stager.stage(state)
    assert kept[0] == 1
    del kept
    stager.stage(state)


def test_state_larger_than_the_pool_is_refused_at_once_during_uploads(
    tmp_path, engine, monkeypatch
):
    monkeypatch.setattr("stillframe._dcp.staged._GRACE_S", 1e6)
    stager, writer = PinnedStager(engine), Held(tmp_path)
    response = save(filling(engine), stager, storage_writer=writer)
    assert writer.began.wait(60)
    with pytest.raises(stillframe.PoolExhaustedError):
        stager.stage({"w": torch.ones(engine.stats()["pool_bytes"] + 1, dtype=torch.uint8)})
    writer.go.set()
    response.upload_completion.result()


@pytest.mark.parametrize("kind", ["sparse", "quantized"])
@pytest.mark.filterwarnings("ignore")  # torch warns about each of these kinds
def test_tensor_that_cannot_be_emptied_stays_intact_for_its_holder(engine, kind):
    dense = torch.arange(8.0)
    value = (
        dense.to_sparse()
        if kind == "sparse"
        else torch.quantize_per_tensor(dense, 1, 0, torch.qint8)
    )
    future = PinnedStager(engine).stage({"w": value})
    tree = future.result()
    future._staged.record_uploaded_tree(tree)
    future._staged.release_after_upload()
    assert (tree["w"].to_dense() if kind == "sparse" else tree["w"].dequantize()).tolist() == [
        *range(8)
    ]
    del tree, future
    assert eventually(lambda: leased(engine) == 0)


def test_a_stager_keeps_nothing_of_uploads_that_have_ended(engine):
    stager = PinnedStager(engine)
    future = stager.stage({"w": torch.ones(3)})
    future._staged.record_uploaded_tree(future.result())
    future._staged.release_after_upload()
    gone = weakref.ref(future._staged)
    del future
    stager.stage({})
    gc.collect()
    assert gone() is None


def test_memory_of_dtensors_returns_even_if_they_are_held(engine, one_rank):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    state = {"d": DTensor.from_local(torch.ones(1000), mesh, [Replicate()])}
    future = PinnedStager(engine).stage(state)
    tree = future.result()
    future._staged.record_uploaded_tree(tree)
    assert leased(engine) > 0
    future._staged.release_after_upload()
    assert eventually(lambda: leased(engine) == 0)
    assert tree["d"].to_local().numel() == 0


@pytest.mark.parametrize("asked_late", [False, True])
def test_a_stage_that_fails_fails_both_futures(tmp_path, engine, asked_late, monkeypatch):
    """That includes a failure before DCP asks `done()`, which DCP would take for success."""
    trained, stager = Trained(), PinnedStager(engine)
    stage = stager.stage

    def changed_in_between(state: Any) -> Any:
        future = stage(state)
        with torch.no_grad():
            trained.model[0].weight.add_(1.0)
        if asked_late:
            assert eventually(lambda: Future.done(future))
            assert not future.done()
        return future

    monkeypatch.setattr(stager, "stage", changed_in_between)
    with slow("lane_copy", 0.02):
        response = save(trained.state(), stager, checkpoint_id=tmp_path / "c")
        with pytest.raises(stillframe.TornSnapshotError):
            response.staging_completion.result()
        with pytest.raises(stillframe.TornSnapshotError):
            response.upload_completion.result()
    assert not (tmp_path / "c").exists()
    assert eventually(lambda: leased(engine) == 0)


BASE = torch.tensor([1 + 2j])


def save_in_a_process(trained, stager, path):
    """Save while a step runs; return the state that must be saved."""
    state = {**trained.state(), "conj": BASE.conj(), "neg": torch.nn.Parameter(BASE.conj().imag)}
    wanted = copied(state)
    response = dcp.async_save(
        state,
        checkpoint_id=path,
        async_stager=stager,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    trained.step()
    response.upload_completion.result()
    return wanted


def test_stager_works_with_the_process_executor(tmp_path, engine, one_rank, monkeypatch):
    moved, share = [], torch.UntypedStorage._share_fd_cpu_

    def counted(storage):
        moved.append(storage.nbytes())
        return share(storage)

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", counted)
    trained = Trained()
    wanted = save_in_a_process(trained, PinnedStager(engine), tmp_path / "c")
    assert equal(loaded(wanted, tmp_path / "c"), wanted)
    assert eventually(lambda: leased(engine) == 0)
    assert sum(moved) >= 3 * 4 * 64 * 64 * 4  # the weights, and two moments of each
    moved.clear()
    # Shared memory is read in place. It returns although the process keeps its last state: the pool
    # has room for one state only.
    with stillframe.Engine(pool_bytes=256 << 10, block_bytes=4096, shared_memory=True) as shared:
        stager = PinnedStager(shared)
        for number in range(3):
            wanted = save_in_a_process(trained, stager, tmp_path / f"{number}")
            assert equal(loaded(wanted, tmp_path / f"{number}"), wanted)
        assert moved == [] and eventually(lambda: leased(shared) == 0)
        wanted["c"] = threading.Lock()  # the last object, which cannot be pickled
        response = dcp.async_save(
            wanted,
            checkpoint_id=tmp_path / "none",
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        with pytest.raises(TypeError, match="lock"):
            response.upload_completion.result()
        assert eventually(lambda: leased(shared) == 0)


def test_report_has_the_wait_of_a_step(tmp_path, engine):
    trained = Trained()
    with slow("lane_copy", 0.02):
        response = async_save(trained.state(), tmp_path / "c", no_dist=True, engine=engine)
        trained.step()
    response.upload_completion.result()
    assert response.report.deferred_nbytes > 0 and response.report.gate_wait_s > 0
    response = async_save({"a": 1}, tmp_path / "c", no_dist=True, engine=engine)
    response.upload_completion.result()
    assert response.report.gate_wait_s == 0


def test_closed_stager_refuses_stages_and_its_uploads_go_on(tmp_path, engine):
    stager, state = PinnedStager(engine, overlap=False), filling(engine)
    writer = Held(tmp_path)
    response = save(state, stager, storage_writer=writer)
    stager.close()
    stager.close()
    with pytest.raises(stillframe.StillframeError, match="closed"):
        stager.stage(state)
    writer.go.set()
    response.upload_completion.result()
    assert (loaded(state, tmp_path)["w"] == 1).all()


def test_argument_that_is_no_engine_is_refused():
    with pytest.raises(TypeError, match=r"stillframe\.Engine"):
        PinnedStager("engine")


@pytest.mark.parametrize("value", [None, "no"])
def test_flag_that_is_not_a_bool_is_refused(tmp_path, value):
    refused = "has to be True or False, not"
    with pytest.raises(TypeError, match=f"overlap {refused}"):
        PinnedStager(overlap=value)
    for option in ("overlap", "durable"):
        with pytest.raises(TypeError, match=f"{option} {refused}"):
            async_save({"a": 1}, tmp_path / "c", no_dist=True, **{option: value})
    assert not (tmp_path / "c").exists()


def test_saves_use_their_own_group_if_the_users_has_all_ranks(one_rank):
    groups, users = Groups(), torch.distributed.group.WORLD
    ours = groups.get_or_create_save_group(users)
    assert ours is not users
    assert groups.get_or_create_save_group(users) is ours
