"""Round trips: stock torch.load reads a saved file, in each of its modes, as it reads a file of
torch.save."""

import os
import shutil
import subprocess
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import fix_graphs
import pytest
import stillframe
import torch
from fix_graphs import assert_same, assert_same_outcome, bytes_of, outcome, tensor_of
from hypothesis import HealthCheck, given, settings
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.serialization import config as serialization_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its prototypes

saved = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


@contextmanager
def files(obj):
    """Save the same object with stillframe and with torch.save; return both paths."""
    with tempfile.TemporaryDirectory() as directory:
        ours, stock = Path(directory, "ours.pt"), Path(directory, "stock.pt")
        stillframe.save(obj, ours, durable=False)
        torch.save(obj, stock)
        yield ours, stock


@contextmanager
def calculated_offsets():
    before = serialization_config.load.calculate_storage_offsets
    serialization_config.load.calculate_storage_offsets = True
    try:
        yield
    finally:
        serialization_config.load.calculate_storage_offsets = before


def with_calculated_offsets(path, **options):
    with calculated_offsets():
        return torch.load(path, **options)


MODES = {
    "as it is": lambda path: torch.load(path, weights_only=False),
    "weights_only": lambda path: torch.load(path, weights_only=True),
    "mmap": lambda path: torch.load(path, weights_only=False, mmap=True),
    "mmap and weights_only": lambda path: torch.load(path, weights_only=True, mmap=True),
    "to the cpu": lambda path: torch.load(path, weights_only=False, map_location="cpu"),
    "to a device": lambda path: torch.load(
        path, weights_only=False, map_location=torch.device("cpu")
    ),
    "by a dict": lambda path: torch.load(path, weights_only=False, map_location={"cpu": "cpu"}),
    "by a function": lambda path: torch.load(
        path, weights_only=False, map_location=lambda storage, _tag: storage
    ),
    "to meta": lambda path: torch.load(path, weights_only=False, map_location="meta"),
    "to meta and weights_only": lambda path: torch.load(
        path, weights_only=True, map_location="meta"
    ),
    "mmap, calculated offsets": lambda path: with_calculated_offsets(
        path, weights_only=False, mmap=True
    ),
    "meta, calculated offsets": lambda path: with_calculated_offsets(
        path, weights_only=False, map_location="meta"
    ),
    "stillframe.load": lambda path: stillframe.load(path, weights_only=False),
    "stillframe.load, weights_only": lambda path: stillframe.load(path),
    "stillframe.load, verified": lambda path: stillframe.load(
        path, weights_only=False, verify=True
    ),
    "stillframe.load to the cpu": lambda path: stillframe.load(path, "cpu", weights_only=False),
}

# A few objects that together have every kind of content.
SAMPLES = {
    "plain": lambda: {"a": tensor_of(torch.float32, (5, 3)), "n": 3, "text": "K\x00Q"},
    "every dtype": lambda: [tensor_of(dtype, (3, 2)) for dtype in fix_graphs.DTYPES],
    "special": lambda: {
        name: make(3) for name, make in fix_graphs.SPECIAL.items() if name != "meta"
    },
    "checkpoint": lambda: fix_graphs.lightning_checkpoint(1),
    "tied": lambda: (lambda p: [p, {"again": p, "view": p.detach()[1:]}])(
        torch.nn.Parameter(tensor_of(torch.float32, (4, 4)))
    ),
    "empty": dict,
    "no tensor": lambda: ["text", 1, None],
    "empty tensors": lambda: [torch.empty(0), torch.empty(3, 0), torch.empty(0).bool()],
    "many small": lambda: [tensor_of(torch.float32, (n % 7,), n) for n in range(300)],
    "odd lengths": lambda: [tensor_of(torch.uint8, (n,), n) for n in (1, 63, 64, 65, 4095, 4097)],
    "some large": lambda: [tensor_of(torch.uint8, (n,)) for n in (3 << 20, 1, (1 << 20) + 17)],
}


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("sample", sorted(SAMPLES))
def test_sample_loads_in_each_mode_as_a_file_of_torch_save(sample, mode):
    with files(SAMPLES[sample]()) as (ours, stock):
        assert_same_outcome(outcome(MODES[mode], ours), outcome(MODES[mode], stock))


