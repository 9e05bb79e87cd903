"""The words read from torch's memory agree with torch's answers, for every tensor and every
save."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import fix_graphs
import pytest
import stillframe
import torch
from fix_graphs import assert_same_outcome, outcome
from fix_processes import run_python
from stillframe import _core
from stillframe._tree import skeleton
from stillframe._tree.skeleton import build
from test_skeleton import file_of, stock_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its prototypes


def collector(where: Callable[[torch.Tensor], int]) -> _core.Collector:
    return _core.Collector(skeleton._make_torch_types(where=where), True, True, True)


def set_other(tensor: torch.Tensor) -> None:
    tensor.set_(torch.arange(24.0).untyped_storage(), 3, (2, 2), (5, 1))


def named(tensor: torch.Tensor) -> None:
    if hasattr(tensor, "rename_"):  # newer versions of torch have no names
        tensor.rename_("a", "b")


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda tensor: setattr(tensor, "data", torch.full((5,), 3.0)),
    "data of another dtype": lambda tensor: setattr(tensor, "data", torch.full((5,), 3).half()),
    "data that is conjugated": lambda tensor: setattr(
        tensor, "data", torch.full((2,), 1 + 2j).conj()
    ),
    "data that is negated": lambda tensor: setattr(
        tensor, "data", torch.full((2,), 1 + 2j).conj().imag
    ),
    "set_": set_other,
    "resize_": lambda tensor: tensor.resize_(40, 2),
    "transpose_": lambda tensor: tensor.transpose_(0, 1),
    "a storage that has grown": lambda tensor: tensor.untyped_storage().resize_(100),
    "a storage that was freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "shared memory": lambda tensor: tensor.share_memory_(),
    "requires_grad": lambda tensor: tensor.requires_grad_(),
    "names": named,
    "an attribute": lambda tensor: setattr(tensor, "note", "x"),
    "hooks": lambda tensor: setattr(tensor, "_backward_hooks", {1: print}),
    "another class": lambda tensor: setattr(tensor, "__class__", fix_graphs.SubTensor),
    "Parameter": lambda tensor: setattr(tensor, "__class__", torch.nn.Parameter),
    "another tensor": lambda tensor: torch.utils.swap_tensors(tensor, torch.arange(4)),
    "a sparse one": lambda tensor: torch.utils.swap_tensors(tensor, torch.eye(3).to_sparse()),
    "one that is nowhere": lambda tensor: torch.utils.swap_tensors(
        tensor, torch._efficientzerotensor(3)
    ),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_change_since_the_last_save_is_saved(name):
    tensor = torch.arange(6.0).reshape(2, 3)
    view = torch.empty(0).set_(tensor.untyped_storage(), 3, (3,), (1,))
    tree = {"tensor": tensor, "again": [tensor], "view": view, "other": torch.ones(2)}
    for change in (lambda _: None, CHANGES[name]):
        change(tensor)
        ours, stock = outcome(build, tree), outcome(stock_file, tree)
        if ours[0] == "returned" == stock[0]:
            ours = outcome(torch.load, file_of(ours[1]), weights_only=False)
            stock = outcome(torch.load, stock[1], weights_only=False)
        assert_same_outcome(ours, stock)


def test_python_is_asked_once_of_tensors_with_the_same_dispatch_keys():
    asked: list[torch.Tensor] = []

    def where(tensor: torch.Tensor) -> int:
        asked.append(tensor)
        return skeleton._memory_kind_of(tensor)

    met = collector(where)
    conj = [torch.ones(2, dtype=torch.complex64).conj() for _ in range(3)]
    plain = [torch.ones(2), torch.nn.Parameter(torch.ones(3)), torch.ones(1, dtype=torch.int8)]
    assert met.collect([*plain, *conj, *plain]) == conj
    assert list(map(id, asked)) == [id(plain[0]), id(conj[0])]
    assert len(met.finish()[0]) == len(plain)


def test_tensors_are_distinguished_beyond_the_remembered_key_sets():
    def of_keys(device: str, conj: bool, neg: bool, inference: bool) -> torch.Tensor:
        with torch.inference_mode(inference):
            tensor = torch.ones(2, dtype=torch.complex64, device=device)
            tensor = tensor.conj() if conj else tensor
            return torch._neg_view(tensor) if neg else tensor

    tensors = [of_keys(*each) for each in itertools.product(["meta", "cpu"], *[[True, False]] * 3)]
    for inference in (True, False):
        with torch.inference_mode(inference):
            tensors += [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]
    assert len({torch._C._dispatch_keys(tensor).raw_repr() for tensor in tensors}) == 20
    others = [tensor for tensor in tensors if skeleton._memory_kind_of(tensor) != 0]
    assert len(others) == 18  # all but one, each with gradients and without
    met = collector(skeleton._memory_kind_of)
    assert list(map(id, met.collect([*tensors, *tensors]))) == list(map(id, [*others, *others]))


def test_nothing_is_assumed_of_tensors_that_python_refuses():
    answers: list[Any] = [ValueError("no"), 2, "0"]

    def where(tensor: torch.Tensor) -> Any:
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    for _ in range(3):
        tensor = torch.ones(2)
        assert collector(where).collect([tensor]) == [tensor]
    assert answers == []

    def interrupt(tensor: torch.Tensor) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collector(interrupt).collect([torch.ones(2)])


UNKNOWN = """
import sys, torch
sys.path.insert(0, sys.argv[1])

