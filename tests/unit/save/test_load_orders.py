"""Loads of files whose records share pieces, in every order of asking, by lowered thresholds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import stillframe
import torch
from stillframe import _core
from stillframe._load import fill, restore
from stillframe.errors import StillframeError

KIB = 1 << 10


@pytest.fixture(autouse=True)
def low_thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A KiB stands for a GiB of a load's memory, a page for a piece of 1 MiB."""
    _core._set_limits(reader_piece_bytes=4096, zip64_bytes=24 * KIB, zip64_records=5)
    monkeypatch.setattr(restore, "_AHEAD_BYTES", 8 * KIB)
    monkeypatch.setattr(restore, "_BATCH_BYTES", 1 * KIB)
    monkeypatch.setattr(restore, "_DEVICE_AHEAD_BYTES", 2 * KIB)
    monkeypatch.setattr(fill, "_AHEAD_BYTES", 1 * KIB)
    yield
    _core._set_limits()


@pytest.fixture
def only_the_fast_road(monkeypatch: pytest.MonkeyPatch) -> None:
    def general(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the file was handed to torch.load")

    monkeypatch.setattr(torch, "load", general)


def tensors_of(*sizes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return {
        f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for i, size in enumerate(sizes)
    }


def assert_same(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


STATES = {
    "one long tensor that is not the last": (8800, 10),
    "two long ones with another behind": (4800, 4800, 10),
    "the same for a function as map_location": (1200, 1200, 2080, 10),
    "many, then a long one": (*[64] * 30, 9600, 64),
    "all lengths": tuple(random.Random(5).randrange(9000) for _ in range(40)),
    "empty ones between": (0, 9000, 0, 0, 5000, 0),
}
LOCATIONS = {
    "none": None,
    "cpu": "cpu",
    "function": lambda storage, place: storage,
    "dict": {"cuda:0": "cpu"},
}


@pytest.mark.parametrize("sizes", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("map_location", LOCATIONS.values(), ids=LOCATIONS.keys())
@pytest.mark.usefixtures("only_the_fast_road")
def test_load_ends_however_long_the_tensors_are(tmp_path, sizes, map_location):
    state = tensors_of(*sizes)
    stillframe.save(state, tmp_path / "a.pt")
    for verify in (True, False):
        assert_same(stillframe.load(tmp_path / "a.pt", map_location, verify=verify), state)


@pytest.mark.parametrize("sizes", STATES.values(), ids=STATES.keys())
@pytest.mark.usefixtures("only_the_fast_road")
def test_load_into_fills_every_tensor(tmp_path, sizes):
    state = tensors_of(*sizes)
    stillframe.save({**state, "epoch": torch.tensor(3)}, tmp_path / "a.pt")
    straight = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert_same(stillframe.load(tmp_path / "a.pt", into=straight), state)
    # Strided targets get their bytes by way of memory that is found ahead.
    strided = {name: torch.zeros(2 * len(t), dtype=t.dtype)[::2] for name, t in state.items()}
    assert_same(stillframe.load(tmp_path / "a.pt", into=strided), state)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("only_the_fast_road")
def test_records_are_loaded_in_any_order_of_the_pickle(tmp_path, seed):
    order = random.Random(seed)
    state = tensors_of(*(order.choice((0, 40, 700, 4096, 9000)) for _ in range(25)))
    path = tmp_path / "a.pt"
    stillframe.save(state, path)
    names = list(state)
    if seed == 0:
        names.reverse()
    elif seed > 1:
        order.shuffle(names)
    with path.open("rb") as file:
        core = _core.restore(file.fileno(), True)[1]
        assert core is not None
        archive = restore.open_archive(core, file.fileno(), path.stat().st_size, None, {})
        try:
            for name in names:
                record = f"data/{name.removeprefix('t')}"
                assert archive.get_record(record) == bytes(state[name].tolist()), name
        finally:
            core.close()


def test_wait_that_only_the_caller_could_end_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    stillframe.save(tensors_of(5000, 5000, 10), path)
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