@saved
@given(fix_graphs.trees())
def test_any_tree_loads_as_from_torch_save(tree):
    with files(tree) as (ours, stock):
        for mode in ("as it is", "mmap", "stillframe.load, verified"):
            loaded = MODES[mode](ours)
            assert_same(loaded, MODES[mode](stock))
            del loaded


@saved
@given(fix_graphs.trees(fix_graphs.SAFE_LEAVES))
def test_any_tree_loads_in_each_mode_as_from_torch_save(tree):
    with files(tree) as (ours, stock):
        for load in MODES.values():
            assert_same_outcome(outcome(load, ours), outcome(load, stock))


@pytest.mark.parametrize("sample", sorted(SAMPLES))
def test_unzip_and_zipfile_accept_a_file(sample):
    with files(SAMPLES[sample]()) as (ours, _stock):
        with zipfile.ZipFile(ours) as archive:
            assert archive.testzip() is None
            names = {name.partition("/")[2] for name in archive.namelist()}
        assert {"data.pkl", "byteorder", "version", ".format_version"} <= names
        if shutil.which("unzip") is None:
            pytest.skip("there is no unzip here")
        done = subprocess.run(["unzip", "-t", ours], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_meta_load_knows_where_the_bytes_are():
    tree = [tensor_of(torch.uint8, (n,), n) for n in (100, 5000, 7)]
    with files(tree) as (ours, stock):
        raw = ours.read_bytes()
        for mode in ("to meta", "meta, calculated offsets"):
            if MODES[mode](stock)[0].untyped_storage()._checkpoint_offset is None:
                pytest.skip(f"torch {torch.__version__} says it of no file")
            for tensor, loaded in zip(tree, MODES[mode](ours), strict=True):
                offset = loaded.untyped_storage()._checkpoint_offset
                assert raw[offset : offset + tensor.numel()] == bytes_of(tensor.untyped_storage())


def test_a_load_into_fake_tensors_is_as_from_torch_save():
    with files(SAMPLES["plain"]()) as (ours, stock):
        made = []
        for path in (ours, stock):
            with FakeTensorMode():
                made.append(torch.load(path))
        one, other = (tree["a"] for tree in made)
        assert isinstance(one, FakeTensor) and isinstance(other, FakeTensor)
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def test_loaded_parameters_can_be_trained_further():
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with files({"model": module.state_dict(), "optim": optimizer.state_dict()}) as (ours, _stock):
        tree = torch.load(ours)
    other = torch.nn.Linear(3, 2)
    other_optimizer = torch.optim.AdamW(other.parameters())
    other.load_state_dict(tree["model"])
    other_optimizer.load_state_dict(tree["optim"])
    for one, its in ((module, optimizer), (other, other_optimizer)):
        its.zero_grad()
        one(torch.ones(1, 3)).square().sum().backward()
        its.step()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loaded_state_can_be_saved_again():
    with files(SAMPLES["special"]()) as (ours, _stock):
        first = torch.load(ours, weights_only=False)
    with files(first) as (ours, _stock):
        assert_same(torch.load(ours, weights_only=False), first)


def test_a_mapped_file_can_be_saved_over():
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.pt")
        stillframe.save({"a": torch.arange(5000.0)}, path)
        mapped = torch.load(path, mmap=True)
        stillframe.save(mapped, path)
        assert torch.equal(torch.load(path)["a"], torch.arange(5000.0))


REFUSED = {
    "function": lambda: {"w": torch.ones(2), "f": lambda: None},
    "two types": lambda: (lambda t: [t, t.view(torch.int32)])(torch.ones(2)),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "meta storage": lambda: torch.UntypedStorage(8, device="meta"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_object_that_torch_save_refuses_is_refused_and_keeps_the_old_file(name, tmp_path):
    path = tmp_path / "a.pt"
    stillframe.save({"old": torch.ones(1)}, path)
    before = path.read_bytes()
    tree = REFUSED[name]()
    stock = outcome(torch.save, tree, tmp_path / "stock.pt")
    os.unlink(tmp_path / "stock.pt")
    assert stock[0] != "returned"
    assert outcome(stillframe.async_save, tree, path) == stock
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.pt"]
