"""stillframe.load(into=...) of modules, optimizers, and other objects with a state_dict."""

from __future__ import annotations

from typing import Any

import pytest
import stillframe
import torch
from fix_checkpoints import by_path, by_stillframe, legacy
from stillframe import testing
from stillframe._load import restore
from torch import nn

WRITERS = [by_path, by_stillframe, legacy]  # the last one is loaded by torch.load


class Model(nn.Module):
    """A model with tied weights, buffers, a non-parameter attribute, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 30)
        self.tied = nn.Linear(30, 40)
        self.tied.weight = self.first.weight
        self.extra: dict[str, Any] = {}
        self.loads = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def trained(seed: int, *, steps: int = 3, kind: Any = torch.optim.AdamW) -> tuple[Model, Any, Any]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = kind(model.parameters(), lr=0.01 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(steps):
        model(torch.randn(8, 30)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.extra = {"seed": seed, "table": torch.full((3,), float(seed))}
    return model, optimizer, scheduler


def states(*objects: Any) -> list[Any]:
    return [each.state_dict() for each in objects]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_one_call_resumes_a_training(write, steps, tmp_path):
    model, optimizer, scheduler = trained(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=77.0)
    write(
        {
            "deep": [{"model": model.state_dict()}, {"optim": optimizer.state_dict()}],
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "epoch": 4,
        },
        tmp_path / "x.pt",
    )
    fresh = trained(0, steps=steps)  # without a step its optimizer has no state
    addresses = [each.data_ptr() for each in fresh[0].parameters()]
    versions = [each._version for each in fresh[0].parameters()]
    target = {
        "deep": [{"model": fresh[0]}, {"optim": fresh[1]}],
        "scheduler": fresh[2],
        "scaler": torch.amp.GradScaler("cpu"),
        "epoch": 0,
    }
    assert stillframe.load(tmp_path / "x.pt", into=target) is target
    assert equal(states(*fresh), states(model, optimizer, scheduler))
    assert fresh[0].extra["seed"] == 1 and fresh[0].extra["table"].tolist() == [1.0] * 3
    assert target["scaler"].get_scale() == 77.0
    assert target["epoch"] == 4
    assert target["deep"][0]["model"] is fresh[0] and target["deep"][1]["optim"] is fresh[1]
    assert [each.data_ptr() for each in fresh[0].parameters()] == addresses
    assert all(
        each._version > old for each, old in zip(fresh[0].parameters(), versions, strict=True)
    )
    # Both continue in the same way.
    for each, optim in ((model, optimizer), (fresh[0], fresh[1])):
        torch.manual_seed(9)
        each(torch.randn(8, 30)).square().sum().backward()
        optim.step()
    assert equal(*states(model, fresh[0]))


@pytest.mark.parametrize("write", WRITERS)
def test_object_at_the_root_is_filled(write, tmp_path):
    model, optimizer, _ = trained(1)
    for source, target in zip((model, optimizer), trained(0), strict=False):
        write(source.state_dict(), tmp_path / "x.pt")
        assert stillframe.load(tmp_path / "x.pt", into=target) is target
        assert equal(*states(source, target))


def nbytes_found(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the storages that loads make from now on."""
    made: list[int] = []
    new = restore.new_storage

    def counting(nbytes: int, *device: Any) -> torch.UntypedStorage:
        made.append(nbytes)
        return new(nbytes, *device)

    monkeypatch.setattr(restore, "new_storage", counting)
    return made


