"""What is let go of: by a save that is refused, one that is cancelled, one that has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from stillframe._save import completion, gate
from stillframe.testing import held, slow


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose state a save defers."""
    model = torch.nn.Linear(1024, 2048)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(2, 1024)).sum().backward()
        optimizer.step()
    return model, optimizer


def is_quiet() -> bool:
    """No step of any thread has to wait for anything."""
    return not (gate._calls or gate._pendings or gate._late or gate.anything_copied())


def test_a_refused_save_is_not_waited_for_nor_kept(tmp_path: Path, trained: Any) -> None:
    model, _ = trained
    engine = stillframe.Engine(max_in_flight=1, when_busy="raise")
    with engine, held("fdatasync"):
        stillframe.async_save({"w": torch.ones(9)}, tmp_path / "a.pt", engine=engine)
        under_way = dict(completion.in_flight)
        for _ in range(3):
            with pytest.raises(stillframe.BusyError) as refused:
                stillframe.async_save(model.state_dict(), tmp_path / "b.pt", engine=engine)
            assert is_quiet() and completion.in_flight.keys() <= under_way.keys()
            del refused  # with its frames, and what they hold


@pytest.mark.parametrize("end", [lambda save: save.cancel(), lambda save: save.result()])
def test_a_save_that_has_ended_holds_nothing(
    tmp_path: Path, trained: Any, end: Callable[[Any], object]
) -> None:
    model, _ = trained
    with slow("lane_copy", 0.02):
        save = stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
        end(save)
        stillframe.wait_all()
    assert save.done() and is_quiet() and not completion.in_flight
    assert save._skeleton is None and save._deferral is None


def test_a_handle_of_a_save_that_has_ended_keeps_no_pickle(tmp_path: Path) -> None:
    with held("fdatasync"):
        save = stillframe.async_save({"w": torch.ones(9)}, tmp_path / "a.pt")
        pickled = save._skeleton.data
    save.result()
    assert sys.getrefcount(pickled) == 2  # this function's, and the call's


def test_a_change_of_one_element_that_its_version_tells_of_is_found(
    tmp_path: Path, trained: Any
) -> None:
    """Of two millions: no sample need lie there."""
    model, _ = trained
    with slow("lane_copy", 0.1):
        save = stillframe.async_save({"w": model.weight}, tmp_path / "a.pt")
        with torch.no_grad():
            model.weight.view(-1)[1_234_567] += 1
        assert isinstance(save.exception(), stillframe.TornSnapshotError)
    assert not (tmp_path / "a.pt").exists()
