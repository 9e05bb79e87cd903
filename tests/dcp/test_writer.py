"""FileSystemWriter and Reader on one rank: files, overwritten paths and refused arguments.

test_many_ranks.py tests many ranks."""

import errno
import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import fix_entries
import pytest
import stillframe
import torch
import torch.distributed.checkpoint as dcp
from fix_dcp import Trained, copied, equal, loaded
from fix_entries import Recorded
from fix_memory import peak_of
from fix_processes import run_python
from fix_waits import eventually, leased
from stillframe.dcp import FileSystemWriter, PinnedStager, Reader
from stillframe.testing import fault
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def kinds() -> dict[str, Any]:
    """Return one item of each kind that the writer treats differently."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "plain": base,
        "transposed": base.t(),
        "part": base[1:3, ::2],
        "expanded": torch.ones(3, 1).expand(3, 5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "bool": base > 3,
        "half": base.to(torch.bfloat16),
        "float8": base.to(torch.float8_e4m3fn),
        "uint16": torch.ones(5, dtype=torch.uint16),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "long": torch.arange(70_000, dtype=torch.int8),
        "text": "hello",
        "numbers": [1, 2.5, None],
    }


def write(state: Any, path: Path, **options: Any) -> Any:
    return dcp.save(state, storage_writer=FileSystemWriter(path, **options), no_dist=True)


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def items(path: Path) -> dict[str, bytes]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {
        index.fqn: (path / info.relative_path).read_bytes()[info.offset :][: info.length]
        for index, info in metadata.storage_data.items()
    }


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}])
def test_pytorchs_reader_loads_every_kind_of_item(tmp_path, engine, options):
    state = kinds()
    write(state, tmp_path / "c", engine=engine, **options)
    found = loaded(state, tmp_path / "c")
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert found[name].tolist() == value.tolist(), name
    assert found["text"] == "hello" and found["numbers"] == [1, 2.5, None]
    data = [name for name in files(tmp_path / "c") if name.endswith(".distcp")]
    if options == {}:
        assert len(data) == 1
    elif "thread_count" not in options:
        assert len(data) == len(items(tmp_path / "c"))


def test_every_item_is_a_complete_archive_with_correct_crcs_and_alignment(tmp_path):
    write(kinds(), tmp_path / "c")
    for name, data in items(tmp_path / "c").items():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None, name
        torch.load(io.BytesIO(data), weights_only=True)


def test_dcp_to_torch_save_converts_a_checkpoint(tmp_path):
    trained = Trained()
    write(trained.state(), tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "file.pt")
    assert equal(torch.load(tmp_path / "file.pt")["model"], dict(trained.model.state_dict()))


@pytest.mark.parametrize("stager", ["ours", "theirs", "the writer"])
def test_writer_accepts_the_result_of_any_stager(tmp_path, engine, stager):
    trained = Trained()
    chosen = {
        "ours": PinnedStager(engine),
        "theirs": DefaultStager(StagingOptions(False, False, False, False)),
        "the writer": None,
    }[stager]
    for number in range(2):
        wanted = copied(trained.state())
        writer = FileSystemWriter(tmp_path / "c", engine=engine)
        response = dcp.async_save(
            trained.state(), storage_writer=writer, async_stager=chosen, no_dist=True
        )
        trained.step()
        getattr(response, "upload_completion", response).result()
        assert equal(loaded(wanted, tmp_path / "c"), wanted), number
    assert eventually(lambda: leased(engine) == 0)


def test_one_planner_with_cached_plans_serves_many_saves(tmp_path):
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    writer = FileSystemWriter()
    trained = Trained()
    for number in range(3):
        path = tmp_path / str(number % 2)
        dcp.save(
            trained.state(),
            storage_writer=writer,
            checkpoint_id=path,
            planner=planner,
            no_dist=True,
        )
        assert equal(loaded(trained.state(), path), trained.state())
        trained.step()


# ---- overwriting ----


def test_overwritten_path_has_only_files_of_the_new_checkpoint(tmp_path):
    theirs = {"a": torch.zeros(3), "b": torch.zeros(100)}
    dcp.save(theirs, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    mine = [".metadata.0123abcd.tmp.mine", "__0_0.0123abcd.distcp.mine", "notes.txt"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".metadata.0123abcd.tmp").write_text("of a save that died")
    for number in range(2):
        state = {"a": torch.full((3,), float(number))}
        write(state, tmp_path)
        assert equal(loaded(state, tmp_path), state)
        (data,) = (name for name in files(tmp_path) if name.endswith(".distcp"))
        assert files(tmp_path) == sorted([".metadata", data, *mine])


def test_data_is_synced_before_the_rename_and_old_files_go_last(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write({"w": torch.ones(5)}, path)
    (old,) = (name for name in files(path) if name.endswith(".distcp"))
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        write({"w": torch.zeros(5)}, path)
    steps = [(call.kind, call.directory) for call in recorded.calls]
    named = steps.index(("rename", str(path)))
    assert list(recorded.calls[named].change)[1] == str(path / ".metadata")
    (kind, temporary), above, entries = steps[named - 3 : named]
    assert kind == "sync" and temporary == next(iter(recorded.calls[named].change))
    assert above == ("sync", str(tmp_path))
    # this rank syncs the entries of all data files, whichever rank made them
    assert entries == ("sync", str(path))
    assert steps[named + 1] == ("sync", str(path))
    gone = [call.change for call in recorded.calls[named + 2 :] if call.kind == "unlink"]
    assert gone == [{str(path / old): None}]
    assert all(call.kind != "unlink" for call in recorded.calls[:named])


def test_durable_false_writes_without_syncs(tmp_path, monkeypatch):
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        write({"w": torch.ones(5)}, tmp_path / "a", durable=False)
    assert recorded.synced() == []


def test_overwrite_false_refuses_an_existing_checkpoint(tmp_path):
    write({"a": torch.zeros(3)}, tmp_path)
    with pytest.raises(CheckpointException, match="Checkpoint already exists, and overwrite=False"):
        write({"a": torch.ones(3)}, tmp_path, overwrite=False)
    assert (loaded({"a": torch.ones(3)}, tmp_path)["a"] == 0).all()


def test_reused_writer_never_repeats_a_file_name(tmp_path):
    writer = FileSystemWriter(tmp_path)
    names = []
    for _ in range(2):
        dcp.save({"a": torch.zeros(3)}, storage_writer=writer, no_dist=True)
        names += [name for name in files(tmp_path) if name.endswith(".distcp")]
    assert len(set(names)) == 2


def test_unpickled_writer_uses_new_file_names(tmp_path):
    writer = FileSystemWriter(tmp_path)
    writer.stage({"a": torch.zeros(3)})  # a stager has an engine
    copies = [pickle.loads(pickle.dumps(writer)) for _ in range(2)]
    names = []
    for each in (writer, *copies):
        dcp.save({"a": torch.zeros(3)}, storage_writer=each, no_dist=True)
        names += [name for name in files(tmp_path) if name.endswith(".distcp")]
    assert len(set(names)) == 3


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "rename"])
def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_file(tmp_path, call):
    old = {"a": torch.zeros(300_000), "b": torch.zeros(300_000)}
    write(old, tmp_path)
    before = files(tmp_path)
    new = {"a": torch.ones(300_000), "b": torch.ones(300_000)}
    with (
        fault(call, err=errno.ENOSPC, sticky=True),
        pytest.raises(CheckpointException, match="No space"),
    ):
        write(new, tmp_path, single_file_per_rank=False)
    assert files(tmp_path) == before
    assert equal(loaded(old, tmp_path), old)


def test_failure_of_one_file_removes_all_files_of_the_rank(tmp_path):
    state = {"a": torch.zeros(300_000), "b": torch.zeros(300_000)}
    with (
        fault("rename", err=errno.ENOSPC, nth=2),
        pytest.raises(CheckpointException, match="No space"),
    ):
        write(state, tmp_path, single_file_per_rank=False)
    assert files(tmp_path) == []


def test_metadata_has_the_id_of_the_save(tmp_path):
    writer = FileSystemWriter(tmp_path)
    dcp.save({"a": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert dcp.FileSystemReader(tmp_path).read_metadata().version == theirs.version
    found = dcp.FileSystemReader(tmp_path).read_metadata().storage_meta
    assert found.save_id == writer.storage_meta().save_id == writer.save_id
    again = {"storage_writer": writer, "checkpoint_id": tmp_path}
    dcp.save({"a": torch.zeros(3)}, no_dist=True, **again)
    assert found.save_id != dcp.FileSystemReader(tmp_path).read_metadata().storage_meta.save_id
    assert found.save_id and found.checkpoint_id == str(tmp_path)


def test_a_save_returns_the_metadata_that_it_wrote(tmp_path):
    state = {"a": torch.arange(3.0)}
    returned = dcp.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    written = dcp.FileSystemReader(tmp_path).read_metadata()
    assert returned.storage_data == written.storage_data != {}
    assert returned.storage_meta.save_id == written.storage_meta.save_id
    assert returned.version == written.version


KILLED = """
import shutil, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from fix_entries import stepping
from stillframe import _core
from stillframe.dcp import FileSystemWriter

