"""stillframe.load(into=...): the file's bytes go to existing tensors."""

import argparse
from collections import defaultdict

import pytest
import stillframe
import torch
from fix_checkpoints import by_path, by_stillframe, flip, legacy, pack
from stillframe import CorruptCheckpointError, _core, testing
from stillframe._load import fill as fill_module
from stillframe._load import load as load_module
from stillframe._load import restore
from stillframe._watch import gate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

WRITERS = [by_path, by_stillframe]


def state():
    torch.manual_seed(7)
    weight = torch.randn(300, 400)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "turned": weight.t(),
            "part": weight[3:70, ::2],
            "bias": torch.randn(400, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "count": torch.tensor(5),
            "complex": torch.randn(9, dtype=torch.complex64).conj(),
        },
        "optim": [torch.randn(1 << 19), {"step": 3}],
        "pair": (torch.arange(5), "name"),
        "step": 100,
    }


def zeros_like(tree):
    """Return the same tree over new memory, filled with zeros, and with other values."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree, memory_format=torch.contiguous_format)
    if isinstance(tree, dict):
        return {key: zeros_like(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(zeros_like(value) for value in tree)
    return tree if isinstance(tree, str) else -1


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [each for value in tree.values() for each in tensors(value)]
    if isinstance(tree, (list, tuple)):
        return [each for value in tree for each in tensors(value)]
    return []


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize("write", WRITERS)
def test_tensors_are_filled_in_place_and_values_replaced(write, tmp_path):
    write(state(), tmp_path / "x.pt")
    target = zeros_like(state())
    addresses = [each.data_ptr() for each in tensors(target)]
    versions = [each._version for each in tensors(target) if each.numel()]
    assert stillframe.load(tmp_path / "x.pt", into=target) is target
    assert equal(target, state())
    assert [each.data_ptr() for each in tensors(target)] == addresses
    after = [each._version for each in tensors(target) if each.numel()]
    assert all(new > old for new, old in zip(after, versions, strict=True))
    assert (target["step"], target["optim"][1]["step"]) == (100, 3)


@pytest.mark.parametrize("write", WRITERS)
def test_targets_may_be_strided_parameters_or_a_part_of_what_is_in_the_file(write, tmp_path):
    write(state(), tmp_path / "x.pt")
    wide = torch.zeros(300, 1000)
    target = {
        "model": {
            "weight": wide[:, 100:900:2],
            "bias": torch.nn.Parameter(torch.zeros(400, dtype=torch.float64)),
        }
    }
    stillframe.load(tmp_path / "x.pt", into=target)
    assert torch.equal(wide[:, 100:900:2], state()["model"]["weight"])
    assert not wide[:, :100].any() and not wide[:, 101::2].any()
    assert torch.equal(target["model"]["bias"].detach(), state()["model"]["bias"])
    assert set(target) == {"model"}


def test_view_in_the_file_fills_only_its_own_bytes(tmp_path):
    """The record is longer or has another order. The bytes around the target stay."""
    weight = torch.arange(1.0, 1001.0).view(20, 50)
    parts = {"head": weight[:1], "tail": weight[-1:], "turned": weight.t()}
    stillframe.save({**parts, "weight": weight}, tmp_path / "x.pt")
    for name, part in parts.items():
        memory = torch.zeros(2000)
        target = memory[: part.numel()].view(part.shape)
        stillframe.load(tmp_path / "x.pt", into={name: target})
        assert torch.equal(target, part) and not memory[part.numel() :].any()


def test_targets_that_share_a_record_are_filled_from_the_first(tmp_path):
    """The first target is read from the file, and the others are copied from it."""
    weight = torch.arange(1.0, 1001.0)
    stillframe.save({"a": weight, "part": weight[10:20], "tied": weight}, tmp_path / "x.pt")
    memory = torch.zeros(2000)
    target = {"a": memory[500:1500], "part": torch.zeros(10), "tied": torch.zeros(1000)}
    stillframe.load(tmp_path / "x.pt", into=target)
    assert torch.equal(target["a"], weight) and torch.equal(target["tied"], weight)
    assert torch.equal(target["part"], weight[10:20])
    assert not memory[:500].any() and not memory[1500:].any()


def test_targets_that_share_a_record_on_devices_are_copied():
    """The first one is on its device, and no host tensor can be made over its memory."""
    there = torch.empty(8, device="meta").untyped_storage()
    over = fill_module._view_of(there, 8, torch.zeros(2, 2).t())
    assert (over.device.type, over.storage_offset(), over.stride()) == ("meta", 2, (1, 2))


def test_most_of_a_state_needs_no_memory_of_its_own(tmp_path, monkeypatch):
    stillframe.save({str(i): torch.randn(1 << 18) for i in range(20)}, tmp_path / "x.pt")
    made = []
    new = restore.new_storage

    def counting(nbytes):
        made.append(nbytes)
        return new(nbytes)

    monkeypatch.setattr(restore, "new_storage", counting)
    stillframe.load(tmp_path / "x.pt", into={str(i): torch.empty(1 << 18) for i in range(20)})
    assert sum(made) < 20_000  # only the pickle


def test_mismatched_target_is_named_before_a_byte_is_written(tmp_path):
    by_path(state(), tmp_path / "x.pt")
    target = zeros_like(state())
    target["model"]["weight"] = torch.zeros(400, 300)
    target["model"]["bias"] = torch.zeros(400)
    target["model"]["extra"] = torch.zeros(1)
    target["model"]["part"] = torch.empty(67, 200, device="meta")
    target["optim"].append(torch.zeros(2))
    with pytest.raises(
        ValueError,
        match=r"model\.weight is float32 \(400, 300\), and float32 \(300, 400\) in the file",
    ) as error:
        stillframe.load(tmp_path / "x.pt", into=target)
    for words in (
        "model.bias is float32 (400,), and float64",
        "model.extra is not",
        "optim.2 is not",
        "model.part has no memory",
    ):
        assert words in str(error.value)
    assert not any(each.any() for each in tensors(target) if not each.is_meta)
    assert target["step"] == -1


def test_key_without_tensors_in_the_file_is_named(tmp_path):
    torch.save({"a": 5, "b": None}, tmp_path / "x.pt")
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=rf"{name}\.w is not in the file"):
            stillframe.load(tmp_path / "x.pt", into={name: {"w": torch.zeros(3)}})


def test_negated_tensor_of_the_file_is_read_as_its_values(tmp_path):
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert turned.is_neg()
    torch.save({"w": turned}, tmp_path / "x.pt")
    target = {"w": torch.zeros(2)}
    stillframe.load(tmp_path / "x.pt", into=target)
    assert target["w"].tolist() == [-2, 4]


def shrunk_to(nbytes):
    tensor = torch.ones(300, 400)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


CANNOT_BE_WRITTEN_TO = {
    "freed": (lambda: shrunk_to(0), "reaches beyond its memory"),
    "shrunk": (lambda: shrunk_to(1000), "reaches beyond its memory"),
    "expanded": (lambda: torch.zeros(1, 400).expand(300, 400), "its elements share memory"),
    "sparse": (lambda: torch.zeros(300, 400).to_sparse(), "is not strided"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(3)]), "is not strided"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(3)], layout=torch.jagged),
        "is not strided",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its prototypes
@pytest.mark.parametrize("kind", sorted(CANNOT_BE_WRITTEN_TO))
def test_unwritable_target_is_named_before_a_byte_is_written(kind, tmp_path):
    make, words = CANNOT_BE_WRITTEN_TO[kind]
    stillframe.save(state(), tmp_path / "x.pt")
    target = {"bias": torch.zeros(400, dtype=torch.float64), "weight": make()}
    with pytest.raises(ValueError, match=rf"model\.weight {words}|model\.weight .*{words}"):
        stillframe.load(tmp_path / "x.pt", into={"model": target})
    assert not target["bias"].any()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("nbytes", [0, 1000])
def test_tensor_freed_before_its_save_is_named(write, nbytes, tmp_path):
    write({"other": torch.ones(9), "weight": shrunk_to(nbytes)}, tmp_path / "x.pt")
    target = {"other": torch.zeros(9), "weight": torch.zeros(300, 400)}
    with pytest.raises(ValueError, match=r"names: weight is cut short in the file: its memory was"):
        stillframe.load(tmp_path / "x.pt", into=target)
    assert not target["other"].any()
    stillframe.load(tmp_path / "x.pt", into={"other": target["other"]})
    assert target["other"].all()


@pytest.mark.parametrize("write", WRITERS)
def test_file_tensors_replace_targets_that_are_no_tensors(write, tmp_path):
    write({**state(), "object": argparse.Namespace(inner=[torch.ones(3)])}, tmp_path / "x.pt")
    target = {
        "model": {"weight": torch.zeros(300, 400), "bias": None},
        "optim": 0,
        "object": None,
    }
    stillframe.load(tmp_path / "x.pt", into=target, weights_only=False)
    assert equal(target["model"], {name: state()["model"][name] for name in ("weight", "bias")})
    assert equal(target["optim"], state()["optim"])
    assert target["object"].inner[0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its prototypes
def test_wrapper_tensors_are_filled(tmp_path):
    """Such tensors have no record of their own."""
    pair = TwoTensor(torch.arange(4.0), torch.arange(4.0) + 1)
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.quint8)
    saved = {"pair": pair, "plain": torch.ones(5), "quantized": quantized}
    for names in (["pair", "plain"], ["plain", "quantized"]):
        stillframe.save({name: saved[name] for name in names}, tmp_path / "x.pt")
        targets = {
            "pair": TwoTensor(torch.zeros(4), torch.zeros(4)),
            "plain": torch.zeros(5),
            "quantized": torch.quantize_per_tensor(torch.zeros(4), 0.1, 1, torch.quint8),
        }
        into = {name: targets[name] for name in names}
        inner = targets["pair"].a
        stillframe.load(tmp_path / "x.pt", into=into, weights_only=False)
        assert into["plain"].all()
        if "pair" in into:
            assert inner is into["pair"].a
            assert equal([inner, into["pair"].b], [pair.a, pair.b])
        else:
            assert torch.equal(into["quantized"], quantized)


@pytest.mark.filterwarnings("ignore::UserWarning")  # as above
def test_tensors_of_a_missing_device_fill_wrapper_tensors(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    saved = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.quint8)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        torch.save({"quantized": saved}, path)
    target = torch.quantize_per_tensor(torch.zeros(4), 0.1, 1, torch.quint8)
    stillframe.load(path, into={"quantized": target})
    assert torch.equal(target, saved)


def test_into_with_a_load_that_reads_no_bytes_is_refused(tmp_path):
    stillframe.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    target = {"a": torch.zeros(3)}
    for mode in (torch.serialization.skip_data, FakeTensorMode):
        with mode(), pytest.raises(ValueError, match="the file's bytes are read: not inside"):
            stillframe.load(tmp_path / "x.pt", into=target)
    assert not target["a"].any()


def test_into_a_tree_without_tensors_or_with_map_location_is_refused(tmp_path):
    by_path(state(), tmp_path / "x.pt")
    with pytest.raises(ValueError, match="map_location"):
        stillframe.load(tmp_path / "x.pt", "cpu", into={})
    with pytest.raises(TypeError, match=r"into= takes .*not <class 'int'>$"):
        stillframe.load(tmp_path / "x.pt", into=3)


def holding_itself(value):
    """Return a tree that contains itself, and one container twice."""
    shared = {"w": torch.full((3,), value), "step": int(value)}
    tree = {"once": shared, "again": [shared], "deep": {"list": []}}
    tree["self"] = tree
    tree["deep"]["list"].append(tree["deep"])
    tree["deep"]["pair"] = (tree, torch.full((2,), value))
    return tree


@pytest.mark.parametrize("write", WRITERS)
def test_recursive_tree_is_filled(write, tmp_path):
    write(holding_itself(5.0), tmp_path / "x.pt")
    target = holding_itself(0.0)
    assert stillframe.load(tmp_path / "x.pt", into=target) is target
    assert target["once"] is target["again"][0]
    assert target["once"]["w"].tolist() == [5.0] * 3 and target["once"]["step"] == 5
    assert target["deep"]["pair"][1].tolist() == [5.0] * 2
    assert target["self"] is target and target["deep"]["list"][0] is target["deep"]


def test_container_in_two_places_is_filled_from_the_first(tmp_path):
    stillframe.save({"one": {"step": 1}, "two": {"step": 2}}, tmp_path / "x.pt")
    shared = {"step": 0}
    stillframe.load(tmp_path / "x.pt", into={"one": shared, "two": shared})
    assert shared == {"step": 1}


def test_damage_in_a_load_reports_partly_written_targets(tmp_path):
    path = tmp_path / "x.pt"
    by_stillframe(state(), path)
    flip(path, path.read_bytes().index(state()["optim"][0].numpy().tobytes()) + 1000)
    with pytest.raises(CorruptCheckpointError, match=r"CRC.*: optim.0\).*half written"):
        stillframe.load(path, into=zeros_like(state()))


def test_damage_in_unused_records_is_found(tmp_path):
    path = tmp_path / "x.pt"
    by_stillframe({"wanted": torch.ones(9), "last": torch.randn(1 << 19)}, path)
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError, match=r"CRC.*: last\)"):
        stillframe.load(path, into={"wanted": torch.zeros(9)})


def test_disk_error_in_a_load_reports_partly_written_targets(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    by_stillframe(state(), path)
    run = fill_module.Fill.run

    def failing(self):
        with testing.fault("pread", nth=2, sticky=True):
            run(self)

    monkeypatch.setattr(fill_module.Fill, "run", failing)
    with pytest.raises(OSError, match="half written") as error:
        stillframe.load(path, into=zeros_like(state()))
    assert error.value.filename == str(path)


def test_targets_are_filled_from_a_file_that_torch_load_reads(tmp_path):
    by_path(state(), tmp_path / "x.pt")
    pack(tmp_path / "x.pt", tmp_path / "y.pt")
    torch.save(state(), tmp_path / "z.pt", _use_new_zipfile_serialization=False)
    for name in ("y.pt", "z.pt"):
        target = zeros_like(state())
        stillframe.load(tmp_path / name, into=target)
        assert equal(target, state())


@pytest.mark.parametrize("write", [by_path, legacy])
def test_targets_are_written_after_the_copies_of_saves_under_way(write, tmp_path, monkeypatch):
    write({"w": torch.zeros(9)}, tmp_path / "x.pt")
    target = {"w": torch.ones(9)}
    waits = []
    monkeypatch.setattr(gate, "wait", lambda: waits.append(target["w"].tolist()))
    stillframe.load(tmp_path / "x.pt", into=target)
    assert waits == [[1.0] * 9]
    assert not target["w"].any()


def test_record_of_two_dtypes_fills_targets_at_any_offset(tmp_path):
    halves = torch.arange(1, 9, dtype=torch.int16).view(torch.uint16)
    torch.save({"halves": halves, "whole": halves.view(torch.uint32)}, tmp_path / "x.pt")
    # The first target begins where no element of the second one could begin.
    first = torch.zeros(9, dtype=torch.int16).view(torch.uint16)[1:]
    into = {"halves": first, "whole": torch.zeros(4, dtype=torch.int32).view(torch.uint32)}
    stillframe.load(tmp_path / "x.pt", into=into)
    assert into["halves"].view(torch.int16).tolist() == [*range(1, 9)]
    assert torch.equal(into["whole"].view(torch.int16), halves.view(torch.int16))


@pytest.mark.parametrize("write", WRITERS)
def test_records_that_are_not_there_are_refused(write, tmp_path):
    write({"a": torch.ones(3), "empty": torch.empty(0)}, tmp_path / "a.pt")
    with open(tmp_path / "a.pt", "rb") as file:
        found = _core.restore(file.fileno(), True)[1]
        assert found is not None
        for call in (
            lambda: found.into(found.nr, [0]),
            lambda: found.into_device(found.nr, 0, 0),
            lambda: found.reach(found.nr),
            lambda: found.wait(found.nr + 1),
        ):
            with pytest.raises(IndexError, match="fewer records"):
                call()
        assert found.reach(found.nr - 1) == found.nr
        found.go(found.nr)
        assert found.wait(found.nr)  # that number means all records
        found.close()
        with pytest.raises(ValueError, match="closed"):
            found.done()


def _row_and_whole() -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.zeros(3_000, 1_000)
    return whole, whole[1]


def _twice() -> tuple[torch.Tensor, torch.Tensor]:
    once = torch.zeros(3_000_000)
    return once, once


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("make", [_row_and_whole, _twice])
def test_last_value_in_the_tree_wins_if_targets_share_memory(make, write, tmp_path):
    first, last = make()
    saved = {"b": torch.full(first.shape, 1.0), "a": torch.full(last.shape, 2.0)}
    write(saved, tmp_path / "x.pt")
    stillframe.load(tmp_path / "x.pt", into={"b": first, "a": last})
    assert torch.equal(last, saved["a"])
    stillframe.load(tmp_path / "x.pt", into={"a": last, "b": first})
    assert torch.equal(first, saved["b"])


def test_targets_that_share_memory_as_in_the_file_need_no_second_copy(tmp_path, monkeypatch):
    saved = torch.arange(6e5).view(600, 1000)
    by_path({"whole": saved, "part": saved[5:9]}, tmp_path / "x.pt")
    target = torch.zeros(600, 1000)
    monkeypatch.setattr(load_module, "_load_fd", None)  # the way that makes a second copy
    into = {"whole": target, "part": target[5:9]}
    stillframe.load(tmp_path / "x.pt", into=into)
    assert torch.equal(target, saved)


@pytest.mark.parametrize("found", [torch.ones(2, 3), "ab", b"ab", [torch.ones(3)]])
def test_list_is_filled_only_from_a_list_of_its_length(found, tmp_path):
    by_path({"a": found}, tmp_path / "x.pt")
    into = {"a": [torch.zeros(3), torch.zeros(3)]}
    with pytest.raises(ValueError, match=r"a\.1 is not in the file"):
        stillframe.load(tmp_path / "x.pt", into=into)
    assert not into["a"][0].any()


def test_key_that_a_defaultdict_lacks_is_named(tmp_path):
    saved = defaultdict(int, w=torch.ones(2))
    by_path(saved, tmp_path / "x.pt")
    into = {"w": torch.zeros(2), "epoch": 7}
    with pytest.raises(ValueError, match="epoch is not in the file"):
        stillframe.load(tmp_path / "x.pt", into=into, weights_only=False)
    assert into["epoch"] == 7
    assert not into["w"].any()
