"""Loads to a device: the bytes, their order, and the state after a failure."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import stillframe
import torch
from fix_loads import file as file
from fix_loads import nothing_is_left as nothing_is_left
from fix_loads import stream as stream
from safetensors.torch import save_file
from stillframe._load import restore

COPY, BATCH = "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2"
# Elements of float32, of tensors shorter than a chunk of a read (1 MiB) and of several chunks.
LENGTHS = (0, 1, 1023, 1 << 18, (3 << 18) + 5, 64)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = {f"t{i}": torch.randn(n, generator=generator) for i, n in enumerate(LENGTHS)}
    return {**tensors, "view": tensors["t4"][10:20], "transposed": torch.randn(3, 5).t()}


def assert_same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
    assert found["view"].data_ptr() == found["t4"].data_ptr() + 40


@pytest.mark.parametrize("where", [None, "cuda", torch.device("cuda:0"), {"cpu": "cuda:0"}])
@pytest.mark.parametrize("verify", [True, False])
def test_load_to_a_device_copies_each_byte_once(where, verify, file, state, fake):
    # Without a GPU, torch has no such device, so the storages are made before.
    real_load = restore.serialization._load
    with pytest.MonkeyPatch.context() as patch:

        def load(zip_file: Any, map_location: Any, pickle_module: Any, **rest: Any) -> Any:
            return real_load(zip_file, map_location and "cpu", pickle_module, **rest)

        patch.setattr(restore.serialization, "_load", load)
        fake.delay(200_000)
        assert_same(stillframe.load(file, where, verify=verify), state)
    stored = {each.untyped_storage()._cdata: each.untyped_storage() for each in state.values()}
    assert fake.copied_bytes == sum(each.nbytes() for each in stored.values())


@pytest.mark.parametrize("where", ["cuda", torch.device("cuda:0"), {"cpu": "cuda:0"}])
def test_safetensors_file_goes_to_a_device_with_each_byte_copied_once(where, state, fake, tmp_path):
    flat = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(flat, tmp_path / "a.safetensors")
    fake.delay(200_000)
    found = stillframe.load(tmp_path / "a.safetensors", where)
    assert found.keys() == flat.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in flat.items())
    assert fake.copied_bytes == sum(each.nbytes for each in flat.values())


def test_safetensors_file_fills_tensors_of_a_device(state, fake, tmp_path):
    flat = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(flat, tmp_path / "a.safetensors")
    targets = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    stillframe.load(tmp_path / "a.safetensors", into=targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in flat.items())
    assert fake.copied_bytes == sum(each.nbytes for each in flat.values())


def test_tensors_are_returned_only_after_their_copies_complete(file, state, fake):
    fake.hold(True)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(stillframe.load(file)))
    thread.start()
    try:
        while fake.calls("cuEventQuery") < 50:  # the readers have read, and query their copies
            thread.join(0.001)
        assert found == []
    finally:
        fake.hold(False)
        thread.join(60)
    assert_same(found[0], state)


def test_load_to_a_device_takes_two_pinned_chunks_per_thread(tmp_path, fake, monkeypatch):
    torch.save([torch.zeros(30 << 18)], tmp_path / "a.pt")
    stillframe.load(tmp_path / "a.pt")
    assert fake.calls("cuMemHostAlloc") == 8
    assert fake.copied_bytes == 30 << 20


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize(
    "call", [COPY, BATCH, "cuEventRecord", "cuStreamWaitEvent", "cuStreamCreate"]
)
def test_failed_driver_call_names_the_device_and_the_next_load_works(call, nth, file, state, fake):
    fake.fail(call, nth=nth, code=999)
    hits = 0
    try:
        assert_same(stillframe.load(file), state)
    except stillframe.StillframeError as error:
        hits = 1
        assert "device 0: cu" in str(error)
        assert "999" in str(error)
    assert fake.hits == hits
    fake.reset()
    assert_same(stillframe.load(file), state)


def test_event_query_that_fails_once_is_repeated(file, state, fake):
    fake.fail("cuEventQuery", code=999)
    assert_same(stillframe.load(file), state)
    assert fake.hits == 1


def test_full_device_raises_torchs_error_and_the_next_load_works(file, state, fake, monkeypatch):
    real, room = restore.new_storage, 3  # storages that the device has room for

    def new_storage(nbytes: int, device: Any = "cpu") -> torch.UntypedStorage:
        nonlocal room
        if isinstance(device, torch.device):
            room -= 1
        if room < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(nbytes, device)

    monkeypatch.setattr(restore, "new_storage", new_storage)
    with pytest.raises(torch.OutOfMemoryError):
        stillframe.load(file)
    room = 1 << 20
    assert_same(stillframe.load(file), state)


def test_damaged_record_is_reported_and_not_returned(file, fake):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(stillframe.CorruptCheckpointError, match="data/"):
        stillframe.load(file)


def test_existing_tensors_are_filled_on_their_device(file, state, fake):
    base = torch.zeros(3, 5)
    target = {name: torch.zeros_like(each) for name, each in state.items()}
    target["t5"] = torch.zeros(128)[::2]
    target["t1"] = torch.zeros(7)[3:4]
    target["transposed"] = base.t()
    before = target["t3"]._version
    assert stillframe.load(file, into=target) is target
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name
    assert target["t3"]._version > before
    assert fake.copied_bytes == sum(state[name].nbytes for name in ("t1", "t2", "t3", "t4"))


def test_module_is_filled_on_its_device_and_an_empty_optimizer_gets_its_state(tmp_path, fake):
    model, target = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # a step would make the observer watch the storages
        moment = torch.randn_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment}
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "x.pt")
    fresh = torch.optim.AdamW(target.parameters())
    stillframe.load(tmp_path / "x.pt", into={"m": target, "o": fresh})
    assert fake.copied_bytes == sum(each.nbytes for each in model.parameters())
    for one, other in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["exp_avg"], fresh.state[other]["exp_avg"])


def test_every_flipped_byte_is_found_or_changes_nothing(tmp_path, fake):
    path = tmp_path / "small.pt"
    state = {"a": torch.arange(40.0), "b": torch.arange(3)}
    torch.save(state, path)
    whole = path.read_bytes()
    found = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            loaded = stillframe.load(path)
        except stillframe.CorruptCheckpointError:
            found += 1
        else:
            assert all(torch.equal(loaded[name], state[name]) for name in state), at
    assert found > len(whole) // 14


def test_ctrl_c_ends_a_load_whose_copies_are_under_way(file, state, fake):
    def interrupt() -> None:
        while fake.calls("cuEventQuery") < 20:  # the readers have read, and query their copies
            end.wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        fake.hold(False)  # the load waits for the queued copies

    end = threading.Event()
    fake.hold(True)
    thread = threading.Thread(target=interrupt)
    # A background job may start with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            stillframe.load(file)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same(stillframe.load(file), state)
