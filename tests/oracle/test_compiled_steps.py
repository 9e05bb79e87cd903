"""Steps compiled as a single graph, inside which no hook can wait."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import stillframe
import torch
from stillframe._watch import gate
from stillframe.offload import offload_layers, offload_optimizer_state
from stillframe.testing import held

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch.compile's imports give it

Optimizers = Callable[..., torch.optim.Optimizer]
WHOLE = [torch.optim.Muon, torch.optim.Adafactor]  # optimizers of torch that compile to one graph


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def training(kind: Optimizers) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    return model, kind(model.parameters(), lr=0.01)


def backward(model: torch.nn.Linear) -> None:
    model.zero_grad()
    model(torch.ones(2, 64)).square().sum().backward()


def compiled(optimizer: torch.optim.Optimizer, fullgraph: bool = True) -> Callable[[], object]:
    return torch.compile(lambda: optimizer.step(), fullgraph=fullgraph, backend="eager")


@pytest.mark.parametrize("kind", WHOLE)
def test_fullgraph_step_compiles_and_trains_as_an_eager_one(kind):
    weights = []
    for whole in (False, True):
        model, optimizer = training(kind)
        step = compiled(optimizer) if whole else optimizer.step
        for _ in range(3):
            backward(model)
            step()
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("kind", WHOLE)
def test_first_fullgraph_step_waits_for_the_copy_of_a_save(tmp_path, kind, monkeypatch):
    """Earlier eager steps have made the weight deferrable."""
    model, optimizer = training(kind)
    for _ in range(4):
        backward(model)
        optimizer.step()
    backward(model)
    step, expected = compiled(optimizer), model.weight.detach().clone()
    wait = gate.wait
    with contextlib.ExitStack() as copying:
        copying.enter_context(held("lane_copy"))
        handle = stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
        monkeypatch.setattr(gate, "wait", lambda: (copying.close(), wait()))
        step()
    assert handle.result().deferred_nbytes > 0
    assert torch.equal(stillframe.load(tmp_path / "a.pt")["weight"], expected)
    assert not torch.equal(model.weight, expected)


@pytest.mark.parametrize("kind", WHOLE)
def test_state_of_a_fullgraph_step_is_captured_with_a_fallback(tmp_path, kind):
    model, optimizer = training(kind)
    for _ in range(4):
        backward(model)
        optimizer.step()
    step = compiled(optimizer)
    for number in range(3):
        backward(model)
        step()
        expected = model.weight.detach().clone()
        handle = stillframe.async_save(model.state_dict(), tmp_path / f"{number}.pt")
        step()
        report = handle.result()
        assert report.deferred_nbytes == 0
        assert any("fullgraph=True" in sentence for sentence in report.fallbacks)
        assert torch.equal(stillframe.load(tmp_path / f"{number}.pt")["weight"], expected)


def test_each_optimizer_of_a_compiled_function_is_captured(tmp_path):
    """torch does not use a graph traced for one optimizer for another."""
    for number in range(2):
        model, optimizer = training(torch.optim.Muon)
        for _ in range(4):
            backward(model)
            optimizer.step()
        backward(model)
        _step_of(optimizer)
        report = stillframe.async_save(model.state_dict(), tmp_path / f"{number}.pt").result()
        assert report.deferred_nbytes == 0


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _step_of(optimizer: torch.optim.Optimizer) -> None:
    torch.compile(_step, fullgraph=True, backend="eager")(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.AdamW, torch.optim.SGD])
def test_state_of_a_step_with_graph_breaks_is_deferred(tmp_path, kind):
    model, optimizer = training(kind)
    step = compiled(optimizer, fullgraph=False)
    for _ in range(4):
        backward(model)
        step()
    backward(model)
    expected = model.weight.detach().clone()
    handle = stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
    step()
    assert handle.result().deferred_nbytes > 0
    assert torch.equal(stillframe.load(tmp_path / "a.pt")["weight"], expected)


def layer(optimizer: torch.optim.Optimizer) -> torch.nn.Linear:
    """Return a layer whose weight is the optimizer's first parameter."""
    made = torch.nn.Linear(64, 64, bias=False)
    made.weight = optimizer.param_groups[0]["params"][0]
    return made


