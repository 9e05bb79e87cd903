"""Saves of flat dicts as safetensors files: what they hold, what they refuse, how they end."""

from __future__ import annotations

import errno
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import stillframe
import torch
from fix_flat import DTYPES, assert_holds, filled, flattened, header_of, random_tensors
from fix_holds import held_until_awaited
from stillframe.testing import fault, held, slow
from torch import Tensor

PAGE = 4096


class Model(torch.nn.Module):
    """Weights that are deferred, with buffers of every element size that are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(200, 301), torch.nn.Linear(301, 7))
        self.short = torch.nn.Parameter(torch.randn(5001).bfloat16())
        for i, dtype in enumerate((torch.bool, torch.int64, torch.float16, torch.float32)):
            self.register_buffer(f"buffer{i}", filled(dtype, 3 + 2 * i))
        self.register_buffer("none", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum() + self.short.float().sum()


def trained(steps: int = 4) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 200)).backward()
    optimizer.step()


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# ---- what is in a file ----


@pytest.mark.parametrize("seed", range(20))
def test_library_reads_what_was_saved(seed, tmp_path, engine):
    tensors = random_tensors(seed)
    report = stillframe.save(tensors, tmp_path / "a.safetensors", engine=engine)
    assert_holds(tmp_path / "a.safetensors", tensors)
    assert report.nbytes == (tmp_path / "a.safetensors").stat().st_size
    assert report.num_tensors == len(tensors)


@pytest.mark.parametrize("seed", range(5))
def test_captured_tensors_have_the_offsets_that_the_library_gives_them(seed, tmp_path):
    tensors = random_tensors(seed)
    stillframe.save(tensors, tmp_path / "ours.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    ours, theirs = (header_of(tmp_path / name)[0] for name in ("ours.safetensors", "theirs"))
    if not all(tensor.numel() for tensor in tensors.values()):
        # Tensors without bytes may be anywhere.
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    assert {name: ours[name] for name in tensors} == {name: theirs[name] for name in tensors}
    assert next(iter(ours)) == "__metadata__"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 3)], ids=str)
def test_dtypes_and_shapes_are_kept(dtype, shape, tmp_path):
    tensors = {"x": filled(dtype, *shape)}
    stillframe.save(tensors, tmp_path / "a.safetensors")
    assert_holds(tmp_path / "a.safetensors", tensors)


def test_pairs_of_four_bits_are_described_as_by_the_library(tmp_path):
    pairs = filled(torch.uint8, 3, 5).view(torch.float4_e2m1fn_x2)
    stillframe.save({"x": pairs}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"x": pairs}, tmp_path / "theirs")
    ours, theirs = (header_of(tmp_path / name)[0] for name in ("a.safetensors", "theirs"))
    assert ours == theirs and ours["x"]["shape"] == [3, 10]
    with pytest.raises(ValueError, match="elements of four bits"):
        stillframe.save({"x": pairs[0, 0]}, tmp_path / "b.safetensors")


def test_dict_without_tensors_makes_a_valid_file(tmp_path):
    report = stillframe.save({}, tmp_path / "a.safetensors")
    assert_holds(tmp_path / "a.safetensors", {})
    assert report.nbytes == PAGE and report.num_tensors == 0


def test_names_and_metadata_are_any_unicode(tmp_path):
    names = ['"quoted"', "back\\slash", "line\nbreak", "naïve", "模型", "\U0001f600", "\x01", ""]
    tensors = {name: torch.tensor([i]) for i, name in enumerate(names)}
    metadata = {name: name for name in names}
    stillframe.save(tensors, tmp_path / "a.safetensors", metadata=metadata)
    assert_holds(tmp_path / "a.safetensors", tensors, metadata)


def test_header_may_be_longer_than_a_block(tmp_path):
    tensors = {f"{'x' * 200}.{i}": torch.tensor([i]) for i in range(200)}
    with stillframe.Engine(pool_bytes=PAGE, block_bytes=PAGE) as engine:
        stillframe.save(tensors, tmp_path / "a.safetensors", engine=engine)
    assert header_of(tmp_path / "a.safetensors")[1] > 8 * PAGE
    assert_holds(tmp_path / "a.safetensors", tensors)


def test_views_of_one_storage_that_do_not_overlap_are_saved_alone(tmp_path):
    base = torch.arange(10_000, dtype=torch.float32)
    tensors = {"a": base[10:1000], "b": base[1000:1001], "c": base[5000:], "none": base[50:50]}
    report = stillframe.save(tensors, tmp_path / "a.safetensors")
    assert_holds(tmp_path / "a.safetensors", tensors)
    assert report.nbytes < 30_000


def test_conjugated_and_negated_tensors_are_saved_with_their_values(tmp_path):
    base = filled(torch.complex64, 100)
    base = torch.complex(torch.randn(100), torch.randn(100))
    tensors = {"conj": base.conj(), "neg": torch._neg_view(torch.randn(50))}
    stillframe.save(tensors, tmp_path / "a.safetensors")
    got = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert torch.equal(got["conj"], base.conj().resolve_conj())
    assert torch.equal(got["neg"], tensors["neg"].resolve_neg())


def test_parameters_are_saved_as_tensors(tmp_path):
    weight = torch.nn.Parameter(torch.randn(5))
    stillframe.save({"w": weight}, tmp_path / "a.safetensors")
    assert_holds(tmp_path / "a.safetensors", {"w": weight})


# ---- which format ----


def test_ending_of_the_name_picks_the_format(tmp_path):
    tensors = {"x": torch.arange(5)}
    for name, options, is_flat in [
        ("a.safetensors", {}, True),
        ("a.pt", {"format": "safetensors"}, True),
        ("b.safetensors", {"format": "torch"}, False),
        ("b.pt", {}, False),
    ]:
        path = tmp_path / name
        for given in (path, str(path)):
            stillframe.async_save(tensors, given, **options).result()
            stillframe.save(tensors, given, **options)
        if is_flat:
            assert_holds(path, tensors)
        else:
            with path.open("rb") as file:  # torch.load, too, goes by the ending of a name
                assert torch.equal(torch.load(file)["x"], tensors["x"])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"format": "zip"}, ValueError, "'torch', 'safetensors'"),
        ({"metadata": {"a": "b"}, "format": "torch"}, ValueError, "metadata= is for"),
        ({"metadata": {"a": 1}}, TypeError, "not int"),
        ({"metadata": {1: "a"}}, TypeError, "not int"),
        ({"metadata": ["a"]}, TypeError, "not list"),
    ],
)
def test_invalid_combinations_of_options_are_refused(options, error, words, tmp_path):
    for save in (stillframe.save, stillframe.async_save):
        with pytest.raises(error, match=words):
            save({"x": torch.arange(5)}, tmp_path / "a.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


# ---- what is refused ----

BASE = torch.arange(24, dtype=torch.float32)
REFUSED: dict[str, tuple[Any, str]] = {
    "list": ([BASE], "Expected a dict"),
    "tensor": (BASE, "Expected a dict"),
    "number": ({"a": 3}, "Key `a` is invalid"),
    "nested": ({"a": {"b": BASE}}, "Key `a` is invalid"),
    "numpy": ({"a": np.zeros(3)}, "Key `a` is invalid"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "sparse tensor"),
    "transposed": ({"a": BASE.reshape(4, 6).t()}, "non contiguous tensor: `a`"),
    "strided": ({"a": BASE[::2]}, "non contiguous tensor: `a`"),
    "expanded": ({"a": BASE[:1].expand(5)}, "non contiguous tensor: `a`"),
    "tied": ({"a": BASE, "b": BASE}, "share memory"),
    "overlapping": ({"a": BASE[:10], "b": BASE[9:]}, "share memory"),
    "another type": ({"a": BASE, "b": BASE.view(torch.int32)}, "share memory"),
    "numeric name": ({3: BASE}, "int"),
    "meta": ({"a": torch.empty(3, device="meta")}, "meta tensor"),
    "complex128": ({"a": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
    "surrogate": ({"\ud800": BASE}, "surrogate"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_state_that_the_library_refuses_is_refused_with_the_same_error(what, tmp_path):
    obj, words = REFUSED[what]
    with pytest.raises(Exception, match=words) as theirs:
        safetensors.torch.save_file(obj, tmp_path / "theirs")
    (tmp_path / "theirs").unlink(missing_ok=True)
    with pytest.raises(Exception, match=words) as ours:
        stillframe.save(obj, tmp_path / "a.safetensors")
    assert ours.type is theirs.type
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensor_is_refused_with_the_same_error(tmp_path):
    tensors = {"a": torch.quantize_per_tensor(BASE, 0.1, 0, torch.quint8)}
    for save in (safetensors.torch.save_file, stillframe.save):
        with pytest.raises(KeyError, match="quint8"):
            save(tensors, tmp_path / "a.safetensors")


def test_tensor_named_like_the_metadata_is_refused(tmp_path):
    with pytest.raises(ValueError, match="__metadata__"):
        stillframe.save({"__metadata__": BASE}, tmp_path / "a.safetensors")


def test_tensor_whose_memory_was_freed_is_refused(tmp_path):
    tensor = torch.arange(100)
    tensor.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match="`x` has no memory, or too little"):
        stillframe.save({"x": tensor}, tmp_path / "a.safetensors")


def test_header_that_no_reader_accepts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("stillframe._base.safetensors.MAX_HEADER", 5000)
    stillframe.save({"x" * 100: BASE}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="accept at most 5000"):
        stillframe.save({"x" * 5000: BASE}, tmp_path / "b.safetensors")


# ---- what is deferred, and when steps wait ----


@pytest.mark.parametrize("pool_blocks", [1, 2, 9])
def test_file_holds_the_state_at_the_call_while_training_goes_on(pool_blocks, tmp_path):
    model, optimizer = trained()
    path = tmp_path / "a.safetensors"
    with stillframe.Engine(pool_bytes=pool_blocks * PAGE, block_bytes=PAGE) as engine:
        for _ in range(3):
            wanted = copied(model.state_dict())
            handle = stillframe.async_save(model.state_dict(), path, engine=engine)
            step(model, optimizer)
            report = handle.result()
            assert report is not None and report.deferred_nbytes > 200 * 301 * 4
            assert report.captured_nbytes > PAGE
            assert handle.progress() == (report.nbytes, report.nbytes)
            assert_holds(path, wanted)


def test_step_waits_until_the_deferred_bytes_are_copied(tmp_path):
    model, optimizer = trained()
    wanted = copied(model.state_dict())
    with held_until_awaited("lane_copy"):
        handle = stillframe.async_save(model.state_dict(), tmp_path / "a.safetensors")
        assert handle.state == "staging"
        step(model, optimizer)
        assert handle.state != "staging"
    report = handle.result()
    assert report is not None and report.gate_wait_s > 0
    assert_holds(tmp_path / "a.safetensors", wanted)


def test_optimizer_state_is_saved_with_its_model(tmp_path):
    model, optimizer = trained()
    tensors = flattened({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = copied(tensors)
    handle = stillframe.async_save(tensors, tmp_path / "a.safetensors")
    step(model, optimizer)
    handle.result()
    assert_holds(tmp_path / "a.safetensors", wanted)


def test_change_before_the_copy_fails_the_save_and_names_the_tensors(tmp_path):
    model, _ = trained()
    path = tmp_path / "a.safetensors"
    stillframe.save({"old": BASE}, path)
    with held_until_awaited("lane_copy"):
        handle = stillframe.async_save(model.state_dict(), path)
        with torch.no_grad():
            model.layers[0].weight.view(-1)[77] += 1  # only its version shows it
        with pytest.raises(stillframe.TornSnapshotError, match=r"layers\.0\.weight") as caught:
            handle.result()
    assert caught.value.tensors == ("layers.0.weight",)
    assert_holds(path, {"old": BASE})
    report = stillframe.async_save(model.state_dict(), path).result()
    assert report is not None and report.deferred_nbytes == 0


def test_samples_find_a_change_that_no_version_shows(tmp_path):
    model, _ = trained()
    with held_until_awaited("lane_copy"):
        handle = stillframe.async_save(model.state_dict(), tmp_path / "a.safetensors")
        model.layers[0].weight.data.add_(1)
        with pytest.raises(stillframe.TornSnapshotError, match=r"layers\.0\.weight"):
            handle.result()


def test_check_mutation_finds_a_single_byte(tmp_path):
    model, _ = trained()
    path = tmp_path / "a.safetensors"
    stillframe.async_save(model.state_dict(), path, check_mutation=True).result()
    assert_holds(path, model.state_dict())
    with held_until_awaited("lane_copy"):
        handle = stillframe.async_save(model.state_dict(), path, check_mutation=True)
        model.layers[0].weight.data.view(-1)[12_345] += 1
        with pytest.raises(stillframe.TornSnapshotError, match=r"layers\.0\.weight"):
            handle.result()


def test_captured_tensors_may_change_after_the_call(tmp_path):
    tensors = {"x": torch.arange(100_000), "y": torch.arange(7.0)}
    wanted = copied(tensors)
    with held("pwrite"):
        handle = stillframe.async_save(tensors, tmp_path / "a.safetensors")
        for tensor in tensors.values():
            tensor.fill_(9)
    handle.result()
    assert_holds(tmp_path / "a.safetensors", wanted)


# ---- how a save ends ----


@pytest.mark.parametrize(
    ("call", "phase"),
    [("pwrite", "write"), ("ftruncate", "write"), ("fdatasync", "sync"), ("rename", "rename")],
)
def test_failed_save_keeps_the_old_file(call, phase, tmp_path):
    path = tmp_path / "a.safetensors"
    stillframe.save({"old": BASE}, path)
    tensors = {"x": torch.arange(100_001, dtype=torch.uint8)}
    with (
        fault(call, err=errno.ENOSPC, sticky=True),
        pytest.raises(stillframe.SaveError) as caught,
    ):
        stillframe.save(tensors, path)
    assert (caught.value.errno, caught.value.phase) == (errno.ENOSPC, phase)
    assert_holds(path, {"old": BASE})


def test_cancelled_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    stillframe.save({"old": BASE}, path)
    with held("pwrite"):
        handle = stillframe.async_save({"x": torch.arange(5)}, path)
        assert handle.cancel()
    with pytest.raises(CancelledError):
        handle.result()
    assert handle.state == "cancelled"
    assert_holds(path, {"old": BASE})


def test_saves_of_both_formats_keep_their_order(tmp_path):
    path = tmp_path / "a.safetensors"
    with slow("pwrite", 0.01):
        stillframe.async_save({"x": torch.zeros(100_000)}, path)
        stillframe.async_save({"x": 1}, path, format="torch")
        last = stillframe.async_save({"y": BASE}, path)
        last.result()
    assert_holds(path, {"y": BASE})


def test_save_with_durable_false_writes_the_whole_file(tmp_path):
    path = tmp_path / "a.safetensors"
    with slow("fdatasync", 0) as injected:
        stillframe.save({"x": BASE}, path, durable=False)
        assert injected.calls("fdatasync") == 0
    assert_holds(path, {"x": BASE})


def test_file_has_whole_extents_on_a_disk(disk_path: Path, engine):
    model, optimizer = trained()
    wanted = copied(model.state_dict())
    handle = stillframe.async_save(model.state_dict(), disk_path / "a.safetensors", engine=engine)
    step(model, optimizer)
    report = handle.result()
    assert report is not None and report.nbytes % PAGE  # it ends within a page
    assert_holds(disk_path / "a.safetensors", wanted)
