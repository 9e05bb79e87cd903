"""`latest`: which checkpoint is the newest, and which are whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import stillframe
import torch
from _stillframe_command import main as command
from fix_kinds import (
    KINDS,
    accelerate,
    cases,
    may_lack,
    model_of,
    sharded,
    torch_file,
    trainer,
    trainer_state,
)
from fix_processes import run_python
from stillframe import _core, testing
from stillframe._check import newest

CASES = list(cases())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a directory with two checkpoints of a kind, each made once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("kind")
            write, older, newer = KINDS[kind]
            write(made[kind] / newer)  # first, so that the times say the opposite
            write(made[kind] / older)
        return made[kind]

    return of


@pytest.fixture
def two(written, tmp_path):
    """Return a function that copies two checkpoints of a kind, the older one first."""

    def of(kind: str) -> tuple[Path, Path]:
        shutil.copytree(written(kind), tmp_path / "run", symlinks=True)
        _, older, newer = KINDS[kind]
        return tmp_path / "run" / older, tmp_path / "run" / newer

    return of


@pytest.fixture
def logged(caplog):
    """Return a function for what was logged as a warning since the last call."""
    caplog.set_level(logging.WARNING, "stillframe")

    def since() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    return since


@pytest.mark.parametrize("check", ["files", "bytes"])
@pytest.mark.parametrize("kind", KINDS)
def test_newest_of_a_kind_is_the_one_of_the_highest_step(kind, check, two, logged):
    _, newer = two(kind)
    assert stillframe.latest(newer.parent, check=check) == newer
    assert logged() == []


@pytest.mark.parametrize(("kind", "file"), CASES, ids=lambda name: name or "itself")
def test_checkpoint_without_one_of_its_files_is_passed_over(kind, file, two, logged):
    older, newer = two(kind)
    (newer / file).unlink()
    if may_lack(file):
        assert stillframe.latest(newer.parent) == newer
        assert logged() == []
        return
    assert stillframe.latest(newer.parent) == older
    if file:  # a file that is gone is no checkpoint, and none is named
        (line,) = logged()
        assert str(newer) in line and "is passed over: " in line and "\n" not in line


@pytest.mark.parametrize("left", ["none", "half", "all but one"])
@pytest.mark.parametrize(("kind", "file"), CASES, ids=lambda name: name or "itself")
def test_checkpoint_with_a_truncated_file_is_passed_over(kind, file, left, two, logged):
    older, newer = two(kind)
    length = (newer / file).stat().st_size
    os.truncate(newer / file, {"none": 0, "half": length // 2, "all but one": length - 1}[left])
    assert stillframe.latest(newer.parent) == older
    (line,) = logged()
    assert str(newer) in line


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("trainer")])
def test_trainer_state_of_another_step_is_passed_over(kind, two, logged):
    older, newer = two(kind)
    trainer_state(newer, 7)
    assert stillframe.latest(newer.parent) == older
    assert "trainer_state.json is of step 7" in logged()[0]


@pytest.mark.parametrize("text", ["[]", "{}", '{"global_step": "200"}', '{"global_step"'])
def test_trainer_state_without_a_step_is_passed_over(text, two):
    older, newer = two("trainer")
    (newer / "trainer_state.json").write_text(text)
    assert stillframe.latest(newer.parent) == older


def test_wrong_bytes_are_found_by_the_check_of_bytes_alone(two, logged):
    older, newer = two("torch")
    data = bytearray(newer.read_bytes())
    data[data.index(torch.arange(64.0).numpy().tobytes()) + 9] ^= 1
    newer.write_bytes(data)
    assert stillframe.latest(newer.parent) == newer
    assert stillframe.latest(newer.parent, check="bytes") == older
    assert "do not match their CRC" in logged()[0]


def test_wrong_bytes_inside_a_directory_name_the_file(two, logged):
    older, newer = two("trainer, fsdp")
    (shard,) = (newer / "optimizer_0").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[data.index(torch.arange(64.0).numpy().tobytes()) + 9] ^= 1
    shard.write_bytes(data)
    assert stillframe.latest(newer.parent, check="bytes") == older
    assert "optimizer_0: 1 of its 2 items are bad" in logged()[0]


# ---- what the directory says ------------------------------------------------------------------


@pytest.mark.parametrize("args", [True, False])
def test_model_alone_is_whole_where_nothing_says_that_more_was_saved(args, tmp_path):
    path = trainer(tmp_path / "checkpoint-5", 5, only_model=True, args=args)
    assert stillframe.latest(tmp_path) == path


def test_model_alone_is_not_whole_where_the_arguments_say_that_more_was_saved(tmp_path, logged):
    path = trainer(tmp_path / "checkpoint-5", 5)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (path / name).unlink()
    assert stillframe.latest(tmp_path) is None
    assert "it has no optimizer" in logged()[0]


def test_missing_state_of_the_last_rank_is_found_if_the_number_of_ranks_is_known(tmp_path, logged):
    path = trainer(tmp_path / "checkpoint-5", 5, ranks=3)
    (path / "rng_state_2.pth").unlink()
    assert stillframe.latest(tmp_path) is None
    assert "no RNG state of rank 2" in logged()[0]
    (path / "training_args.bin").unlink()
    assert stillframe.latest(tmp_path) == path


def test_checkpoint_that_the_trainer_marks_as_unfinished_is_passed_over(tmp_path, logged):
    path = trainer(tmp_path / "checkpoint-5", 5)
    (path / "checkpoint-is-incomplete.txt").touch()
    assert stillframe.latest(tmp_path) is None
    assert "checkpoint-is-incomplete.txt" in logged()[0]


def test_plain_modules_checkpoint_needs_no_config(tmp_path):
    path = trainer(tmp_path / "checkpoint-5", 5)
    for name in ("config.json", "generation_config.json"):
        (path / name).unlink()
    assert stillframe.latest(tmp_path) == path


def test_index_must_name_tensors_that_its_files_have(tmp_path, logged):
    path = trainer(tmp_path / "checkpoint-5", 5, sharded=True)
    index = path / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["c"] = text["weight_map"]["a"]
    index.write_text(json.dumps(text))
    assert stillframe.latest(tmp_path) is None
    assert "has no tensor c" in logged()[0]


def test_deepspeeds_directory_must_be_there_and_of_the_step(tmp_path, logged):
    path = tmp_path / "checkpoint-5"
    model_of(path)
    (path / "global_step5").mkdir()
    torch.save({}, path / "global_step5" / "mp_rank_00_model_states.pt")
    torch.save({}, path / "rng_state_0.pth")
    (path / "latest").write_text("global_step5")
    trainer_state(path, 5)
    assert stillframe.latest(tmp_path) == path
    (path / "latest").write_text("global_step4")
    assert stillframe.latest(tmp_path) is None
    (path / "global_step4").mkdir()
    assert stillframe.latest(tmp_path) is None
    assert [line.rpartition("over: ")[2] for line in logged()] == [
        "its DeepSpeed state is of global_step4"
    ] * 2


def test_accelerates_numbered_files_have_no_gap(tmp_path, logged):
    path = accelerate(tmp_path / "checkpoint_0", models=3, ranks=2)
    (path / "model_1.safetensors").unlink()
    assert stillframe.latest(tmp_path) is None
    assert "it has no model_1.safetensors" in logged()[0]


def test_accelerate_without_a_scheduler_is_whole(tmp_path):
    path = accelerate(tmp_path / "checkpoint_0")
    (path / "scheduler.bin").unlink()
    assert stillframe.latest(tmp_path) == path


def test_weights_that_hooks_write_below_accelerates_directory_are_checked(tmp_path):
    path = accelerate(tmp_path / "checkpoint-5")
    (path / "unet").mkdir()
    (path / "model.safetensors").rename(path / "unet" / "diffusion_model.safetensors")
    assert stillframe.latest(tmp_path) == path
    os.truncate(path / "unet" / "diffusion_model.safetensors", 30)
    assert stillframe.latest(tmp_path) is None


def test_shards_without_metadata_are_named_as_unfinished(tmp_path, logged):
    path = sharded(tmp_path / "step-1")
    (path / ".metadata").unlink()
    assert stillframe.latest(tmp_path) is None
    assert "no .metadata, which is written last" in logged()[0]


def test_directory_of_other_files_counts_if_a_number_is_in_its_name(tmp_path):
    for name in ("step-5", "best"):
        (tmp_path / name).mkdir()
        torch_file(tmp_path / name / "state.pt")
    assert stillframe.latest(tmp_path) == tmp_path / "step-5"
    os.truncate(tmp_path / "step-5" / "state.pt", 99)
    assert stillframe.latest(tmp_path) is None


# ---- the order ------------------------------------------------------------------------------


def at(path: Path, time: float) -> Path:
    os.utime(path, (time, time))
    return path


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("step99.pt", "step100.pt"),
        ("epoch=9-step=990.ckpt", "epoch=10-step=1100.ckpt"),
        ("epoch=2-val_loss=0.90.ckpt", "epoch=10-val_loss=0.10.ckpt"),
        ("epoch=2-loss_step=0.90.ckpt", "epoch=10-loss_step=0.10.ckpt"),
        ("model_9.pth", "model_10.pth"),
        ("ckpt_iter_9.pt", "ckpt_iter_10.pt"),
        ("run7_step9.pt", "run7_step10.pt"),
    ],
)
def test_higher_number_of_a_series_wins_over_the_times(older, newer, tmp_path):
    at(torch_file(tmp_path / newer), 1000)
    at(torch_file(tmp_path / older), 2000)
    assert stillframe.latest(tmp_path) == tmp_path / newer


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("epoch=1-step=200.ckpt", "last.ckpt"),
        ("last.ckpt", "epoch=1-step=200.ckpt"),
        ("run8_step900.pt", "run9_step5.pt"),
        ("best.pt", "a.pt"),
        ("2024-02-01.pt", "2023-01-31.pt"),
    ],
)
def test_latest_takes_the_series_whose_checkpoint_was_modified_last(older, newer, tmp_path):
    at(torch_file(tmp_path / older), 1000)
    at(torch_file(tmp_path / newer), 2000)
    assert stillframe.latest(tmp_path) == tmp_path / newer


def test_checkpoints_of_two_series_are_tried_in_the_order_of_their_times(tmp_path):
    for step in (1, 2, 3):
        at(torch_file(tmp_path / f"step={step}.ckpt"), 1000 + step)
    at(torch_file(tmp_path / "last.ckpt"), 1002.5)
    paths = [Path(path).name for path in newest._iter_candidates_newest_first(str(tmp_path))]
    assert paths == ["step=3.ckpt", "last.ckpt", "step=2.ckpt", "step=1.ckpt"]


def test_link_to_a_checkpoint_in_the_directory_gives_that_checkpoint(tmp_path):
    torch_file(tmp_path / "epoch=0.ckpt")
    (tmp_path / "last.ckpt").symlink_to("epoch=0.ckpt")
    assert stillframe.latest(tmp_path) == tmp_path / "epoch=0.ckpt"


def test_link_to_a_checkpoint_elsewhere_is_a_candidate(tmp_path):
    (tmp_path / "run").mkdir()
    torch_file(tmp_path / "x.ckpt")
    (tmp_path / "run" / "last.ckpt").symlink_to("../x.ckpt")
    assert stillframe.latest(tmp_path / "run") == tmp_path / "run" / "last.ckpt"


# ---- what is no checkpoint ------------------------------------------------------------------


def test_latest_does_not_warn_of_other_files_and_directories(tmp_path, logged):
    for name in ("notes.txt", "hparams.yaml", "events.out.tfevents.17"):
        (tmp_path / name).write_text("x" * 100)
    (tmp_path / "version_0" / "logs").mkdir(parents=True)
    (tmp_path / ".stillframe-0123-4-5.tmp").write_bytes(b"PK\3\4")
    (tmp_path / ".checkpoint-7").mkdir()
    assert stillframe.latest(tmp_path) is None
    torch.save({}, tmp_path / "of no name known")
    assert stillframe.latest(tmp_path) == tmp_path / "of no name known"
    assert logged() == []


def test_trainers_own_files_are_no_checkpoints(tmp_path, logged):
    """At the end of a training the Trainer saves the model next to its checkpoints."""
    path = trainer(tmp_path / "checkpoint-5", 5)
    trainer(tmp_path, 5, sharded=True)
    assert stillframe.latest(tmp_path) == path
    shutil.rmtree(path)
    assert stillframe.latest(tmp_path) is None
    assert logged() == []


@pytest.mark.parametrize("kind", ["sharded", "lightning, sharded", "trainer", "accelerate"])
def test_directory_that_is_a_checkpoint_itself_is_returned(kind, two, logged):
    _, newer = two(kind)
    assert stillframe.latest(newer) == newer == stillframe.latest(f"{newer}/")
    gone = {"sharded": ".metadata", "lightning, sharded": "meta.pt"}.get(kind, "model.safetensors")
    (newer / gone).unlink()
    assert stillframe.latest(f"{newer}/") is None
    (line,) = logged()
    assert str(newer) in line and "it has no" in line


def test_file_of_another_kind_with_a_checkpoints_name_is_named(tmp_path, logged):
    (tmp_path / "x.pt").write_text("no checkpoint " * 9)
    assert stillframe.latest(tmp_path) is None
    assert "looks like text" in logged()[0]


def test_latest_does_not_wait_for_pipes(tmp_path):
    path = trainer(tmp_path / "checkpoint-5", 5)
    (path / "trainer_state.json").unlink()
    os.mkfifo(path / "trainer_state.json")
    os.mkfifo(tmp_path / "x.ckpt")
    os.mkfifo(tmp_path / "y")
    assert stillframe.latest(tmp_path) is None


def test_missing_directory_is_an_error(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        stillframe.latest(tmp_path / "nowhere")
    torch_file(tmp_path / "x.pt")
    with pytest.raises(NotADirectoryError):
        stillframe.latest(tmp_path / "x.pt")
    with pytest.raises(ValueError, match="'files' or 'bytes'"):
        stillframe.latest(tmp_path, check="all")
    with pytest.raises(TypeError):
        stillframe.latest(7)
    with pytest.raises(ValueError, match="storage_options= is for URLs"):
        stillframe.latest(tmp_path, storage_options={})
    assert stillframe.latest(str(tmp_path)) == tmp_path / "x.pt"


# ---- few calls ------------------------------------------------------------------------------


def opened(call: Callable[[], object], below: Path) -> int:
    """Return how often files and directories below a path are opened or listed in a call."""
    count = 0
    counting = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if counting and event in ("open", "os.listdir", "os.scandir"):
            count += str(args[0]).startswith(str(below))

    sys.addaudithook(hook)
    try:
        call()
    finally:
        counting = False
    return count


def test_thousand_checkpoints_need_as_few_opens_as_ten(tmp_path):
    counts = []
    for number in (10, 1000):
        run = tmp_path / str(number)
        run.mkdir()
        first = trainer(tmp_path / f"checkpoint-{number}", number)
        for step in range(number):
            (run / f"checkpoint-{step}").mkdir()
        shutil.move(first, run)
        found = run / f"checkpoint-{number}"
        counts.append(opened(lambda run=run, found=found: stillframe.latest(run) == found, run))
    assert counts[0] == counts[1] < 40


def test_thousand_unfinished_checkpoints_need_few_opens_each(tmp_path):
    one = trainer(tmp_path / "one" / "checkpoint-0", 0)
    (one / "trainer_state.json").unlink()
    run = tmp_path / "run"
    for step in range(1, 101):
        shutil.copytree(one, run / f"checkpoint-{step}", copy_function=os.link)
    assert opened(lambda: stillframe.latest(run), run) <= 100 + 10


# ---- during saves -----------------------------------------------------------------------------


def test_latest_waits_for_saves_submitted_before_it(tmp_path):
    with testing.slow("fdatasync", 0.3):
        stillframe.async_save({"w": torch.ones(9)}, tmp_path / "step1.pt")
        assert stillframe.latest(tmp_path) == tmp_path / "step1.pt"
    stillframe.wait_all()


def test_safetensors_file_of_ours_is_found_during_its_save(tmp_path):
    with testing.slow("fdatasync", 0.3):
        stillframe.async_save({"w": torch.ones(9)}, tmp_path / "step1.safetensors")
        assert stillframe.latest(tmp_path) == tmp_path / "step1.safetensors"
    stillframe.wait_all()


def test_latest_waits_for_removes_submitted_before_it(tmp_path):
    torch_file(tmp_path / "step1.pt")
    with testing.slow("fdatasync", 0.3):
        handle = stillframe.async_save({"w": torch.ones(9)}, tmp_path / "step2.pt")
        stillframe.remove(tmp_path / "step1.pt")
        stillframe.remove(tmp_path / "step2.pt")
        assert stillframe.latest(tmp_path) is None
    handle.result()


def test_latest_does_not_wait_for_saves_elsewhere(tmp_path):
    for name in ("run", "run2"):
        (tmp_path / name).mkdir()
    torch_file(tmp_path / "run" / "step1.pt")
    with testing.held("fdatasync"):
        handle = stillframe.async_save({"w": torch.ones(9)}, tmp_path / "run2" / "step9.pt")
        assert stillframe.latest(tmp_path / "run") == tmp_path / "run" / "step1.pt"
        assert not handle.done()
    handle.result()


def test_failed_save_leaves_the_older_checkpoint_the_newest(tmp_path, logged):
    torch_file(tmp_path / "step1.pt")
    with testing.fault("pwrite", sticky=True, err=28):
        handle = stillframe.async_save({"w": torch.ones(9)}, tmp_path / "step2.pt")
        assert stillframe.latest(tmp_path) == tmp_path / "step1.pt"
        assert handle.exception() is not None
    assert logged() == []


def test_latest_inside_external_work_of_the_log_is_refused(tmp_path):
    from stillframe._save import ordered

    errors: list[BaseException] = []

    def work(_: bool) -> bool:
        try:
            stillframe.latest(tmp_path)
        except stillframe.StillframeError as error:
            errors.append(error)
        return True

    ordered.submit(os.fsencode(tmp_path / "x"), _core.WORK_SAVE, work)
    stillframe.wait_all()
    assert len(errors) == 1


# ---- the shell --------------------------------------------------------------------------------


def test_command_prints_the_newest_whole_checkpoint_and_names_skipped_ones(two, capsys):
    older, newer = two("trainer")
    (newer / "optimizer.pt").unlink()
    assert command(["latest", str(newer.parent)]) == 0
    output = capsys.readouterr()
    assert output.out == f"{older}\n"
    assert f"{newer} is passed over: it has no optimizer" in output.err
    assert command(["latest", "--check", "bytes", str(newer.parent)]) == 0


def test_command_ends_with_2_without_a_checkpoint(tmp_path, capsys):
    assert command(["latest", str(tmp_path)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err
    assert command(["latest", str(tmp_path / "nowhere")]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "nowhere: there is no such directory" in output.err


def test_command_imports_no_torch(tmp_path):
    torch_file(tmp_path / "x.pt")
    trainer(tmp_path / "checkpoint-1", 1, ranks=2)
    code = f"""if True:
        import sys
        from _stillframe_command import main
        status = main(["latest", "--check", "bytes", {str(tmp_path)!r}])
        assert not {{"torch", "numpy", "transformers"}} & set(sys.modules), sorted(sys.modules)
        sys.exit(status)"""
    done = run_python("-c", code, imported=())
    assert (done.returncode, done.stderr) == (0, "")


# ---- verify says the same -----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "file"), CASES, ids=lambda name: name or "itself")
def test_verify_calls_the_same_checkpoints_damaged(kind, file, two):
    _, newer = two(kind)
    needed = file != "" and not may_lack(file)
    if needed:
        (newer / file).unlink()
    assert command(["verify", str(newer)]) == (1 if needed else 0)
    assert command(["verify", str(newer.parent)]) == (1 if needed else 0)


def test_verify_of_a_directory_reports_a_truncated_model(two, capsys):
    _, newer = two("trainer")
    os.truncate(newer / "model.safetensors", 100)
    assert command(["verify", str(newer)]) == 1
    assert "model.safetensors: damaged" in " ".join(capsys.readouterr().out.split())
