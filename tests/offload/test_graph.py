"""Autograd's engine while layers are offloaded: the pass of each node, and what is released."""

import contextlib
import copy
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from fix_offloading import mlp, numbers, same, squares, train
from stillframe._offload import graph
from stillframe.errors import StillframeError
from stillframe.offload import offload_layers
from torch import nn

VARIABLE: Any = torch.autograd.Variable


@contextlib.contextmanager
def engine_of(kind: type) -> Iterator[Any]:
    """Install another program's engine as autograd's engine."""
    before = VARIABLE._execution_engine
    VARIABLE._execution_engine = kind()
    try:
        yield VARIABLE._execution_engine
    finally:
        VARIABLE._execution_engine = before


class Late(torch._C._ImperativeEngine):
    """An engine that delays the passes of one thread."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "late":
            self.reached.set()
            assert self.go.wait(60)
        return super().run_backward(*args, **kwargs)


def test_two_threads_may_go_through_one_graph_in_turn(either):
    """The first thread has called backward, and no node of its graph has run yet."""
    model, errors = mlp(depth=2), []
    plain = copy.deepcopy(model)
    squares(plain, numbers(0)).backward()

    def run() -> None:
        try:
            loss.backward(retain_graph=True)
        except Exception as error:
            errors.append(error)

    with engine_of(Late) as engine, offload_layers(model, device="cpu"):
        loss = squares(model, numbers(0))
        late = threading.Thread(target=run, name="late")
        late.start()
        assert engine.reached.wait(60)
        loss.backward(retain_graph=True)
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        engine.go.set()
        late.join()
    assert not errors
    assert all(torch.equal(p.grad, 2 * q.grad) for p, q in both(model, plain))


def both(*models: nn.Module) -> Any:
    return zip(*(model.parameters() for model in models), strict=True)


class InTurn(torch.autograd.Function):
    """Runs one backward after the other inside its own backward, the second one through a layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            numbers(5).requires_grad_().sum().backward()
            ctx.layer(numbers(6).requires_grad_()).sum().backward()
        return grad, None


def test_gradients_after_an_inner_backward_equal_the_plain_ones(either: str) -> None:
    model = mlp(depth=1)
    plain = copy.deepcopy(model)
    with offload_layers(model, device="cpu"):
        for each in (plain, model):
            InTurn.apply(numbers(0).requires_grad_(), each).sum().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_model_that_dies_offloaded_gives_autograd_its_engine_back(either):
    before = VARIABLE._execution_engine
    model = mlp(depth=1)
    offload_layers(model, device="cpu")
    assert VARIABLE._execution_engine is not before
    del model
    gc.collect()
    assert VARIABLE._execution_engine is before


def test_engine_that_other_code_puts_back_runs_backwards_like_autograds_own(monkeypatch):
    """The other program replaced the engine while layers were offloaded; now none is."""
    handle = offload_layers(mlp(depth=1), device="cpu")
    ours = VARIABLE._execution_engine
    handle.remove()
    monkeypatch.setattr(VARIABLE, "_execution_engine", ours)
    monkeypatch.setattr(graph, "BackwardPass", None)
    x = numbers(0).requires_grad_()
    x.sum().backward()
    assert x.grad is not None


def test_autograds_engine_takes_arguments_by_name_while_layers_are_offloaded(either):
    model = mlp(depth=2)
    with offload_layers(model, device="cpu"):
        loss = squares(model, numbers(0))
        VARIABLE._execution_engine.run_backward(
            tensors=(loss,),
            grad_tensors=(torch.ones_like(loss),),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_autograd_is_refused_by_name():
    from torch._dynamo import compiled_autograd

    model = mlp(depth=2)
    with offload_layers(model, device="cpu"):
        loss = squares(model, numbers(0))
        compiler = torch.compile(backend="eager")
        with compiled_autograd._enable(compiler), pytest.raises(StillframeError, match="compiled"):
            loss.backward()
        model.zero_grad()
        with torch.no_grad():
            plain = copy.deepcopy(model)
        assert all(same(a, b) for a, b in zip(train(plain), train(model), strict=True))
    torch.compiler.reset()


class Interrupt:
    """Raises KeyboardInterrupt at the nth line of graph.py that runs; counts them."""

    def __init__(self, nth: int) -> None:
        self._nth = nth
        self.nr = 0

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.nr += 1
            if self.nr == self._nth:
                raise KeyboardInterrupt
        return self._call if frame.f_code.co_filename == graph.__file__ else None


def test_ctrl_c_at_any_line_of_a_backward_does_not_affect_the_next(monkeypatch, caplog):
    monkeypatch.setattr(graph, "_MAX_WAIT_S", 0.1)  # no node of a failed pass still runs
    model = mlp(depth=2)
    plain = copy.deepcopy(model)
    squares(plain, numbers(0)).backward()
    with offload_layers(model, device="cpu") as handle:
        loss = squares(model, numbers(0))
        with Interrupt(0) as counted:
            loss.backward()
        assert counted.nr > 40
        for nth in range(1, counted.nr + 1):
            loss = squares(model, numbers(0))
            with contextlib.suppress(KeyboardInterrupt), Interrupt(nth):
                loss.backward()
            assert not handle._gradients._additions and not handle._gradients._sums, nth
            handle.wait()
            model.zero_grad()
            squares(model, numbers(0)).backward()
            assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert "still runs" not in caplog.text
