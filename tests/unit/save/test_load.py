"""stillframe.load: complete files load as with torch.load, others are refused with the reason."""

import errno
import gc
import os
import pathlib
import pickle
import signal
import sys
import time
import warnings
import zipfile
from typing import ClassVar

import pytest
import stillframe
import torch
from fix_checkpoints import (
    WRITERS,
    by_path,
    by_stillframe,
    flip,
    offset_of_storage,
    pack,
    same,
    saving,
    small_state,
    sparse,
    unprivileged,
)
from stillframe import CorruptCheckpointError, _core, testing
from stillframe._load import restore
from torch.utils.serialization import config


class NotAllowed:
    """A class that weights_only refuses."""


def refuse(number):
    Refused.calls.append(number)
    raise pickle.UnpicklingError("not so")


class Refused:
    calls: ClassVar = []

    def __reduce__(self):
        return refuse, (1,)


pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


def whole(path):
    """Check the file's structure and CRCs; return the result of _core.check."""
    with open(path, "rb") as file:
        return _core.check(file.fileno(), True)


# ---- complete files ----------------------------------------------------------------


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])  # torch itself cannot load protocol 0
def test_the_legacy_format_is_loaded_in_every_pickle_protocol(protocol, tmp_path):
    path = tmp_path / "x.pt"
    torch.save(small_state(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    loaded = stillframe.load(path, weights_only=False, verify=True)
    assert same(loaded, small_state())


def test_many_small_records_are_loaded(tmp_path):
    state = {str(i): torch.full((i % 5,), i) for i in range(3000)}
    torch.save(state, tmp_path / "x.pt")
    loaded = stillframe.load(tmp_path / "x.pt", verify=True)
    assert all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.product_limits
def test_more_than_65535_records_are_loaded(tmp_path):
    torch.save([torch.empty(0) for _ in range(66_000)], tmp_path / "x.pt")
    found = whole(tmp_path / "x.pt")
    assert found["ok"], found["error"]
    assert found["num_records"] == 66_006


@pytest.mark.product_limits
def test_records_past_4_gib_are_loaded(tmp_path):
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():
        big = torch.empty((4 << 30) + 8, dtype=torch.uint8)
        torch.save([torch.ones(3), big, torch.ones(4), torch.empty(0)], path)
    with open(path, "rb") as file:
        found = _core.check(file.fileno(), False)
    assert found["ok"], found["error"]
    assert found["nbytes"] == os.path.getsize(path) > 4 << 30
    assert found["num_unchecked"] == 3  # skip_data leaves the CRCs out


def test_torchscript_archive_passes_the_check_and_is_left_to_torch(tmp_path):
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 3)).save(str(path))
        assert whole(path)["ok"]
        with pytest.raises(RuntimeError, match="TorchScript"):
            stillframe.load(path)
        module = stillframe.load(path, weights_only=False, verify=True)
    assert module(torch.ones(2)).shape == (3,)