class Otherwise:
    def __init__(self, tensor):
        self.keys = real(tensor)

    def raw_repr(self):
        return self.keys.raw_repr() + 1

real = torch._C._dispatch_keys
torch._C._dispatch_keys = Otherwise
import stillframe
from stillframe import _core
from stillframe._tree import skeleton

model = torch.nn.Linear(100, 100)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
handle = stillframe.async_save(state, sys.argv[1] + "/a")
optimizer.step()
report = handle.result()
assert report.deferred_nbytes == 3 * 4 * 100 * 100, report
assert report.fallbacks == (skeleton._UNKNOWN_TORCH,), report
loaded = torch.load(sys.argv[1] + "/a")
assert loaded["model"]["weight"].shape == (100, 100)
with stillframe.snapshot({"a": torch.arange(5)}) as taken:
    assert taken.tree["a"].tolist() == [0, 1, 2, 3, 4]

wrong = skeleton._samples()
torch._C._dispatch_keys = real
right = skeleton._samples()
for index in (1, 2, 3):
    lies = [(*each[:index], each[index] + 1, *each[index + 1 :]) for each in right]
    assert not _core.learn_words(lies)
    assert not _core.learn_words([*right[:-1], lies[-1]])
for handles in ([None] * 4, [each[-1] for each in reversed(right)]):
    lies = [(*each[:-1], handle) for each, handle in zip(right, handles)]
    assert not _core.learn_words(lies)
for unusable in ([()], [(1, 2)], (), [right[0]] * 9):
    try:
        _core.learn_words(unusable)
    except TypeError:
        continue
    raise AssertionError(unusable)
assert not _core.learn_words([])
assert not _core.learn_words(wrong)
assert _core.learn_words(right)
assert _core.learn_words(wrong)  # once is enough
"""


def test_memory_of_a_tensor_is_not_read_if_torch_keeps_its_fields_elsewhere(tmp_path):
    done = run_python("-c", UNKNOWN, tmp_path)
    assert done.returncode == 0, done.stderr


class Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("not here")


class RefusingToo(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("nor here")


def test_words_of_tensors_are_found_wherever_the_package_is_imported_first():
    spec = importlib.util.spec_from_file_location("again", skeleton.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = []

    def import_it(x: torch.Tensor) -> torch.Tensor:
        with Refusing(), RefusingToo():
            made.append(importlib.util.module_from_spec(spec))
            sys.modules["again"] = made[-1]  # dataclasses looks there
            try:
                spec.loader.exec_module(made[-1])
            finally:
                del sys.modules["again"]
        return x.sum()

    torch.func.grad(import_it)(torch.ones(2))
    torch.func.vmap(import_it)(torch.ones(2, 2))
    for each in made:
        known = _core.Collector(each._types, True, True, True)
        assert each._words_found
        assert known.collect([torch.ones(2), torch.ones(2).half()]) == []


LONG = """
import io, sys, torch
from stillframe._tree.skeleton import build

long = torch.ones(1).as_strided((1,) * 64, tuple(2**40 + i for i in range(64)))
many = [long[:] for _ in range(1000)]
assert len(build(many).data) > 1000 * 64 * 10
tag = "tag" * 3000
torch.serialization.register_package(1, lambda _: tag, lambda *_: None)
for tree in (long, [long, torch.ones(2), {"again": long}], "x" * 9000, [[long], "x" * 9000]):
    made = build(tree)
    assert (tag.encode() in made.data) == bool(made.storages)
print(len(build(long).data))
"""


def test_no_tensor_is_too_long_for_its_room_in_the_pickle():
    done = run_python("-c", LONG, env={**os.environ, "PYTHONMALLOC": "debug"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 9000 + 64 * 10


def test_fallback_is_logged_with_the_path(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(skeleton, "_words_found", False)
    with caplog.at_level("INFO", "stillframe"):
        stillframe.save({"w": torch.ones(9)}, tmp_path / "a.pt")
    assert f"{tmp_path / 'a.pt'}: {skeleton._UNKNOWN_TORCH}" in caplog.text
