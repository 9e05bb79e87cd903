"""Sharded strategies on two ranks over gloo, and refused ones. sharded_ranks.py has the runs."""

import errno
import json
from pathlib import Path

import pytest
from fix_lightning import PACKAGES
from fix_processes import LIGHTNING, run_program
from stillframe._lightning.callers import sharded_model_key
from stillframe._lightning.sharded import sharded

HERE = Path(__file__).parent
WHOLE = [".metadata", "__0_0", "__1_0", "meta"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    done = run_program(
        *(HERE / "sharded_ranks.py", directory),
        check=False,
        imported=LIGHTNING,
        STILLFRAME_POOL_BYTES="64MiB",
    )
    (directory / "stderr.txt").write_text(done.stderr)
    return directory


@pytest.fixture
def notes(directory):
    """Return a function that returns each rank's notes of a scenario."""

    def read(scenario, package="lightning", ranks=2):
        found = []
        for rank in range(ranks):
            path = directory / f"{scenario}-{package}" / f"rank{rank}.json"
            assert path.exists(), (directory / "stderr.txt").read_text()[-20_000:]
            found.append(json.loads(path.read_text()))
            assert "failed" not in found[-1], found[-1]["failed"]
        return found

    return read


@pytest.mark.parametrize("package", PACKAGES)
def test_sharded_checkpoints_are_saved_during_training_and_read_by_lightning(notes, package):
    for rank, note in enumerate(notes("trains", package)):
        assert note["raised"] == "NoneType", note["text"]
        assert note["warnings"] == []
        assert note["unfinished"] == [True] * 3
        assert note["files"] == {"last.ckpt": WHOLE, "step=6.ckpt": WHOLE}
        assert note["link"] == "step=6.ckpt"
        assert note["steps"] == [6, 6]
        assert note["same"] == [True, True]
        assert note["ours gone"]
        # only rank 0's callback is called, three times
        assert len(note["nbytes"]) == (0 if rank else 3)
        assert note["deferred"][1:] == ([] if rank else [540_000] * 2)


def test_checkpoint_of_lightning_alone_is_loaded_and_replaced(notes):
    for note in notes("lightnings_own"):
        assert note["raised"] == "NoneType", note["text"]
        assert note["steps"] == [2, 3, 3]
        assert note["same"] == [True] * 3
        assert note["files"] == WHOLE


def test_repeated_saves_to_one_name_replace_files_and_links(notes):
    found = notes("overwrites")
    for note in found:
        assert note["raised"] == "NoneType", note["text"]
        assert note["files"] == dict.fromkeys(
            ("a.ckpt", "b.ckpt", "last.ckpt", "step=6.ckpt"), WHOLE
        )
        assert (note["step"], note["same"]) == (6, True)
        assert not note["is a link"]
        assert note["target"] == ["kept"]
    assert found[0]["meta before commit"] == [True] * 6


def test_all_ranks_wait_to_load_a_checkpoint_being_written(notes):
    for note in notes("in_flight"):
        assert note["raised"] == "NoneType", note["text"]
        assert note["unfinished"] == [True]
        assert note["loaded"] == [4]


def test_full_disk_of_one_rank_is_raised_by_all_at_the_next_save_and_keeps_the_old_checkpoint(
    notes,
):
    for note in notes("full_disk"):
        assert (note["raised"], note["errno"]) == ("SaveError", errno.ENOSPC)
        assert "rank 1: No space left on device" in note["text"]
        assert "step=4.ckpt" in note["text"]
        assert note["step"] == 6
        # The save that raised the earlier error was made.
        assert note["files"] == {"step=2.ckpt": WHOLE, "step=6.ckpt": WHOLE}
        assert note["loads"] == 2
        assert note["again"]["raised"] == "NoneType", note["again"]
        assert note["then"] == {"step=6.ckpt": WHOLE}


def test_a_full_disk_of_one_rank_is_raised_by_all_at_the_end_once(notes):
    for note in notes("full_disk_at_the_end"):
        assert (note["raised"], note["errno"]) == ("SaveError", errno.ENOSPC)
        assert note["files"] == {"step=4.ckpt": WHOLE}


def test_with_on_error_warn_training_goes_on_and_the_old_checkpoint_stays(notes):
    for note in notes("warns"):
        assert note["raised"] == "NoneType", note["text"]
        assert note["warned"] == 2
        assert note["files"] == {"step=2.ckpt": WHOLE}


def test_urls_are_refused_and_a_mirror_takes_every_checkpoint(notes):
    for note in notes("at_urls"):
        assert [kind for kind, _ in note["refused"]] == ["ValueError"] * 3
        assert all("ModelParallelStrategy takes no URLs" in words for _, words in note["refused"])
        assert note["local"] == ["c", "store"]  # none is named after the scheme
        assert note["raised"] == "NoneType", note["text"]
        assert note["files"] == {"step=6.ckpt": WHOLE}
        marked = sorted([*WHOLE, ".stillframe.json"])
        assert note["store"] == {f"step={step}.ckpt": marked for step in (2, 4, 6)}


def test_copy_error_of_one_rank_is_raised_once_by_all(notes):
    for note in notes("call_fails"):
        assert note["messages"] == ["not to be copied"]
        assert note["raised"] == "NoneType", note["text"]
        assert note["files"] == ["c1"]


def test_a_state_that_does_not_fit_into_the_pool_is_saved_during_the_call(notes):
    for note in notes("small_pool"):
        assert note["raised"] == "NoneType", note["text"]
        assert note["done"] == [True]
    # Only the rank whose on_durable is called has the time of the call.
    assert sorted(note["blocked"] for note in notes("small_pool")) == [[], [True] * 3]


def test_save_in_flight_at_ctrl_c_is_complete_after_the_fit(notes):
    for note in notes("interrupted"):
        assert note["raised"] in ("SystemExit", "KeyboardInterrupt")
        assert note["files"] == {"step=4.ckpt": WHOLE}
        assert note["step"] == 4


def test_directory_of_an_unfinished_save_is_refused_on_all_ranks(notes):
    for note in notes("incomplete"):
        assert note["raised"] == "CorruptCheckpointError"
        assert "no .metadata" in note["text"]


def test_killed_rank_ends_the_other_and_keeps_the_old_checkpoint(notes):
    (note,) = notes("killed", ranks=1)
    assert note["raised"]
    assert note["in time"]
    assert note["whole"] == [True]


@pytest.mark.parametrize("package", PACKAGES)
def test_fabric_saves_shards_during_training_and_all_ranks_raise(notes, package):
    for note in notes("fabric", package):
        assert note["early"]
        assert note["changed"]
        assert note["same"]
        assert note["step"] == 4
        assert note["errnos"] == [errno.ENOSPC]
        assert note["files"] == ["c", "e", "f"] or note["files"] == ["c", "f"]
        assert len(note["refused"]) == 2


def a_strategy(name, **attributes):
    def save_checkpoint(self):
        pass

    save_checkpoint.__module__ = "lightning.fabric.strategies.fsdp"
    return type(name, (), {"save_checkpoint": save_checkpoint, **attributes})()


def own_save(self):
    pass


@pytest.mark.parametrize(
    ("strategy", "kind", "reason"),
    [
        (a_strategy("FSDPStrategy", _state_dict_type="full"), ValueError, 'type="sharded"'),
        (
            a_strategy("ModelParallelStrategy", _save_distributed_checkpoint=False),
            ValueError,
            "save_distributed_checkpoint=True",
        ),
        (a_strategy("DDPStrategy"), TypeError, "AsyncCheckpointIO"),
        (
            a_strategy("FSDPStrategy", _state_dict_type="sharded", lightning_module=None),
            TypeError,
            "Trainer's",
        ),
        (
            a_strategy("FSDPStrategy", _state_dict_type="sharded", save_checkpoint=own_save),
            TypeError,
            "of its own",
        ),
        ("fsdp", TypeError, "a strategy of Fabric"),
    ],
    ids=[
        "full state dict",
        "not distributed",
        "ddp",
        "no module",
        "own save",
        "name of a Fabric strategy",
    ],
)
def test_sharded_refuses_unsupported_strategies_with_the_reason(strategy, kind, reason):
    with pytest.raises(kind, match=reason):
        sharded(strategy)


def test_strategy_is_recognised_by_class_and_an_overridden_save_is_kept():
    fsdp = a_strategy("FSDPStrategy", _state_dict_type="sharded")
    derived = type("Mine", (type(fsdp),), {})()
    own = type("Mine", (type(fsdp),), {"save_checkpoint": own_save})()
    assert sharded_model_key(fsdp) == sharded_model_key(derived) == "model"
    assert sharded_model_key(own) is None
    parallel = a_strategy("ModelParallelStrategy", _save_distributed_checkpoint=True)
    assert sharded_model_key(parallel) == "state_dict"
