"""The program of `make large`, with states a thousandth as large."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SMALL = ("--divisor", "1000", "--limit", "120")
COMMANDS = ("verify", "inspect")  # each runs as a process


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ("states", "ways", "large")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("saving", ["async_save", "safetensors", "dcp.save"])
def test_every_way_loads_a_small_state(saving, scripts, tmp_path, capsys):
    loads = [way for way in scripts.ways.loads_of(saving, every=True) if way not in COMMANDS]
    chosen = ("--states", "30 deferred", "--saves", saving, "--loads", *loads)
    assert scripts.large.main([*SMALL, "--dir", str(tmp_path), *chosen]) == 0
    output = capsys.readouterr().out
    assert f"{1 + len(loads)} ok, 0 WRONG, 0 HANG, 0 ERROR, 0 skipped" in output
    assert not list(tmp_path.iterdir())


def test_hang_counts_as_one_failure_and_prints_the_threads_stacks(
    scripts, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(scripts.large, "SLOWEST", 1e18)
    chosen = ("--states", "260 MiB", "--saves", "torch.save", "--loads", "load")
    # The save takes far longer than its limit, even if the watching thread starts late.
    short = ("--divisor", "4", "--limit", "0.000001", "--dir", str(tmp_path))
    assert scripts.large.main([*short, *chosen]) == 1
    output = capsys.readouterr().out
    assert "0 ok, 0 WRONG, 1 HANG" in output and "most recent call first" in output
    assert not list(tmp_path.iterdir())


def test_state_that_does_not_fit_is_skipped_by_name(scripts, tmp_path, capsys):
    chosen = ("--states", "9 GB mixed", "--saves", "save", "--memory", "0.9")
    assert scripts.large.main(["--dir", str(tmp_path), *chosen]) == 2
    output = capsys.readouterr().out
    assert "skipped 9 GB mixed: save  takes 9.7 GB of memory, and may have 0.9" in output


@pytest.mark.parametrize("name", ["past 4 GiB", "30 deferred"])
def test_every_wrong_byte_and_value_is_found(name, scripts):
    states = scripts.states
    state = states.STATES[name].scaled(1000)
    tree = states.make(state)
    assert states.find_wrong(tree, state) == ""
    with torch.no_grad():
        last = list(tree["state_dict"].values())[1].view(torch.uint8)
        last[-1] ^= 1
    length = len(last)
    assert states.find_wrong(tree, state) == (
        f"1 of {len(state.sizes)} tensors: t00001 differs from byte {length - 8} on"
    )
    tree["epoch"] = 4
    assert states.find_wrong(tree, state).startswith("epoch is 4; 1 of")
    untouched = states.find_wrong(states.make_target(state), state)
    assert f"{len(state.sizes)} of {len(state.sizes)} tensors" in untouched
