"""`load` of a URL gives what `load` of the file gives."""

from __future__ import annotations

import errno
import os

import fix_flat
import pytest
import stillframe
import torch
from fix_buckets import fetchers
from fix_checkpoints import (
    WRITERS,
    by_path,
    by_stillframe,
    flip,
    legacy,
    offset_of_storage,
    pack,
    same,
    small_state,
)
from fix_waits import eventually
from safetensors.torch import save_file
from stillframe._remote import file as remote_file
from stillframe._remote.store import Store
from stillframe.errors import CorruptCheckpointError
from torch import nn


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert eventually(lambda: not fetchers())
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd)]
    assert not [name for name in names if "stillframe-remote" in name]


def exists(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def numbers(count=200_000):
    return {f"w{i}": torch.arange(i, i + count, dtype=torch.float32) for i in range(5)}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ---- every kind of file ----------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
def test_object_of_every_writer_loads(write, bucket, tmp_path):
    url = bucket.made_by(write, small_state(), tmp_path)
    assert same(stillframe.load(url), small_state())
    assert same(stillframe.load(url, "cpu", verify=False, shared=True), small_state())
    assert stillframe.load(url, "meta")["weight"].is_meta


def test_map_location_may_be_a_function(bucket, tmp_path):
    asked = []

    def place(storage, location):
        asked.append(location)
        return storage

    url = bucket.made_by(by_path, small_state(), tmp_path)
    assert same(stillframe.load(url, place), small_state())
    assert set(asked) == {"cpu"}


def test_pickle_that_runs_code_needs_weights_only_false(bucket, tmp_path):
    url = bucket.made_by(by_path, {"x": tmp_path}, tmp_path)
    with pytest.raises(Exception, match="weights_only"):
        stillframe.load(url)
    assert stillframe.load(url, weights_only=False) == {"x": tmp_path}


@pytest.mark.parametrize("verify", [False, True])
def test_mapped_tensors_outlive_the_load(verify, bucket, tmp_path):
    url = bucket.made_by(by_path, small_state(), tmp_path)
    loaded = stillframe.load(url, mmap=True, verify=verify)
    bucket.put("run/x.pt", b"other")
    assert same(loaded, small_state())
    loaded["weight"][0] = 7
    assert loaded["tied"][0, 0] == 7


def test_load_of_a_url_fills_module_and_optimizer(bucket, tmp_path):
    def training(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "epoch": seed}

    theirs, ours = training(1), training(2)
    state = {name: getattr(part, "state_dict", lambda: 1)() for name, part in theirs.items()}
    url = bucket.made_by(by_stillframe, state, tmp_path)
    weight = ours["model"][0].weight
    assert stillframe.load(url, into=ours) is ours
    assert ours["model"][0].weight is weight
    assert equal(ours["model"].state_dict(), theirs["model"].state_dict())
    theirs_of_weight = theirs["optimizer"].state[theirs["model"][0].weight]
    assert equal(ours["optimizer"].state[weight], theirs_of_weight)
    assert ours["epoch"] == 1


def test_file_of_another_program_loads(bucket, tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    url = bucket.upload(pack(tmp_path / "x.pt", tmp_path / "packed.pt"), "packed.pt")
    assert same(stillframe.load(url), small_state())
    with pytest.raises(ValueError, match="another program packed it"):
        stillframe.load(url, mmap=True)


@pytest.mark.parametrize("mmap", [False, True])
def test_safetensors_file_loads(mmap, bucket, tmp_path):
    state = fix_flat.random_tensors(4)
    save_file(state, tmp_path / "model.safetensors")
    url = bucket.upload(tmp_path / "model.safetensors", "model")  # recognised by its bytes
    assert_alike(stillframe.load(url, mmap=mmap), state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stillframe.load(url, into=target)
    assert_alike(target, state)


def assert_alike(loaded, state):
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bytes(loaded[name].untyped_storage()) == bytes(tensor.untyped_storage())


def index(bucket, tmp_path, shards=4):
    """Make an index of several files; return its URL and the tensors."""
    state = {f"w{i}": torch.arange(i, i + 3000) for i in range(2 * shards)}
    names = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: state[key] for key in (f"w{2 * i}", f"w{2 * i + 1}")}
        save_file(part, tmp_path / name)
        bucket.upload(tmp_path / name, f"hf/{name}")
        names |= dict.fromkeys(part, name)
    text = str({"metadata": {}, "weight_map": names}).replace("'", '"')
    return bucket.put("hf/model.safetensors.index.json", text.encode()), state


@pytest.mark.parametrize("mmap", [False, True])
def test_index_of_safetensors_files_loads(mmap, bucket, tmp_path):
    url, state = index(bucket, tmp_path)
    assert equal(stillframe.load(url, mmap=mmap), state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stillframe.load(url, into=target)
    assert equal(target, state)


def test_index_with_a_missing_file_is_damaged(memory, tmp_path):
    url, _ = index(memory, tmp_path)
    memory.fs.rm_file(f"{url[8:].rpartition('/')[0]}/model-00002-of-00004.safetensors")
    with pytest.raises(CorruptCheckpointError, match="missing next to it: model-00002"):
        stillframe.load(url)


# ---- damage and errors -----------------------------------------------------------------------


def test_damaged_bytes_are_named_with_tensor_and_url(bucket, tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    flip(tmp_path / "x.pt", offset_of_storage(tmp_path / "x.pt"))
    url = bucket.upload(tmp_path / "x.pt")
    with pytest.raises(CorruptCheckpointError, match=r"data/0: its bytes.*weight") as error:
        stillframe.load(url)
    assert str(error.value).startswith(url)


@pytest.mark.parametrize("write", [by_path, legacy])
def test_truncated_object_is_damaged(write, bucket, tmp_path):
    write(small_state(), tmp_path / "x.pt")
    url = bucket.put("x.pt", (tmp_path / "x.pt").read_bytes()[:-300])
    with pytest.raises(Exception, match=r"truncated|ran out|unexpected|EOF|end of"):
        stillframe.load(url)


@pytest.mark.parametrize("data", [b"", b"not a checkpoint"])
def test_object_that_is_no_checkpoint_is_refused(data, bucket):
    with pytest.raises(CorruptCheckpointError, match=bucket.url("x.pt")):
        stillframe.load(bucket.put("x.pt", data))


def test_missing_object_raises_file_not_found_error(bucket):
    with pytest.raises(FileNotFoundError) as error:
        stillframe.load(bucket.url("run/none.pt"))
    assert error.value.filename == bucket.url("run/none.pt")
    bucket.put("run/none.pt/below", b"x")
    with pytest.raises(FileNotFoundError):
        stillframe.load(bucket.url("run/none.pt"))


def test_failed_requests_are_tried_again(server, tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    server.put("x.pt", (tmp_path / "x.pt").read_bytes())
    server.fail(500, times=2, match="GET")
    assert same(stillframe.load(server.url("x.pt")), small_state())
    server.cut_answer(100, times=2, match="GET")
    assert same(stillframe.load(server.url("x.pt")), small_state())


@pytest.mark.parametrize("how", ["fail", "cut", "refuse"])
def test_store_that_stays_down_is_an_os_error_with_url_range_and_cause(how, server, tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    server.put("x.pt", (tmp_path / "x.pt").read_bytes())
    if how == "fail":
        server.fail(500, match="GET")
    elif how == "cut":
        server.cut_answer(100, match="GET")
    else:
        server.fail(403, match="GET")
    with pytest.raises(OSError, match="reading bytes 0 to ") as error:
        stillframe.load(server.url("x.pt"))
    assert not isinstance(error.value, CorruptCheckpointError)
    assert error.value.filename == server.url("x.pt")
    assert isinstance(error.value, PermissionError) == (how == "refuse")
    assert error.value.__cause__ is None and error.value.__suppress_context__


@pytest.mark.product_limits
def test_failure_in_the_middle_says_that_targets_are_half_written(memory, tmp_path, monkeypatch):
    url = memory.made_by(by_path, numbers(), tmp_path)
    get = Store.get

    def failing(self, key, start, end, version=""):
        if 2 << 20 < start < 3 << 20:
            raise OSError(errno.ECONNRESET, "reading failed: the test said so", url)
        return get(self, key, start, end, version)

    monkeypatch.setattr(Store, "get", failing)
    target = {name: torch.zeros_like(tensor) for name, tensor in numbers().items()}
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", 64 << 10)
    with pytest.raises(OSError, match="the test said so") as error:
        stillframe.load(url, into=target)
    assert (error.value.errno, error.value.filename) == (errno.ECONNRESET, url)
    assert "what into= names is half written" in error.value.__notes__[0]


@pytest.mark.product_limits
def test_object_that_is_replaced_is_an_error_and_no_mixture(bucket, tmp_path, monkeypatch):
    old, new = numbers(), {name: -tensor for name, tensor in numbers().items()}
    by_path(new, tmp_path / "new.pt")
    url = bucket.made_by(by_path, old, tmp_path)
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", 64 << 10)
    count = []
    get = Store.get

    def replacing(self, key, start, end, version=""):
        count.append(start)
        if len(count) == 10:
            bucket.upload(tmp_path / "new.pt", "run/x.pt")
        return get(self, key, start, end, version)

    monkeypatch.setattr(Store, "get", replacing)
    with pytest.raises(OSError, match="replaced") as error:
        stillframe.load(url)
    assert (error.value.errno, error.value.filename) == (errno.ESTALE, url)
    assert equal(stillframe.load(url), new)


def test_credentials_are_in_no_message(server):
    server.put("x.pt", b"PK\3\4")
    server.fail(403)
    options = {**server.options, "secret": "dont/ShowThisOne123"}
    with pytest.raises(PermissionError) as error:
        stillframe.load(server.url("x.pt"), storage_options=options)
    assert "dont/Show" not in repr(error.value) + str(error.value)


def test_storage_options_of_a_load_reach_the_store(server, tmp_path, monkeypatch):
    by_path(small_state(), tmp_path / "x.pt")
    server.put("x.pt", (tmp_path / "x.pt").read_bytes())
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert same(stillframe.load(server.url("x.pt"), storage_options=server.options), small_state())
