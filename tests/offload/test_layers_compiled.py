"""Compiled layers train as they do without offloading.

STILLFRAME_TRAININGS=2000   also uses torch's own compiler, whose C++ takes 15 seconds
"""

import copy
import functools
import importlib
import os
import shutil

import pytest
import torch
from fix_offloading import WIDTH, agree, mlp, numbers, train
from stillframe.offload import offload_layers
from torch import nn

# torch emits it when it reads the attribute that replaces a parameter
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.slow,
]


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()


def norms():
    torch.manual_seed(1)
    return mlp(nn.BatchNorm1d(WIDTH), depth=2)


def offloaded(model, compiled, what):
    """Return the layers to offload, and a function that makes the compiled model afterwards."""
    layers = list(model)
    if what == "layers":
        layers = [compiled(layer) for layer in layers]
        return layers, lambda: nn.Sequential(*layers)
    if what == "the model":
        return layers, functools.partial(compiled, model)
    return layers, lambda: nn.Sequential(*map(compiled, layers))


@pytest.mark.parametrize("what", ["layers", "the model", "layers, afterwards"])
def test_compiled_model_trains_as_the_plain_one(what, compiled):
    """That includes norms, whose statistics forward writes, and the time after `remove()`."""
    model = norms()
    layers, make = offloaded(other := copy.deepcopy(model), compiled, what)
    with offload_layers(layers, device="cpu") as handle:
        run = make()
        assert agree(train(model, steps=2), train(run, steps=2))
        assert handle.stats()["bytes_lingering"] == 0
    assert torch.equal(run(numbers(0)), other(numbers(0)))


def test_layer_with_fullgraph_must_be_compiled_before_offloading(compiled):
    whole = functools.partial(compiled, fullgraph=True)
    model = norms()
    layers, make = offloaded(copy.deepcopy(model), whole, "layers")
    with offload_layers(layers, device="cpu"):
        assert agree(train(model, steps=2), train(make(), steps=2))
    with offload_layers(model, device="cpu"):
        with pytest.raises(RuntimeError, match="layers get their weights between compiled graphs"):
            whole(model[0])(numbers(0))
        model(numbers(0))


@pytest.mark.skipif(
    "STILLFRAME_TRAININGS" not in os.environ or shutil.which("g++") is None,
    reason="torch's compiler is for campaigns, with a C++ compiler",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["layers", "layers, afterwards"])
def test_compiled_offloaded_and_resident_layers_agree_bit_for_bit(what, compiled):
    config = importlib.import_module("torch._inductor.config")
    # so that no "ccache g++" from the environment is used
    with config.patch({"cpp.cxx": (None, "g++")}):
        agree_through_inductor(what)


def agree_through_inductor(what):
    inductor = functools.partial(torch.compile, backend="inductor")
    model = norms()
    plain = nn.Sequential(*map(inductor, copy.deepcopy(model)))
    layers, make = offloaded(model, inductor, what)
    expected = train(plain, steps=3)
    torch._dynamo.reset()
    with offload_layers(layers, device="cpu"):
        found = train(make(), steps=3)
    assert agree(expected, found)
