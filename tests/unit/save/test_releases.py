"""References that saves drop when they are refused, cancelled or ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import stillframe
import torch
from fix_holds import held_until_awaited
from stillframe._save import completion
from stillframe._save.core_save import CoreSave
from stillframe._watch import gate
from stillframe.testing import held, slow


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model whose state a save defers."""
    model = torch.nn.Linear(1024, 2048)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(2, 1024)).sum().backward()
        optimizer.step()
    return model, optimizer


def is_quiet() -> bool:
    """Return whether no step of any thread would have to wait."""
    return not (
        gate.unlaunched_calls or gate._pendings or gate._deferrals or gate.is_any_copy_pending()
    )


def test_refused_save_is_neither_waited_for_nor_kept(tmp_path, trained):
    model, _ = trained
    engine = stillframe.Engine(max_in_flight=1, when_busy="raise")
    with engine, held("fdatasync"):
        stillframe.async_save({"w": torch.ones(9)}, tmp_path / "a.pt", engine=engine)
        under_way = dict(completion.in_flight)
        for _ in range(3):
            with pytest.raises(stillframe.BusyError) as refused:
                stillframe.async_save(model.state_dict(), tmp_path / "b.pt", engine=engine)
            assert is_quiet() and completion.in_flight.keys() <= under_way.keys()
            del refused  # drops its frames and the objects in them


@pytest.mark.parametrize("end", [lambda save: save.cancel(), lambda save: save.result()])
def test_ended_save_keeps_no_objects_alive(tmp_path, trained, end):
    model, _ = trained
    with slow("lane_copy", 0.02):
        save = stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
        end(save)
        stillframe.wait_all()
    assert save.done() and is_quiet() and not completion.in_flight
    assert save._skeleton is None and not save._verdict.is_needed


def test_handle_of_an_ended_save_keeps_no_pickle(tmp_path):
    with held("fdatasync"):
        save = stillframe.async_save({"w": torch.ones(9)}, tmp_path / "a.pt")
        pickled = save._skeleton.data
    save.result()
    assert sys.getrefcount(pickled) == 2  # the references of this function and of the call


class AfterSubmit:
    """A fake ticket that calls a function after `submit`."""

    def __init__(self, ticket: Any, then: Callable[[Any], object]) -> None:
        self._ticket, self._then = ticket, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ticket, name)

    def submit(self, *args: Any) -> None:
        self._ticket.submit(*args)
        self._then(self._ticket)


def after_submit(patch: pytest.MonkeyPatch, then: Callable[[Any], object]) -> None:
    def init(self: Any, ticket: Any, *args: Any, **options: Any) -> None:
        made(self, AfterSubmit(ticket, then), *args, **options)

    made = CoreSave.__init__
    patch.setattr(CoreSave, "__init__", init)


def test_a_step_waits_for_a_save_whose_call_was_interrupted_after_its_launch(
    tmp_path, trained, monkeypatch
):
    def interrupt(ticket: Any) -> None:
        raise KeyboardInterrupt

    model, optimizer = trained
    before = model.weight.detach().clone()
    after_submit(monkeypatch, interrupt)
    with held_until_awaited("lane_copy"):
        with pytest.raises(KeyboardInterrupt):
            stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
        optimizer.step()
    stillframe.wait_all()
    assert not torch.equal(model.weight, before)
    assert torch.equal(stillframe.load(tmp_path / "a.pt")["weight"], before)
    assert is_quiet()


def test_a_save_that_ends_within_its_call_is_not_waited_for(tmp_path, trained, monkeypatch):
    def wait_for_its_end(ticket: Any) -> None:
        while ticket.number in completion.in_flight:
            time.sleep(0.001)

    model, _ = trained
    after_submit(monkeypatch, wait_for_its_end)
    save = stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
    assert is_quiet()  # before any call asks for its state
    save.result()


def test_staging_future_is_done_before_the_saves_end(tmp_path, trained):
    model, _ = trained
    with held("fdatasync"):
        with held("lane_copy"):
            save = stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
            future = save.staging_completion
            assert not future.done()
        assert future.result(60) is None and not save.done()
    save.result()
