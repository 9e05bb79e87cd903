"""Loading safetensors files: the library's tensors, refused headers, where the bytes go."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_processes import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import load_file, save_file
from stillframe import _core, testing
from stillframe._base.safetensors import DTYPES
from stillframe._load import flat
from stillframe.errors import CorruptCheckpointError, StillframeError

TORCH = {name: getattr(torch, word) for name, (_, word) in DTYPES.items() if word}


pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (a[k].shape, a[k].dtype, a[k].stride(), bits(a[k]))
        == (b[k].shape, b[k].dtype, b[k].stride(), bits(b[k]))
        for k in a
    )


def state() -> dict[str, torch.Tensor]:
    """Return tensors of many sizes, an empty one and a scalar among them."""
    tensors = {f"w.{n}": torch.arange(n, dtype=torch.float32) for n in (1, 7, 1000, 5000, 300_000)}
    tensors["bytes"] = torch.arange(13, dtype=torch.uint8)
    tensors["flag"] = torch.tensor(True)
    tensors["empty"] = torch.empty(0, 3)
    return tensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(state(), tmp_path / "m.safetensors", {"format": "pt"})
    return tmp_path / "m.safetensors"


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(first: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [end - first] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


# ---- round trips --------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", ["m.safetensors", "m.bin", "without an ending"])
def test_load_gives_the_librarys_tensors_whatever_the_name_is(name, mmap, tmp_path):
    save_file(state(), tmp_path / name)
    assert same(stillframe.load(tmp_path / name, mmap=mmap), load_file(tmp_path / name))


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", TORCH)
def test_every_dtype_of_torch_comes_back(dtype, mmap, tmp_path):
    if dtype == "F4":
        tensor = torch.arange(32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(4, 8)
    else:
        size = TORCH[dtype].itemsize
        data = torch.randint(0, 2 if dtype == "BOOL" else 120, (24 * size,), dtype=torch.uint8)
        tensor = data.view(TORCH[dtype]).reshape(2, 3, 4)
    save_file({"pad": torch.ones(1, dtype=torch.uint8), "w": tensor}, tmp_path / "m.safetensors")
    loaded = stillframe.load(tmp_path / "m.safetensors", mmap=mmap)["w"]
    assert (loaded.shape, loaded.dtype, bits(loaded)) == (tensor.shape, tensor.dtype, bits(tensor))


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=9).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.bool]),
            st.lists(st.integers(0, 40), max_size=3),
        ),
        max_size=8,
    )
)
def test_load_gives_the_tensors_that_load_file_of_safetensors_gives(tmp_path_factory, described):
    path = tmp_path_factory.mktemp("any") / "m.safetensors"
    tensors = {n: (torch.rand(shape) * 9).to(dtype) for n, (dtype, shape) in described.items()}
    save_file(tensors, path)
    assert same(stillframe.load(path), load_file(path))
    assert same(stillframe.load(path, mmap=True), load_file(path))


def test_files_of_stillframe_are_loaded(tmp_path):
    stillframe.save(state(), tmp_path / "m.safetensors", metadata={"format": "pt"})
    for mmap in (False, True):
        assert same(stillframe.load(tmp_path / "m.safetensors", mmap=mmap), state())
    targets = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    assert same(stillframe.load(tmp_path / "m.safetensors", into=targets), state())


def test_load_waits_for_a_save_of_ours(tmp_path):
    with testing.slow("fdatasync", 0.3):
        stillframe.async_save(state(), tmp_path / "m.safetensors")
        assert same(stillframe.load(tmp_path / "m.safetensors"), state())


def test_tensors_own_their_memory(file):
    loaded = stillframe.load(file)
    os.truncate(file, 0)
    for name, tensor in loaded.items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        tensor.resize_(tensor.numel() + 9)
        assert bits(tensor[: state()[name].numel()]) == bits(state()[name])


def test_mapped_tensors_are_copied_when_written_to(file):
    before = file.read_bytes()
    loaded = stillframe.load(file, mmap=True)
    loaded["w.1000"].add_(1)
    assert torch.equal(loaded["w.1000"], state()["w.1000"] + 1)
    assert file.read_bytes() == before


def test_misaligned_tensors_are_copied_out_of_the_map(tmp_path):
    header = {"a": entry(0, 1), "b": entry(1, 9, "F32", [2])}
    data = b"\7" + struct.pack("<ff", 1.5, -2)
    path = write(tmp_path / "m.safetensors", header, data)
    for mmap in (False, True):
        loaded = stillframe.load(path, mmap=mmap)
        assert loaded["b"].tolist() == [1.5, -2]
        assert loaded["b"].data_ptr() % 4 == 0


def test_file_without_tensors_is_an_empty_dict(tmp_path):
    save_file({}, tmp_path / "m.safetensors")
    for mmap in (False, True):
        assert stillframe.load(tmp_path / "m.safetensors", mmap=mmap) == {}
    assert stillframe.load(tmp_path / "m.safetensors", into={}) == {}


def test_load_waits_for_an_earlier_save_of_its_path(file):
    with testing.slow("fdatasync", 0.3):
        stillframe.async_save({"w": torch.ones(3)}, file.with_name("x.pt"))
        os.link(file, file.with_name("y"))
        stillframe.remove(file.with_name("y"))
        with pytest.raises(FileNotFoundError):
            stillframe.load(file.with_name("y"))


# ---- where the bytes go -------------------------------------------------------------------


@pytest.mark.parametrize(
    "location",
    ["cpu", torch.device("cpu"), {"cpu": "cpu"}, {"cuda:0": "cpu"}, lambda storage, _: storage],
    ids=["str", "device", "dict", "other dict", "function"],
)
@pytest.mark.parametrize("mmap", [False, True])
def test_map_location_that_means_the_cpu_leaves_the_tensors_unchanged(location, mmap, file):
    assert same(stillframe.load(file, location, mmap=mmap), load_file(file))


def test_map_location_gets_storages_that_were_saved_on_the_cpu(file):
    asked: list[tuple[int, str]] = []

    def keep(storage: torch.UntypedStorage, location: str) -> None:
        asked.append((storage.nbytes(), location))

    assert same(stillframe.load(file, keep), load_file(file))
    assert sorted(asked) == sorted((t.numel() * t.element_size(), "cpu") for t in state().values())


@pytest.mark.parametrize("location", ["meta", {"cpu": "meta"}, torch.device("meta")], ids=str)
@pytest.mark.parametrize("mmap", [False, True])
def test_load_to_the_meta_device_reads_no_bytes(location, mmap, file, monkeypatch):
    monkeypatch.delattr(flat.Files, "_restore")
    loaded = stillframe.load(file, location, mmap=mmap)
    assert {t.device.type for t in loaded.values()} == {"meta"}
    assert loaded["w.1000"].shape == (1000,)


@pytest.mark.parametrize("mmap", [False, True])
def test_fake_mode_gives_fake_tensors(mmap, file):
    with torch._subclasses.FakeTensorMode():
        loaded = stillframe.load(file, mmap=mmap)
    assert isinstance(loaded["w.1000"], torch._subclasses.FakeTensor)


# ---- in place -----------------------------------------------------------------------------


def test_into_fills_a_dict_in_place(file):
    targets = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    strided = targets["w.1000"] = torch.zeros(2000)[::2]
    memory = {name: tensor.data_ptr() for name, tensor in targets.items()}
    assert stillframe.load(file, into=targets) is targets
    assert targets["w.1000"] is strided and strided.tolist() == state()["w.1000"].tolist()
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == memory
    targets["w.1000"] = strided.clone()
    assert same(targets, state())


def test_into_fills_a_module_in_place(tmp_path):
    source, target = (torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.BatchNorm1d(4)),) * 2
    target = torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.BatchNorm1d(4))
    save_file(source.state_dict(), tmp_path / "m.safetensors")
    parameter = target[0].weight
    stillframe.load(tmp_path / "m.safetensors", into=target)
    assert target[0].weight is parameter
    assert same(dict(target.state_dict()), dict(source.state_dict()))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_into_a_module_needs_tied_weights_under_one_name(tmp_path):
    source, target = Tied(), Tied()
    save_file({"embedding.weight": source.embedding.weight.detach()}, tmp_path / "m.safetensors")
    stillframe.load(tmp_path / "m.safetensors", into=target)
    assert torch.equal(target.head.weight, source.head.weight)
    assert target.head.weight is target.embedding.weight
    save_file({"x": torch.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="Missing key"):
        stillframe.load(tmp_path / "m.safetensors", into=target)


def test_into_an_object_with_load_state_dict_hands_it_the_dict(file):
    class Keeper:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    keeper = Keeper()
    stillframe.load(file, into=keeper)
    assert same(keeper.state, state())


def test_targets_that_share_memory_are_filled_in_order(tmp_path):
    save_file({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path / "m.safetensors")
    memory = torch.full((6,), 7.0)
    stillframe.load(tmp_path / "m.safetensors", into={"a": memory[:4], "b": memory[2:]})
    assert memory.tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "target",
    [torch.zeros(9), torch.zeros(1000, dtype=torch.float64), torch.zeros(10, 100), [torch.ones(1)]],
    ids=["length", "type", "shape", "list"],
)
def test_into_that_does_not_fit_is_refused_before_a_byte_is_written(target, file):
    other = torch.full((7,), 3.0)
    with pytest.raises(ValueError, match=r"w\.1000"):
        stillframe.load(file, into={"w.7": other, "w.1000": target})
    assert other.tolist() == [3.0] * 7


# ---- several files ----------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path) -> Path:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    weight_map: dict[str, str] = {}
    for name, part in zip(
        names, (["w.1", "w.5000"], ["w.300000"], ["bytes", "empty"]), strict=True
    ):
        save_file({key: state()[key] for key in part}, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("mmap", [False, True])
def test_index_gives_the_tensors_of_all_its_files(mmap, index):
    loaded = stillframe.load(index, mmap=mmap)
    assert same(loaded, {key: state()[key] for key in loaded}) and len(loaded) == 5


def test_index_fills_targets_in_place(index):
    targets = {key: torch.zeros_like(state()[key]) for key in ("w.5000", "w.300000", "bytes")}
    memory = [tensor.data_ptr() for tensor in targets.values()]
    stillframe.load(index, into=targets)
    assert same(targets, {key: state()[key] for key in targets})
    assert [tensor.data_ptr() for tensor in targets.values()] == memory


def test_index_with_a_missing_or_damaged_file_is_refused(index):
    third = index.with_name("model-00003-of-00003.safetensors")
    os.truncate(third, third.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match=r"00003.*truncated"):
        stillframe.load(index)
    save_file({"other": torch.ones(1)}, third)
    with pytest.raises(CorruptCheckpointError, match="no tensor bytes, which the index names"):
        stillframe.load(index)
    third.unlink()
    with pytest.raises(CorruptCheckpointError, match="missing next to it: model-00003"):
        stillframe.load(index)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "model.safetensors.index.json"}}',
        '{"weight_map": {"a": ".."}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60] or "empty",
)
def test_index_that_makes_no_sense_is_refused(text, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CorruptCheckpointError, match="index is damaged"):
        stillframe.load(path)


# ---- refused headers --------------------------------------------------------------------------

HOSTILE = {
    "hole": ({"a": entry(0, 4), "b": entry(5, 9)}, 9),
    "hole at the beginning": ({"a": entry(1, 5)}, 5),
    "overlap": ({"a": entry(0, 4), "b": entry(3, 9)}, 9),
    "same bytes twice": ({"a": entry(0, 4), "b": entry(0, 4)}, 4),
    "backwards": ({"a": entry(0, 4), "b": entry(4, 2, shape=[])}, 4),
    "negative": ({"a": entry(-4, 0)}, 0),
    "shape too large": ({"a": entry(0, 4, shape=[5])}, 4),
    "shape too small": ({"a": entry(0, 4, shape=[3])}, 4),
    "shape that overflows": ({"a": entry(0, 0, shape=[1 << 62, 4])}, 0),
    "shape that overflows to it": ({"a": entry(0, 4, shape=[(1 << 62) + 1, 4])}, 4),
    "long shape": ({"a": entry(0, 4, shape=[2] * 50_000)}, 4),
    "negative shape": ({"a": entry(0, 4, shape=[-1, -4])}, 4),
    "shape of floats": ({"a": entry(0, 4, shape=[4.0])}, 4),
    "shape of truths": ({"a": entry(0, 1, shape=[True])}, 1),
    "shape that is no list": ({"a": entry(0, 4, shape=4)}, 4),
    "three offsets": ({"a": {**entry(0, 4), "data_offsets": [0, 4, 4]}}, 4),
    "offsets that are text": ({"a": {**entry(0, 4), "data_offsets": "04"}}, 4),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, 4),
    "unknown type": ({"a": entry(0, 4, "U7")}, 4),
    "type that is a list": ({"a": {**entry(0, 4), "dtype": ["U8"]}}, 4),
    "part of a byte": ({"a": entry(0, 1, "F4", [1])}, 1),
    "tensor that is a list": ({"a": [1]}, 0),
    "too long": ({"a": entry(0, 4)}, 5),
    "truncated": ({"a": entry(0, 4)}, 3),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0),
    "metadata that is text": ({"__metadata__": "a"}, 0),
    "duplicate": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
    ),
    "duplicate inside": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1),
    "not JSON": (b'{"a":', 0),
    "not text": (b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    "nested": (b'{"a":' + b"[" * 100_000, 0),
    "huge number": (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', 1),
    "something after the JSON": (b"{} x", 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_header_is_refused(name, tmp_path):
    header, nbytes = HOSTILE[name]
    path = write(tmp_path / "m.safetensors", header, bytes(max(nbytes, 0)))
    for arguments in ({}, {"mmap": True}, {"into": {}}, {"map_location": "meta"}):
        with pytest.raises(CorruptCheckpointError, match=r"m\.safetensors cannot be loaded: it"):
            stillframe.load(path, **arguments)
    if not name.startswith("duplicate"):  # of which the library takes one
        with pytest.raises((SafetensorError, Exception)):
            deserialize(path.read_bytes())


@pytest.mark.parametrize("length", [0, 1, 8, 100, 10**8, 10**8 + 1, 1 << 40, (1 << 64) - 1])
def test_length_of_the_header_is_checked_before_it_is_read(length, tmp_path):
    path = write(tmp_path / "m.safetensors", b"{" + b" " * 20, length=length)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            stillframe.load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("left", range(1, 40))
def test_every_truncation_is_refused(left, tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(3)}, path)
    os.truncate(path, path.stat().st_size * left // 40)
    with pytest.raises(CorruptCheckpointError):
        stillframe.load(path)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9])
def test_short_file_is_refused(nbytes, tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\2" + bytes(7) + b"{}"[: max(nbytes - 8, 0)] if nbytes else b"")
    os.truncate(path, nbytes)
    with pytest.raises(CorruptCheckpointError):
        stillframe.load(path)


def test_type_that_torch_lacks_is_named(tmp_path):
    path = write(tmp_path / "m.safetensors", {"a": entry(0, 3, "F6_E2M3", [4])}, bytes(3))
    with pytest.raises(StillframeError, match="a is of type F6_E2M3"):
        stillframe.load(path)


def test_torchs_files_are_not_taken_for_safetensors(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        torch.save(
            {"w": torch.ones(3)}, tmp_path / name, _use_new_zipfile_serialization=name[0] < "b"
        )
        assert stillframe.load(tmp_path / name)["w"].tolist() == [1, 1, 1]


# ---- errors while it is read --------------------------------------------------------------------


def test_file_that_becomes_shorter_is_damaged(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(1 << 20)}, path)
    target = torch.zeros(1 << 20)
    for arguments, words in (({}, "became shorter"), ({"into": {"w": target}}, "half written")):
        with (
            testing.fault("pread", nth=5, sticky=True, limit=0),  # after the header
            pytest.raises(CorruptCheckpointError, match=words),
        ):
            stillframe.load(path, **arguments)


def test_error_of_the_disk_is_an_oserror_with_the_path(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(1 << 20)}, path)
    with testing.fault("pread", sticky=True), pytest.raises(OSError) as raised:
        stillframe.load(path)
    assert raised.value.filename == str(path)


@pytest.mark.product_limits
def test_load_takes_little_more_memory_than_the_file(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(9)}, tmp_path / "small.safetensors")
    save_file({f"w{i}": torch.ones(4 << 20) for i in range(12)}, path)
    done = run_python(
        "-c",
        f"""if True:
        import resource, torch, stillframe
        stillframe.load({str(tmp_path / "small.safetensors")!r})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loaded = stillframe.load({str(path)!r})
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < (12 * 16 + 64) << 10, grown  # KiB""",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_overlapping_ranges_are_refused_by_the_core(file):
    import array

    with file.open("rb") as opened:
        for numbers, end in (([8, 4, 10, 4], 20), ([8, 20], 20), ([], 20)):
            with pytest.raises(OSError):
                _core.restore_bare(opened.fileno(), array.array("Q", numbers), end)
        with pytest.raises(ValueError):
            _core.restore_bare(opened.fileno(), b"1234567890", 20)
