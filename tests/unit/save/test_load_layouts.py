"""Loads of random layouts, with records requested in random orders and every size threshold
lowered.

Each load ends, and gives the result of torch.load.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fix_limits
import pytest
import stillframe
import torch
from fix_graphs import assert_same_outcome, outcome, tensor_of
from fix_limits import CORE, KIB, PAGE
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stillframe import _core
from stillframe._load import restore
from stillframe.errors import StillframeError

random_layouts = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=80)

# A record has a header of about 100 bytes before it, and up to 24 bytes after it.
_EDGES = (PAGE, 2 * PAGE, CORE["zip64_bytes"], 2 * KIB, 8 * KIB)
sizes = st.one_of(
    st.integers(0, 200),
    st.sampled_from(_EDGES).flatmap(lambda edge: st.integers(edge - 256, edge + 64)),
    st.integers(0, 5 * PAGE),
)
lists = st.lists(sizes, max_size=24)
# Long records among others: at either end, next to each other, and after empty ones.
LONG = [
    [8800, 10],
    [4800, 4800, 10],
    [1200, 1200, 2080, 10],
    [*[64] * 30, 9600, 64],
    [0, 9000, 0, 0, 5000, 0],
]
LOCATIONS: dict[str, Any] = {
    "nothing": None,
    "a string": "cpu",
    "a device": torch.device("cpu"),
    "an empty dict": {},
    "a dict": {"cpu": "cpu"},
    "a function": lambda storage, location: storage,
    "a function that copies": lambda storage, location: storage.clone(),
    "a function that declines": lambda storage, location: None,
}


def with_long_records(*rest: Any) -> Callable[[Any], Any]:
    """Add the lists of LONG as examples; `rest` are the test's other arguments."""

    def decorate(test: Any) -> Any:
        for lengths in LONG:
            test = example(lengths, *rest, random.Random(0))(test)
        return test

    return decorate


@pytest.fixture(autouse=True, scope="module")
def low_limits() -> Iterator[None]:
    with fix_limits.lowered():
        yield


@contextmanager
def refused_to_torch() -> Iterator[None]:
    """Make a load fail if it leaves its file to torch.load."""

    def general(*_: Any, **__: Any) -> Any:
        raise AssertionError("the file was handed to torch.load")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", general)
        yield


def state_of(lengths: list[int], order: random.Random) -> dict[str, Any]:
    """Return tensors of these lengths: ties, views, and some with elements of eight bytes."""
    state: dict[str, Any] = {"epoch": 3, "tensors": []}
    for number, length in enumerate(lengths):
        tensor = tensor_of(torch.uint8, (length,), number)
        kind = order.randrange(6)
        if kind == 0:
            tensor = tensor_of(torch.int64, (length // 8,), number)
        elif kind == 1:
            state[f"view {number}"] = tensor[length // 3 :: 2]
        elif kind == 2:
            state[f"tied {number}"] = tensor
        state["tensors"].append(tensor)
    order.shuffle(state["tensors"])
    return state


def by_stillframe(state: Any, path: Path, _: random.Random) -> None:
    stillframe.save(state, path, durable=False)


def by_torch(state: Any, path: Path, _: random.Random) -> None:
    torch.save(state, path)


def by_torch_in_another_order(state: Any, path: Path, order: random.Random) -> None:
    """Write torch's file with its records in a random order, unlike the pickle's."""
    torch.save(state, path)
    reader = torch._C.PyTorchFileReader(str(path))
    last = ("version", ".data/serialization_id")  # the writer puts these at the end
    records = {name: reader.get_record(name) for name in reader.get_all_records()}
    names = [name for name in records if name not in last]
    order.shuffle(names)
    writer = torch._C.PyTorchFileWriter(str(path), True, 64)
    for name in names:
        writer.write_record(name, records[name], len(records[name]))
    writer.write_end_of_file()


WRITERS: list[Callable[[Any, Path, random.Random], None]]
WRITERS = [by_stillframe, by_torch, by_torch_in_another_order]


@pytest.mark.parametrize("write", WRITERS)
@random_layouts
@with_long_records("nothing", True)
@with_long_records("a function", False)
@given(lists, st.sampled_from(sorted(LOCATIONS)), st.booleans(), st.randoms())
def test_any_layout_loads_as_by_torch(write, lengths, location, verify, order):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.pt")
        write(state_of(lengths, order), path, order)
        theirs = outcome(torch.load, path, LOCATIONS[location])
        with refused_to_torch():
            ours = outcome(stillframe.load, path, LOCATIONS[location], verify=verify)
        assert_same_outcome(ours, theirs)
        assert_same_outcome(
            outcome(stillframe.load, path, mmap=True), outcome(torch.load, path, mmap=True)
        )


@pytest.mark.parametrize("write", WRITERS)
@random_layouts
@with_long_records()
@given(lists, st.randoms())
def test_any_layout_fills_tensors_as_by_torch(write, lengths, order):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.pt")
        write(state_of(lengths, order), path, order)
        expected = torch.load(path)
        into = {name: empty_like(value, order) for name, value in expected.items()}
        with refused_to_torch():
            stillframe.load(path, into=into)
        tensors, views = into.pop("tensors"), into
        assert all(map(torch.equal, tensors, expected.pop("tensors")))
        assert views.pop("epoch") == expected.pop("epoch")
        assert all(torch.equal(views[name], expected[name]) for name in expected)


def empty_like(value: Any, order: random.Random) -> Any:
    """Return a target for part of a state; some tensors can be read into directly, others not."""
    if isinstance(value, list):
        return [empty_like(each, order) for each in value]
    if not isinstance(value, torch.Tensor):
        return None
    if order.random() < 0.5:
        return torch.zeros_like(value)
    return torch.zeros(*value.shape, 2, dtype=value.dtype)[..., 0]


@random_layouts
@with_long_records(True, 8 * KIB)
@with_long_records(False, 8 * KIB)
@given(
    st.lists(sizes, min_size=1, max_size=24), st.booleans(), st.integers(0, 64 * KIB), st.randoms()
)
def test_records_are_returned_in_any_order(lengths, backwards, ahead, order):
    tensors = [tensor_of(torch.uint8, (length,), n) for n, length in enumerate(lengths)]
    numbers = list(range(len(tensors)))
    if backwards:
        numbers.reverse()
    else:
        order.shuffle(numbers)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.pt")
        stillframe.save(tensors, path, durable=False)
        with path.open("rb") as file:
            core = _core.restore(file.fileno(), True)[1]
            assert core is not None
            archive = restore.Archive(core, file.fileno(), path.stat().st_size, ahead, {})
            try:
                for number in numbers[: order.randrange(len(numbers)) + 1]:
                    found = archive.get_record(f"data/{number}")
                    assert found == bytes(tensors[number].numpy()), number
            finally:
                core.close()


def test_wait_that_only_the_caller_could_end_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    stillframe.save([tensor_of(torch.uint8, (length,)) for length in (5000, 5000, 10)], path)
    with path.open("rb") as file:
        core = _core.restore(file.fileno(), True)[1]
        assert core is not None
        index = core.find("data/0")
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        core.into(0, [memory.data_ptr()] * (index + 1))
        core.go(index + 1)
        assert core.reach(index) > index + 1
        with pytest.raises(StillframeError, match="before it and its neighbours had their memory"):
            core.wait(index)
        core.close()