def test_a_checkpoint_of_an_old_torch_without_byteorder_is_loaded(tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    newer = ("byteorder", ".format_version", ".storage_alignment")
    pack(tmp_path / "x.pt", tmp_path / "y.pt", without=newer)
    assert same(stillframe.load(tmp_path / "y.pt"), small_state())


@pytest.mark.parametrize("weights_only", [True, False])
def test_checkpoint_of_the_other_byte_order_is_loaded(tmp_path, monkeypatch, weights_only):
    state = {"w": torch.arange(1000.0), "n": torch.arange(9, dtype=torch.int16)}
    turned = {
        name: each.view(torch.uint8).view(-1, each.itemsize).flip(1).flatten().view(each.dtype)
        for name, each in state.items()
    }
    with monkeypatch.context() as there:
        there.setattr(sys, "byteorder", "big")
        torch.save(turned, tmp_path / "x.pt")
    loaded = stillframe.load(tmp_path / "x.pt", weights_only=weights_only)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    into = {name: torch.zeros_like(each) for name, each in state.items()}
    stillframe.load(tmp_path / "x.pt", weights_only=weights_only, into=into)
    assert all(torch.equal(into[name], state[name]) for name in state)


# ---- which way a load takes ---------------------------------------------------------


@pytest.fixture
def ways(caplog):
    """Return a function that loads a path by `stillframe.load`, and returns the object and the
    reason for using torch.load, if it did."""
    caplog.set_level("DEBUG", "stillframe")

    def load(path, *args, **kwargs):
        caplog.clear()
        loaded = stillframe.load(path, *args, **kwargs)
        reasons = [record.args[1] for record in caplog.records if "goes to torch" in record.msg]
        return loaded, reasons[0] if reasons else None

    return load


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("write", WRITERS)
def test_file_of_any_writer_is_loaded_and_by_threads_if_it_is_a_zip(write, verify, ways, tmp_path):
    path = tmp_path / "x.pt"
    write(small_state(), path)
    loaded, why = ways(path, verify=verify)
    assert same(loaded, small_state())
    assert (why is None) == (path.read_bytes()[:2] == b"PK"), why


@pytest.mark.parametrize("alignment", [1, 16, 64, 512, 4096, 32768])
def test_file_of_any_storage_alignment_is_whole_and_read_by_threads(alignment, ways, tmp_path):
    with saving(storage_alignment=alignment):
        torch.save(small_state(), tmp_path / "x.pt")
    found = whole(tmp_path / "x.pt")
    assert (found["ok"], found["num_unchecked"]) == (True, 0), found["error"]
    loaded, why = ways(tmp_path / "x.pt")
    assert why is None
    assert same(loaded, small_state())


def test_archive_of_another_program_is_left_to_torch_and_checked(ways, tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    pack(tmp_path / "x.pt", tmp_path / "y.pt")
    loaded, why = ways(tmp_path / "y.pt")
    assert same(loaded, small_state())
    assert why == "another program packed it"
    flip(tmp_path / "y.pt", offset_of_storage(tmp_path / "y.pt") + 1000)
    with pytest.raises(CorruptCheckpointError, match="CRC"):
        stillframe.load(tmp_path / "y.pt")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of the variable
@pytest.mark.parametrize(
    "name", ["TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
)
def test_environment_variables_are_left_to_torch_load(name, ways, tmp_path, monkeypatch):
    torch.save({"x": NotAllowed()}, tmp_path / "x.pt")
    monkeypatch.setenv(name, "1")
    torch.save(small_state(), tmp_path / "y.pt")
    assert ways(tmp_path / "y.pt")[1] == "the environment tells torch.load what to trust"
    for weights_only in (False, True, None):
        try:
            torch.load(tmp_path / "x.pt", weights_only=weights_only)
            expected = None
        except Exception as error:
            expected = str(error)
        try:
            stillframe.load(tmp_path / "x.pt", weights_only=weights_only)
            assert expected is None
        except pickle.UnpicklingError as error:
            assert str(error) == expected


@pytest.mark.parametrize("where", ["meta", torch.device("meta")])
def test_no_byte_is_read_for_empty_tensors(where, ways, tmp_path):
    by_stillframe(small_state(), tmp_path / "x.pt")
    loaded, why = ways(tmp_path / "x.pt", where)
    assert loaded["weight"].is_meta and why == "no storage is asked for"


def test_two_tensors_over_a_storage_without_bytes_are_loaded(ways, tmp_path):
    """torch requests such a storage every time."""
    empty = torch.empty(0)
    by_path({"a": empty, "b": empty.view(0, 3), "c": torch.ones(2)}, tmp_path / "x.pt")
    loaded, why = ways(tmp_path / "x.pt")
    assert why is None
    assert [tuple(each.shape) for each in loaded.values()] == [(0,), (0, 3), (2,)]


def test_unknown_format_version_is_left_to_torch(tmp_path):
    path = tmp_path / "x.pt"
    by_path(small_state(), path)
    with zipfile.ZipFile(path) as file:
        (record,) = [each for each in file.infolist() if each.filename.endswith("/version")]
        version = file.read(record)
    data = bytearray(path.read_bytes())
    at = data.index(version, record.header_offset + 30 + len(record.filename))
    data[at : at + len(version)] = b"99"
    path.write_bytes(data)
    with pytest.raises(RuntimeError) as theirs:
        torch.load(path)
    with pytest.raises(RuntimeError) as ours:
        stillframe.load(path, verify=False)
    assert "version" in str(theirs.value) and "version" in str(ours.value)


def test_tensors_own_memory_that_can_be_resized(tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    storage = stillframe.load(tmp_path / "x.pt")["weight"].untyped_storage()
    assert storage.resizable()
    storage.resize_(1 << 20)
    assert storage.nbytes() == 1 << 20


class Curious:
    """An object that reads its tensor while it is unpickled."""

    seen: ClassVar[list] = []

    def __init__(self, tensor):
        self.tensor = tensor

    def __setstate__(self, state):
        self.__dict__.update(state)
        Curious.seen.append(self.tensor.clone())


@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_code_in_a_pickle_sees_only_checked_bytes(write, tmp_path):
    path = tmp_path / "x.pt"
    tensors = [torch.randn(n) for n in (3, 400_000, 0, 70_000, 5)]
    write([Curious(tensor) for tensor in tensors], path)
    Curious.seen.clear()
    stillframe.load(path, weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(Curious.seen, tensors, strict=True))
    data = path.read_bytes()
    at = data.index(tensors[3].numpy().tobytes())
    flip(path, at + 100_000)
    Curious.seen.clear()
    with pytest.raises(CorruptCheckpointError, match="CRC"):
        stillframe.load(path, weights_only=False)
    assert len(Curious.seen) <= 3
    assert all(torch.equal(a, b) for a, b in zip(Curious.seen, tensors, strict=False))


def test_record_of_another_length_is_left_to_torch(tmp_path):
    tensor = torch.empty(0, dtype=torch.float32)
    tensor.untyped_storage().resize_(43)
    tensor.set_(tensor.untyped_storage(), 0, (10,))
    tensor.fill_(2.0)
    torch.save(tensor, tmp_path / "x.pt")
    with pytest.raises(RuntimeError) as theirs:
        torch.load(tmp_path / "x.pt")
    with pytest.raises(RuntimeError) as ours:
        stillframe.load(tmp_path / "x.pt")
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("nbytes", [0, 12])
@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_a_tensor_that_was_freed_when_it_was_saved_is_refused_by_name(write, nbytes, tmp_path):
    """torch.load refuses it too: the bytes by which its storage would grow are undefined."""
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(nbytes)
    path = tmp_path / "x.pt"
    write({"other": torch.ones(3), "w": [tensor]}, path)
    for how in ({}, {"weights_only": False}, {"map_location": lambda storage, _: storage}):
        with pytest.raises(RuntimeError):
            torch.load(path, **how)
        with pytest.raises(RuntimeError, match=r"x\.pt cannot be loaded: .* in it: w\.0; its mem"):
            stillframe.load(path, **how)
    write([tensor[:3], torch.ones(2), torch.empty(0)] if nbytes else [torch.empty(3, 0)], path)
    assert [each.tolist() for each in stillframe.load(path)] == [
        each.tolist() for each in torch.load(path)
    ]


# ---- torch.load's own behaviour and errors --------------------------------------------


def test_map_location_behaves_as_in_torch_load(tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    assert stillframe.load(tmp_path / "x.pt", "meta")["weight"].is_meta
    seen = []

    def where(storage, location):
        seen.append(location)
        return storage

    stillframe.load(tmp_path / "x.pt", map_location=where)
    assert set(seen) == {"cpu"}


def test_weights_only_refusal_is_torch_loads_error(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": NotAllowed()}, path)
    with pytest.raises(Exception) as theirs:
        torch.load(path)
    for refusing in (True, None):  # None is torch.load's own default
        with pytest.raises(type(theirs.value)) as ours:
            stillframe.load(path, weights_only=refusing)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(type(theirs.value)):
        stillframe.load(path, weights_only=None, into={})
    assert isinstance(stillframe.load(path, weights_only=False)["x"], NotAllowed)


def test_code_in_a_pickle_that_raises_runs_once(tmp_path):
    """torch.load is called again only after weights_only has refused something."""
    path = tmp_path / "x.pt"
    torch.save({"x": Refused()}, path)
    Refused.calls.clear()
    with pytest.raises(pickle.UnpicklingError, match="not so"):
        stillframe.load(path, weights_only=False)
    assert Refused.calls == [1]


def test_tensors_own_their_memory_in_every_configuration_of_torch(tmp_path):
    path = tmp_path / "x.pt"
    by_path(small_state(), path)
    config.load.mmap = True
    try:
        loaded = stillframe.load(path)
    finally:
        config.load.mmap = False
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))
        file.truncate(10)
    assert same(loaded, small_state())


# ---- incomplete and foreign files ------------------------------------------------------


@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_every_truncated_file_is_refused(write, tmp_path):
    path = tmp_path / "x.pt"
    write(small_state(), path)
    size = os.path.getsize(path)
    for nbytes in [0, 1, 2, 3, 4, 21, 22, 97, 98, *range(100, size, 97), size - 22, size - 1]:
        os.truncate(path, nbytes)
        with pytest.raises(CorruptCheckpointError, match=r"empty|truncated") as error:
            stillframe.load(path)
        assert str(path) in str(error.value)
        write(small_state(), path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 5000,
        b"hello, world\n" * 100,
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        b"PK\3\4",
        b"PK\5\6" + bytes(18),
        b"\x80\x04K\x01.",  # a pickle that torch did not write
    ],
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_foreign_files_are_refused_before_anything_is_unpickled(content, weights_only, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"x\.pt cannot be loaded: it "):
        stillframe.load(path, weights_only=weights_only)


def test_a_zip_file_of_something_else_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("word/document.xml", "<x/>")
    with pytest.raises(CorruptCheckpointError, match=r"no record data\.pkl"):
        stillframe.load(tmp_path / "x.pt")


@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_a_wrong_byte_of_a_tensor_is_found(write, tmp_path):
    path = tmp_path / "x.pt"
    write(small_state(), path)
    flip(path, offset_of_storage(path) + 1000)
    with pytest.raises(CorruptCheckpointError, match=r"record \w+/data/0: .* CRC") as error:
        stillframe.load(path)
    assert str(path) in str(error.value)
    # The message has the offset and the names of the lost tensors.
    assert f"at byte {offset_of_storage(path)}: weight, view" in str(error.value)
    # Without `verify` only the structure is checked.
    loaded = stillframe.load(path, verify=False)
    assert not torch.equal(loaded["weight"], small_state()["weight"])


@pytest.mark.parametrize(("nr", "named"), [(3, ": a, b, c)"), (4, ": a, b, c and others)")])
def test_three_tensors_of_a_damaged_record_are_named(nr, named, tmp_path):
    path = tmp_path / "x.pt"
    all_of_it = torch.ones(100)
    torch.save({name: all_of_it[at:] for at, name in enumerate("abcd"[:nr])}, path)
    flip(path, offset_of_storage(path, "a") + 10)
    with pytest.raises(CorruptCheckpointError) as error:
        stillframe.load(path)
    assert named in str(error.value)


def test_several_damaged_records_are_counted(tmp_path):
    path = tmp_path / "x.pt"
    torch.save([torch.ones(100), torch.ones(200), torch.ones(300)], path)
    data = bytearray(path.read_bytes())
    for record in (b"data/0", b"data/1", b"data/2"):
        data[data.index(record) + 200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"data/0: .*\(and 2 more records\)"):
        stillframe.load(path, verify=True)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_damaged_header_is_found_even_without_verify(write, long, tmp_path):
    """This holds whether headers are read before the load or after it."""
    path = tmp_path / "x.pt"
    state = {**small_state(), "long": torch.arange(3e5 if long else 3.0)}
    write(state, path)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        begins = [(info.header_offset, 30 + len(info.filename)) for info in file.infolist()]
    headers = [begin + at for begin, length in begins for at in range(length)]
    found = loaded = 0
    for at in headers:
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with open(path, "rb") as file:
            whole = _core.check(file.fileno(), False)["ok"]
            headers = _core.check(file.fileno(), False, later=True)["headers"]
            assert headers != long or at < 4  # a damaged magic number means that it is no archive
            # Damage outside the directory is not found there.
            assert _core.check(file.fileno(), False, directory=True)["ok"] or at < 4
        if whole:
            assert same(stillframe.load(path), state), at
            loaded += 1
        else:
            with pytest.raises(CorruptCheckpointError, match=r"x\.pt cannot be loaded: "):
                stillframe.load(path)
            found += 1
    assert found > loaded > 0


@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_a_flipped_bit_is_found_or_changes_nothing_that_is_loaded(write, tmp_path):
    path = tmp_path / "x.pt"
    write(small_state(), path)
    good = path.read_bytes()
    directory = good.index(b"PK\1\2")
    nr_found = 0
    with open(path, "r+b", buffering=0) as file:
        for at in range(len(good)):
            # torch reads some bits of the directory that seem unused, so all of them are tried.
            for bit in range(8) if at >= directory else [at % 8]:
                os.pwrite(file.fileno(), bytes([good[at] ^ 1 << bit]), at)
                if _core.check(file.fileno(), True)["ok"]:
                    assert same(torch.load(path), small_state()), (at, bit)
                else:
                    nr_found += 1
            os.pwrite(file.fileno(), good[at : at + 1], at)
    # All bytes but padding: the headers, the pickle, 2,400 bytes of weights.
    assert nr_found > 3500 + 8 * 300


# ---- paths -------------------------------------------------------------------------------


def test_missing_file_raises_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        stillframe.load(tmp_path / "x.pt")
    assert error.value.filename == str(tmp_path / "x.pt")


def test_directory_raises_is_a_directory_error(tmp_path):
    with pytest.raises(IsADirectoryError) as error:
        stillframe.load(tmp_path)
    assert error.value.filename == str(tmp_path)
    (tmp_path / ".metadata").touch()
    with pytest.raises(IsADirectoryError, match=r"torch.distributed.checkpoint.load loads it"):
        stillframe.load(tmp_path)


def test_unreadable_file_raises_permission_error(tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    os.chmod(tmp_path / "x.pt", 0)
    with unprivileged(), pytest.raises(PermissionError) as error:
        stillframe.load(tmp_path / "x.pt")
    assert error.value.filename == str(tmp_path / "x.pt")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(CorruptCheckpointError, match="looks like a named pipe"):
        stillframe.load(tmp_path / "x.pt")
    with pytest.raises(CorruptCheckpointError, match="looks like a device"):
        stillframe.load("/dev/null")


def test_empty_path_raises_value_error():
    with pytest.raises(ValueError, match="path"):
        stillframe.load("")


def test_options_of_a_store_are_refused_for_local_paths(tmp_path):
    with pytest.raises(ValueError, match="storage_options= is for URLs"):
        stillframe.load(tmp_path / "x.pt", storage_options={"key": "x"})


def test_file_url_is_a_local_path(tmp_path):
    by_path(small_state(), tmp_path / "x 1.pt")
    assert same(stillframe.load(f"file://{tmp_path}/x%201.pt"), small_state())


@pytest.mark.parametrize("path", [b"x.pt", 3, None])
def test_invalid_path_raises_type_error(path):
    with pytest.raises(TypeError, match="path"):
        stillframe.load(path)


def test_every_kind_of_path_is_accepted(tmp_path, monkeypatch):
    name = "krüge \N{SNOWMAN}.pt"
    by_path(small_state(), tmp_path / name)
    os.symlink(name, tmp_path / "link.pt")
    monkeypatch.chdir(tmp_path)
    for path in (name, pathlib.Path(name), str(tmp_path / name), tmp_path / "link.pt", "link.pt"):
        assert same(stillframe.load(path), small_state())


# ---- changes during a load ---------------------------------------------------------------


def test_file_replaced_after_its_check_is_loaded_as_checked(tmp_path, monkeypatch):
    path, other = tmp_path / "x.pt", tmp_path / "other"
    by_path(small_state(), path)
    other.write_bytes(b"something else")
    read = restore.Archive.load

    def replace_before(*args):
        os.replace(other, path)
        return read(*args)

    monkeypatch.setattr(restore.Archive, "load", replace_before)
    assert same(stillframe.load(path), small_state())
    assert path.read_bytes() == b"something else"


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_off_during_a_load_and_restored(tmp_path, monkeypatch, was_on):
    by_path(small_state(), tmp_path / "x.pt")
    seen = []

    def read(*_):
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise RuntimeError("as torch does")

    monkeypatch.setattr(restore.Archive, "load", read)
    try:
        if not was_on:
            gc.disable()
        stillframe.load(tmp_path / "x.pt")
        assert gc.isenabled() == was_on
        with pytest.raises(RuntimeError, match="as torch does"):
            stillframe.load(tmp_path / "x.pt")
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
    assert seen == [False, False]


def test_signal_interrupts_a_check_within_a_second(tmp_path):
    sparse(tmp_path / "x.pt", 8 << 30)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.process_time()  # does not count the time of other processes
        with pytest.raises(KeyboardInterrupt):
            stillframe.load(tmp_path / "x.pt", verify=True)
        assert time.process_time() - start < 1.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.product_limits
def test_progress_reaches_the_end_and_its_errors_are_raised(tmp_path):
    def stop(done, total):
        raise RuntimeError("enough")

    sparse(tmp_path / "x.pt", 3 << 30)  # a check outlasts a slice if it reads the disk
    seen = []
    with open(tmp_path / "x.pt", "rb") as file:
        with pytest.raises(RuntimeError, match="enough"):
            _core.check(file.fileno(), True, stop)
        found = _core.check(file.fileno(), True, lambda *now: seen.append(now))
    assert found["ok"]
    assert seen == sorted(seen)
    assert seen and all(done <= found["nbytes"] == total for done, total in seen)


def nr_threads():
    return len(os.listdir("/proc/self/task"))


def large(path):
    stillframe.save({str(i): torch.full((300_000,), float(i)) for i in range(8)}, path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOMEM])
def test_disk_error_names_record_and_offset_and_leaves_no_thread(number, tmp_path):
    path = tmp_path / "x.pt"
    large(path)
    stillframe.load(path)
    before = nr_threads()
    with testing.fault("pread", nth=12, sticky=True, err=number), pytest.raises(OSError) as error:
        stillframe.load(path)
    assert error.value.errno == number
    assert error.value.filename == str(path)
    assert "record " in str(error.value) and "at byte " in str(error.value)
    assert nr_threads() == before
    assert stillframe.load(path)["7"][-1] == 7


def test_file_truncated_during_a_read_is_corrupt(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    large(path)
    read = restore.Archive.load

    def cut_before(*args):
        os.truncate(path, os.path.getsize(path) // 2)
        return read(*args)

    monkeypatch.setattr(restore.Archive, "load", cut_before)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        stillframe.load(path)


def test_an_interrupt_leaves_no_thread_and_the_next_load_works(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    large(path)
    before = nr_threads()
    take = restore.Archive._take

    def interrupted(self, name):
        if name == "data/3":
            raise KeyboardInterrupt
        return take(self, name)

    with monkeypatch.context() as patch, testing.slow("pread", 0.01):
        patch.setattr(restore.Archive, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stillframe.load(path)
        assert nr_threads() == before
    assert stillframe.load(path)["7"][-1] == 7


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize(("call", "nth"), [("open", 1), ("pread", 1), ("pread", 2)])
def test_system_error_in_a_load_is_an_os_error_with_the_path(call, nth, number, tmp_path):
    path = tmp_path / "x.pt"
    by_path(small_state(), path)
    with testing.fault(call, nth=nth, err=number), pytest.raises(OSError) as error:
        stillframe.load(path)
    assert (error.value.errno, error.value.filename) == (number, str(path))
    assert not isinstance(error.value, CorruptCheckpointError)
    assert same(stillframe.load(path), small_state())


def test_an_interrupted_open_is_tried_again(tmp_path):
    path = tmp_path / "x.pt"
    by_path(small_state(), path)
    with testing.fault("open", nth=1, err=errno.EINTR):
        assert same(stillframe.load(path), small_state())


def test_check_without_memory_raises_memory_error(tmp_path):
    path = tmp_path / "x.pt"
    by_path(small_state(), path)
    for call, nth in (("calloc", 1), ("malloc", 1), ("malloc", 2), ("realloc", 1)):
        with (
            open(path, "rb") as file,
            testing.fault(call, nth=nth, sticky=True, err=errno.ENOMEM),
            pytest.raises(MemoryError),
        ):
            _core.check(file.fileno(), True)
