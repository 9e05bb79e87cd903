"""Our wrappers of a sharded strategy's methods, on one rank: what they leave to Lightning.

test_sharded.py runs several ranks."""

import os
from types import SimpleNamespace

import pytest
import stillframe
import torch
from stillframe._dcp import checkpoint
from stillframe._lightning import sharded
from stillframe._lightning.sharded import META


class Checkpoints:
    """Records what is saved."""

    def __init__(self):
        self.saved = []

    def wait_for(self, target):
        pass


class ModelParallelStrategy:
    """A strategy like Lightning's: all ranks save to rank 0's path."""

    _save_distributed_checkpoint = True
    global_rank = 0

    def save_checkpoint(self, *args, **kwargs):
        pass

    save_checkpoint.__module__ = "lightning.fabric.strategies.model_parallel"

    def broadcast(self, path):
        return path if "://" in str(path) else "/of/rank/0"

    def reduce_boolean_decision(self, decision, all):
        return decision


@pytest.fixture(autouse=True)
def note_saves(monkeypatch):
    def note(checkpoints, strategy, caller, parts, target):
        checkpoints.saved.append((target, parts))

    monkeypatch.setattr(sharded, "_save_together", note)


@pytest.fixture
def calls():
    """Record the calls of the original method."""
    return []


@pytest.fixture
def original(calls):
    return lambda *args, **kwargs: calls.append((args, kwargs))


def of_trainer(original, path, storage_options=None):
    """Call `save_checkpoint` of a Trainer's strategy; return what was saved."""
    checkpoints = Checkpoints()
    checkpoint = {"state_dict": {"w": 1}, "optimizer_states": [{"m": 2}, {"m": 3}], "epoch": 4}
    trainer = SimpleNamespace(strategy=ModelParallelStrategy())
    sharded._save(checkpoints, trainer, original, checkpoint, path, storage_options)
    return checkpoints.saved


def of_fabric(original, path, **options):
    checkpoints = Checkpoints()
    state = {"model": torch.nn.Linear(2, 2)}
    sharded._save_fabric(checkpoints, ModelParallelStrategy(), original, path, state, **options)
    return checkpoints.saved


@pytest.fixture(autouse=True)
def every_model_is_sharded(monkeypatch):
    monkeypatch.setattr(
        sharded, "_find_only_sharded_model", lambda strategy, state: state.get("model")
    )


@pytest.mark.parametrize("save", [of_trainer, of_fabric])
def test_all_ranks_save_to_rank_0s_path(save, original, calls):
    ((target, parts),) = save(original, "/of/this/rank")
    assert target.given == "/of/rank/0" and parts.rank == 0 and not calls


@pytest.mark.parametrize("save", [of_trainer, of_fabric])
@pytest.mark.parametrize(
    ("path", "options"),
    [("/c", {"storage_options": {"a": 1}}), ("/c", {"filter": {}})],
)
def test_unsupported_sharded_saves_are_left_to_lightning(save, path, options, original, calls):
    if save is of_trainer and "filter" in options:
        return
    assert save(original, path, **options) == []
    ((args, kwargs),) = calls
    assert path in args
    for each in options.values():
        assert each in args or each in kwargs.values()


@pytest.mark.parametrize("save", [of_trainer, of_fabric])
def test_url_is_refused_on_every_rank(save, original, calls):
    with pytest.raises(ValueError, match=r"s3://bucket/c: .* takes no URLs.* mirror="):
        save(original, "s3://name:secret@bucket/c")
    with pytest.raises(ValueError, match="takes no URLs"):
        sharded._load(Checkpoints(), ModelParallelStrategy(), original, "s3://bucket/c")
    assert not calls


def test_object_with_a_state_dict_is_saved_by_its_state_dict(original):
    class Schedule:
        def state_dict(self):
            return {"step": 3}

        def load_state_dict(self, state):
            pass

    model = torch.nn.Linear(2, 2)
    state = {"model": model, "schedule": Schedule(), "names": {"a": 1}}
    states, rest = sharded._split_states(ModelParallelStrategy(), model, state)
    assert list(states) == ["model"] and list(states["model"]) == ["weight", "bias"]
    assert rest == {"schedule": {"step": 3}, "names": {"a": 1}}


# ---- what is a checkpoint ----


@pytest.mark.parametrize("name", [META, f"__0_0{checkpoint.SUFFIX}"])
def test_load_refuses_a_directory_of_an_unfinished_save(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(stillframe.CorruptCheckpointError, match="not a complete checkpoint"):
        sharded._check_and_repair_checkpoint(str(tmp_path))


def test_directory_of_another_kind_is_left_to_lightning(tmp_path):
    (tmp_path / "zero_to_fp32.py").touch()
    sharded._check_and_repair_checkpoint(str(tmp_path))
    sharded._check_and_repair_checkpoint(str(tmp_path / "nothing"))
    assert os.listdir(tmp_path) == ["zero_to_fp32.py"]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_repairs_a_checkpoint(rank, original, calls, monkeypatch):
    mended = []
    monkeypatch.setattr(sharded, "_check_and_repair_checkpoint", mended.append)
    strategy = ModelParallelStrategy()
    strategy.global_rank = rank
    sharded._load(Checkpoints(), strategy, original, "/of/this/rank")
    assert mended == ["/of/rank/0"][rank:] and len(calls) == 1