def test_fullgraph_step_of_offloaded_layers_is_refused():
    """A step must not write weights while they are copied to the device."""
    model, optimizer = training(torch.optim.Muon)
    backward(model)
    with (
        offload_layers([layer(optimizer)], device="cpu"),
        pytest.raises(RuntimeError, match="_begin_step_uncompiled"),
    ):
        compiled(optimizer)()


def test_compiled_step_is_refused_while_its_layers_are_offloaded():
    """Its graph, which cannot wait, was made before."""
    model, optimizer = training(torch.optim.Muon)
    step = compiled(optimizer)
    for _ in range(2):
        backward(model)
        step()
    handle = offload_layers([layer(optimizer)], device="cpu")
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="_begin_step_uncompiled"):
        step()
    assert torch.equal(model.weight, before)
    handle.remove()
    step()
    assert not torch.equal(model.weight, before)


def test_offloaded_layers_of_another_model_leave_a_fullgraph_step_alone():
    weights = []
    for offloads in (False, True):
        other = torch.nn.Linear(64, 64)
        with contextlib.ExitStack() as offloaded:
            if offloads:
                offloaded.enter_context(offload_layers([other], device="cpu"))
            model, optimizer = training(torch.optim.Muon)
            step = compiled(optimizer)
            backward(model)
            step()
        backward(model)
        step()  # the layers of the other model are on the CPU again
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_fullgraph_step_with_offloaded_state_is_refused(is_compiled):
    """The state returns to its device group by group, in the step."""
    model, optimizer = training(torch.optim.Muon)
    step = compiled(optimizer)
    backward(model)
    (step if is_compiled else optimizer.step)()
    with offload_optimizer_state(optimizer), pytest.raises(RuntimeError, match="_before_step"):
        step()
    other_model, other = training(torch.optim.Muon)
    backward(other_model)
    with offload_optimizer_state(optimizer):
        compiled(other)()


@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_parameter_that_a_fullgraph_step_writes_too_is_captured(tmp_path, first):
    """Another optimizer owns it, whose own steps would wait for the copy."""
    model, optimizer = training(torch.optim.Muon)
    other = torch.optim.Adafactor(model.parameters(), lr=0.01)
    step = compiled(other)
    if first == "compiled":
        backward(model)
        step()
    for _ in range(4):
        backward(model)
        optimizer.step()
    if first == "eager":
        backward(model)
        step()
    model.zero_grad()
    expected = model.weight.detach().clone()
    with held("lane_copy"):
        handle = stillframe.async_save(model.state_dict(), tmp_path / "a.pt")
        backward(model)
        step()
    assert handle.result().deferred_nbytes == 0
    assert torch.equal(stillframe.load(tmp_path / "a.pt")["weight"], expected)
    assert not torch.equal(model.weight, expected)


def test_first_fullgraph_step_waits_for_a_save_that_another_thread_submits(tmp_path, monkeypatch):
    """The save has chosen what it copies late, and is not launched yet."""
    model, optimizer = training(torch.optim.Muon)
    for _ in range(4):
        backward(model)
        optimizer.step()
    backward(model)
    step, expected = compiled(optimizer), model.weight.detach().clone()
    chosen, go, wait, handles = (
        threading.Event(),
        threading.Event(),
        gate._wait_for_unlaunched_calls,
        [],
    )
    track = gate.track

    def late(*given: object) -> None:
        chosen.set()
        assert go.wait(60)
        track(*given)

    monkeypatch.setattr(gate, "track", late)
    monkeypatch.setattr(gate, "_wait_for_unlaunched_calls", lambda: (go.set(), wait()))
    saver = threading.Thread(
        target=lambda: handles.append(stillframe.async_save(model.state_dict(), tmp_path / "a.pt"))
    )
    saver.start()
    assert chosen.wait(60)
    step()
    go.set()
    saver.join()
    assert handles[0].result().deferred_nbytes > 0
    assert torch.equal(stillframe.load(tmp_path / "a.pt")["weight"], expected)


IMPORT_ALONE = """
import sys, torch, stillframe
assert "torch._dynamo" not in sys.modules  # it takes more than a second
model = torch.nn.Linear(8, 8, bias=False)
optimizer = torch.optim.Muon(model.parameters())
model(torch.ones(2, 8)).sum().backward()
torch.compile(lambda: optimizer.step(), fullgraph=True, backend="eager")()
"""


def test_program_that_only_imports_the_package_compiles_a_fullgraph_step():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