path = sys.argv[1]
reached = 0

def keep(step, taken):
    '''Keep a copy of the directory: what a kill at this moment would leave.'''
    global reached
    reached += 1
    shutil.copytree(path, f"{path}.{reached}")

for value in (0, 1):
    state = {"a": torch.full((1000,), float(value)), "b": torch.full((5,), float(value))}
    if value:
        _core.take_steps = stepping(keep)
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
"""


def test_kill_between_any_two_commit_steps_leaves_the_old_or_the_new_checkpoint(tmp_path):
    fixtures = os.path.dirname(fix_entries.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([fixtures, *sys.path])}
    run_python("-c", KILLED, tmp_path / "c", check=True, env=environment)
    seen = []
    moments = sorted(tmp_path.glob("c.*"), key=lambda each: int(each.suffix[1:]))
    for moment in moments:
        found = loaded({"a": torch.ones(1000), "b": torch.ones(5)}, moment)
        values = {float(value) for tensor in found.values() for value in tensor}
        assert len(values) == 1, moment
        seen += values
    assert len(seen) > 8 and seen == sorted(seen) and {*seen} == {0.0, 1.0}


# ---- what it does not do ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"_extensions": [object()]}, "FileSystemWriter"),
        ({"serialization_format": SerializationFormat.SAFETENSORS}, "FileSystemWriter"),
        ({"thread_count": 0}, "thread_count"),
        ({"thread_count": True}, "thread_count"),
    ],
)
def test_unsupported_options_are_refused_with_an_alternative(options, says):
    with pytest.raises(ValueError, match=says):
        FileSystemWriter("c", **options)
    with pytest.raises(ValueError, match="storage_options are for URLs"):
        FileSystemWriter("c", storage_options={"key": "k"})
    with pytest.raises(TypeError, match=r"stillframe\.Engine"):
        FileSystemWriter("c", engine="e")
    with pytest.raises(ValueError, match="no path to save to"):
        _ = FileSystemWriter().location


def test_rank_that_saves_alone_names_its_own_files(tmp_path):
    writer = FileSystemWriter(tmp_path)
    writer.set_up_storage_writer(True, rank=3, use_collectives=False)
    plan = writer.prepare_local_plan(SavePlan([]))
    (plan,) = writer.prepare_global_plan([plan])
    assert plan.storage_data.prefix == "__3_"
    writer.set_up_storage_writer(True, rank=3, use_collectives=True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan([]))] * 2)
    assert [each.storage_data.prefix for each in plans] == ["__0_", "__1_"]


def test_writer_accepts_paths_and_urls():
    valid = FileSystemWriter.validate_checkpoint_id
    assert all(map(valid, ("c", Path("c"), "file:///c", "s3://bucket/c")))
    assert not any(map(valid, ("", 3, "file://host/c")))


def test_writer_stages_with_its_own_engine():
    with stillframe.Engine(pool_bytes="8MiB", block_bytes="1MiB") as engine:
        tree = FileSystemWriter("c", engine=engine).stage({"w": torch.ones(3)}).result()
        assert leased(engine) > 0 and tree["w"].tolist() == [1.0] * 3
        del tree


def test_positional_arguments_have_pytorchs_order(tmp_path):
    writer = FileSystemWriter(tmp_path / "c", True, False, 2, 10, True, True)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    again = pickle.loads(pickle.dumps(writer))
    dcp.save({"a": torch.ones(3)}, storage_writer=again, no_dist=True)


# ---- reading ----


@pytest.mark.parametrize("writer", [FileSystemWriter, dcp.FileSystemWriter])
def test_reader_finds_a_flipped_bit_before_changing_the_state(tmp_path, writer):
    state = {"a": torch.full((100_000,), 5.0), "b": torch.zeros(10)}
    dcp.save(state, storage_writer=writer(tmp_path), no_dist=True)
    assert equal(loaded(state, tmp_path, storage_reader=Reader(tmp_path)), state)
    (data,) = (tmp_path / name for name in files(tmp_path) if name.endswith(".distcp"))
    raw = bytearray(data.read_bytes())
    raw[raw.find(state["a"].numpy().tobytes()) + 100_001] ^= 1
    data.write_bytes(raw)
    target = {"a": torch.zeros(100_000), "b": torch.ones(10)}
    with pytest.raises(CheckpointException, match=r"a is damaged.*do not match their CRC"):
        dcp.load(target, storage_reader=Reader(tmp_path), no_dist=True)
    assert (target["b"] == 1).all() and (target["a"] == 0).all()
    dcp.load(target, storage_reader=Reader(tmp_path, verify=False), no_dist=True)


@pytest.mark.parametrize(("cut", "says"), [(None, "is missing"), (40_000, "the file ends at")])
def test_reader_names_a_truncated_or_missing_file(tmp_path, cut, says):
    state = {"a": torch.full((100_000,), 5.0)}
    write(state, tmp_path)
    (data,) = (tmp_path / name for name in files(tmp_path) if name.endswith(".distcp"))
    if cut is None:
        data.unlink()
    else:
        os.truncate(data, cut)
    with pytest.raises(CheckpointException, match=says):
        loaded(state, tmp_path, storage_reader=Reader(tmp_path))


def test_save_needs_little_memory_besides_its_copy(tmp_path):
    # 24 MiB, and no tensor is written in place
    state = {str(i): torch.ones(32 << 10) for i in range(192)}
    with stillframe.Engine(pool_bytes="64MiB", block_bytes="16MiB", writer_threads=2) as engine:
        report = stillframe.dcp.save(state, tmp_path / "a", no_dist=True, engine=engine)
    assert report.peak_pool_bytes < (24 << 20) + (16 << 20)  # buffers are smaller than a block


@pytest.mark.parametrize("save", [write, lambda *given: stillframe.dcp.save(*given, no_dist=True)])
def test_meta_tensor_is_refused_by_name(tmp_path, save):
    state = {"a": torch.ones(3), "deep": {"w": torch.empty(4, device="meta")}}
    with pytest.raises(CheckpointException, match=r"deep\.w is on the meta device"):
        save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists() or files(tmp_path / "c") == []


# Besides the copy: three buffers of 4 MiB, plans and metadata, and what a first save uses of
# libraries. 22 MiB were measured.
FIXED = 24 << 20


def test_first_save_takes_the_state_once_plus_a_fixed_amount(tmp_path):
    state = {str(i): torch.ones(64 << 10) for i in range(256)}  # 64 MiB
    peak = peak_of(lambda: stillframe.dcp.save(state, tmp_path / "a", no_dist=True))
    assert 64 << 20 <= peak <= (64 << 20) + FIXED