def test_module_and_optimizer_are_filled_without_a_second_copy(tmp_path, monkeypatch):
    model, optimizer, _ = trained(1)
    by_stillframe({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "x.pt")
    target = trained(0)
    moments = [each["exp_avg"] for each in target[1].state.values()]
    made = nbytes_found(monkeypatch)
    stillframe.load(tmp_path / "x.pt", into={"m": target[0], "o": target[1]})
    assert sum(made) < 100  # only the extra state
    assert all(
        each["exp_avg"] is moment
        for each, moment in zip(target[1].state.values(), moments, strict=True)
    )
    assert equal(states(*target[:2]), states(model, optimizer))


def test_only_what_an_empty_optimizer_needs_is_loaded_into_new_memory(tmp_path, monkeypatch):
    model, optimizer, _ = trained(1)
    by_stillframe({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "x.pt")
    target = trained(0, steps=0)
    needed = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    made = nbytes_found(monkeypatch)
    stillframe.load(tmp_path / "x.pt", into={"m": target[0], "o": target[1]})
    assert needed <= sum(made) < needed + 100
    assert equal(states(*target[:2]), states(model, optimizer))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_of_any_shape_is_loaded(kind, steps, tmp_path):
    def make(seed: int, steps: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(5, 5)
        optimizer = kind(model.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return model, optimizer

    saved, target = make(1, 3), make(0, steps)
    by_stillframe(saved[1].state_dict(), tmp_path / "x.pt")
    stillframe.load(tmp_path / "x.pt", into=target[1])
    assert equal(saved[1].state_dict(), target[1].state_dict())


class Counter:
    """A user's object that follows DCP's protocol `Stateful`."""

    def __init__(self, value: float) -> None:
        self.weights = torch.full((6,), value)
        self.twice = self.weights[2:4]
        self.history = [value]
        self.taken: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "twice": self.twice,
            "nested": ({"bias": nn.Parameter(self.weights + 1)}, self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state
        self.weights, self.twice = state["weights"], state["twice"]


@pytest.mark.parametrize("write", WRITERS)
def test_users_object_gets_the_files_dictionary(write, tmp_path):
    write({"c": Counter(5.0).state_dict(), "w": torch.ones(2)}, tmp_path / "x.pt")
    counter = Counter(0.0)
    old = counter.weights
    stillframe.load(tmp_path / "x.pt", into={"c": counter, "w": torch.zeros(2)})
    assert counter.weights.tolist() == [5.0] * 6 and not old.any()
    nested, history = counter.taken["nested"]
    assert type(nested["bias"]) is nn.Parameter and nested["bias"].requires_grad
    assert nested["bias"].tolist() == [6.0] * 6 and history == [5.0]
    counter.weights[3] = 8  # views of one storage stay views of one storage
    assert counter.twice.tolist() == [5.0, 8.0]
    counter.weights.untyped_storage().resize_(100)  # a tensor over its own memory can be resized


def test_object_in_two_places_is_filled_once(tmp_path):
    by_stillframe({"a": {"x": 1}, "b": {"x": 2}}, tmp_path / "x.pt")

    class Noting:
        taken: list[Any]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.taken.append(state)

    noting = Noting()
    noting.taken = []
    stillframe.load(tmp_path / "x.pt", into={"a": noting, "b": noting})
    assert noting.taken == [{"x": 1}]


class Renaming(nn.Linear):
    """A module that reads files of an older version through a hook."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_load_state_dict_pre_hook(self._rename)
        self.seen = 0

    def _rename(self, module: Any, state: Any, prefix: str, *rest: Any) -> None:
        self.seen += 1
        for name in ("weight", "bias"):
            if prefix + "old_" + name in state:
                state[prefix + name] = state.pop(prefix + "old_" + name)


def test_load_into_a_module_runs_the_load_hooks_of_its_parts(tmp_path):
    saved = nn.Linear(4, 4)
    by_stillframe(
        {"m": {f"0.old_{name}": value for name, value in saved.state_dict().items()}},
        tmp_path / "x.pt",
    )
    target = nn.Sequential(Renaming())
    stillframe.load(tmp_path / "x.pt", into={"m": target})
    assert target[0].seen == 1 and torch.equal(target[0].weight, saved.weight)


def test_load_state_dict_of_a_subclass_is_called(tmp_path):
    class Own(nn.Linear):
        def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
            return super().load_state_dict({**state, "bias": state["bias"] + 1}, *args, **options)

    saved, target = nn.Linear(4, 4), Own(4, 4)
    by_stillframe(saved.state_dict(), tmp_path / "x.pt")
    stillframe.load(tmp_path / "x.pt", into=target)
    assert torch.equal(target.bias, saved.bias + 1)


def test_batch_norm_of_an_old_version_is_filled_as_load_state_dict_does(tmp_path):
    state = dict(nn.BatchNorm1d(3).state_dict())
    del state["num_batches_tracked"]
    state["running_mean"] += 2
    by_stillframe({"norm": state}, tmp_path / "x.pt")
    target = nn.BatchNorm1d(3)
    stillframe.load(tmp_path / "x.pt", into={"norm": target})
    assert target.running_mean.tolist() == [2.0] * 3


def test_other_dtypes_are_converted_as_load_state_dict_does(tmp_path):
    saved = nn.Linear(4, 4).double()
    by_stillframe(saved.state_dict(), tmp_path / "x.pt")
    target = nn.Linear(4, 4)
    stillframe.load(tmp_path / "x.pt", into=target)
    assert torch.equal(target.weight, saved.weight.float())


@pytest.mark.parametrize("untied", [False, True])
def test_tied_weights_get_what_load_state_dict_gives_them(untied, tmp_path):
    saved = trained(1)[0]
    if untied:  # the last name wins
        saved.tied.weight = nn.Parameter(torch.full((40, 30), 3.0))
    by_stillframe(saved.state_dict(), tmp_path / "x.pt")
    target, expected = trained(0)[0], trained(0)[0]
    expected.load_state_dict(saved.state_dict())
    stillframe.load(tmp_path / "x.pt", into=target)
    assert target.tied.weight is target.first.weight
    assert equal(*states(target, expected))


class Sparse(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.eye(3) * value).to_sparse())


class Scalar(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 2.0))


@pytest.mark.parametrize(
    ("saved", "target"), [(Sparse(5), Sparse(1)), (Scalar(1), Scalar())], ids=["sparse", "scalar"]
)
def test_module_that_load_state_dict_takes_is_filled(saved, target, tmp_path):
    by_stillframe({"model": saved.state_dict()}, tmp_path / "x.pt")
    stillframe.load(tmp_path / "x.pt", into={"model": target})
    for name, value in target.state_dict().items():
        expected = saved.state_dict()[name].to_dense().reshape(value.shape)
        assert torch.equal(value.to_dense(), expected)


def test_methods_of_an_instance_are_called(tmp_path):
    saved, target = trained(1), trained(0)
    state = {"model": saved[0].state_dict(), "optim": saved[1].state_dict()}
    by_stillframe(state, tmp_path / "x.pt")
    called = []

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args: (called.append(name), method(*args)))

    watch(target[0].last, "_load_from_state_dict")
    watch(target[1], "load_state_dict")
    stillframe.load(tmp_path / "x.pt", into={"model": target[0], "optim": target[1]})
    assert called == ["_load_from_state_dict", "load_state_dict"]
    assert equal(states(*saved[:2]), states(*target[:2]))


def test_wrapped_module_is_filled(tmp_path):
    saved = trained(1)[0]
    by_stillframe({f"module.{k}": v for k, v in saved.state_dict().items()}, tmp_path / "x.pt")
    target = trained(0)[0]
    stillframe.load(tmp_path / "x.pt", into=nn.DataParallel(target))
    assert equal(*states(saved, target))


# ---- what is refused ----


@pytest.mark.parametrize("write", WRITERS)
def test_mismatched_object_is_refused_before_anything_changes(write, tmp_path):
    model, optimizer, _ = trained(1)
    state = dict(model.last.state_dict())
    state["wight"] = state.pop("weight")
    write(
        {
            "first": model.first.state_dict(),
            "last": state,
            "norm": {**model.norm.state_dict(), "weight": torch.ones(7)},
            "optim": optimizer.state_dict(),
            "other": optimizer.state_dict(),
            "tensor": torch.ones(3),
        },
        tmp_path / "x.pt",
    )
    target = trained(0)[0]
    before = {name: value.clone() for name, value in target.first.state_dict().items()}
    two_groups = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}])
    into = {
        "first": target.first,
        "last": target.last,
        "norm": target.norm,
        "optim": torch.optim.AdamW(target.last.parameters()),
        "other": two_groups,
        "tensor": nn.Linear(2, 2),
        "absent": nn.Linear(2, 2),
    }
    with pytest.raises(ValueError, match="does not fit what into= names") as error:
        stillframe.load(tmp_path / "x.pt", into=into)
    for words in (
        'last: Missing key(s) in state_dict: "weight"',
        'last: Unexpected key(s) in state_dict: "wight"',
        "norm.weight is float32 (40,), and float32 (7,) in the file",
        "optim: loaded state dict contains a parameter group that doesn't match the size",
        "other: loaded state dict has a different number of parameter groups",
        "tensor is a Linear, and Tensor in the file, not its state_dict",
    ):
        assert words in str(error.value)
    del into["first"], into["last"], into["norm"], into["optim"], into["other"], into["tensor"]
    with pytest.raises(ValueError, match="names: absent is not in the file"):
        stillframe.load(tmp_path / "x.pt", into={"first": target.first, **into})
    assert equal(dict(target.first.state_dict()), before)


class Opaque:
    pass


class OnlyGives:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("write", WRITERS)
def test_object_that_cannot_be_filled_is_refused_by_name(write, tmp_path):
    write({"w": torch.ones(3), "deep": [{"thing": {"a": 1}}]}, tmp_path / "x.pt")
    weight = torch.zeros(3)
    for thing, words in ((Opaque(), "no load_state_dict"), (OnlyGives(), "no load_state_dict")):
        target = {"w": weight, "deep": [{"thing": thing}]}
        with pytest.raises(ValueError, match=rf"deep\.0\.thing is a \w+, which .* {words}"):
            stillframe.load(tmp_path / "x.pt", into=target)
        assert not weight.any() and target["deep"] == [{"thing": thing}]


def test_meta_module_is_refused_by_name(tmp_path):
    by_stillframe({"m": nn.Linear(2, 2).state_dict()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"m\.weight has no memory"):
        stillframe.load(tmp_path / "x.pt", into={"m": nn.Linear(2, 2, device="meta")})


def test_error_of_an_object_says_where_it_is(tmp_path):
    by_stillframe({"deep": [{"x": 1}]}, tmp_path / "x.pt")

    class Refusing(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("weights")

    with pytest.raises(KeyError, match="weights") as error:
        stillframe.load(tmp_path / "x.pt", into={"deep": [Refusing(0.0)]})
    assert "partly filled: this object (deep.0) refused it" in "".join(error.value.__notes__)


def test_tuple_of_values_is_replaced_and_one_with_tensors_keeps_its_values(tmp_path):
    state = {"rng": (3, (1, 2), None), "pair": (torch.ones(2), "file")}
    by_stillframe(state, tmp_path / "x.pt")
    target: dict[str, Any] = {"rng": (3, (9, 9), 1.0), "pair": (torch.zeros(2), "here")}
    stillframe.load(tmp_path / "x.pt", into=target)
    assert target["rng"] == (3, (1, 2), None)
    assert target["pair"][0].all() and target["pair"][1] == "here"


def test_save_under_way_gets_the_module_as_it_was(tmp_path):
    model = trained(1, steps=5)[0]
    before = {
        name: value.clone() for name, value in model.state_dict().items() if name != "_extra_state"
    }
    by_stillframe(trained(0)[0].state_dict(), tmp_path / "other.pt")
    with testing.slow("lane_copy", 0.05):
        handle = stillframe.async_save(model.state_dict(), tmp_path / "x.pt")
        stillframe.load(tmp_path / "other.pt", into=model)
        handle.result()
    loaded = stillframe.load(tmp_path / "x.pt")
    assert all(torch.equal(loaded[name], value) for name, value in before.items())
