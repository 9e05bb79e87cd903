"""The list of other packages' optimizers, and whether installed versions match the reviewed ones.

`make optimizers` installs the newest versions and runs this file with them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stillframe
import torch
from fix_gate import FakePending, deferred, param, run_steps, state_tensors
from stillframe._watch import gate, steps
from stillframe._watch.steps import PACKAGES, OptimizerPackage
from stillframe.testing import slow
from torch import Tensor, nn
from torch.optim import Optimizer

ENTRIES = [
    (top, module, name)
    for top, package in PACKAGES.items()
    for module, names in package.classes.items()
    for name in names
]


def test_list_of_known_optimizers_is_well_formed():
    assert len(set(ENTRIES)) == len(ENTRIES) > 100
    for top, module, name in ENTRIES:
        assert module.partition(".")[0] == top
        assert name.isidentifier()
    for package in PACKAGES.values():
        assert package.versions
        assert all(part.isdigit() for each in package.versions for part in each.split("."))


# ---- recognising, with a package of the test's own ----------------------------------------------

SOURCE = """
import torch
from torch.optim import Optimizer

class Listed(Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("average", torch.zeros_like(p)).add_(p.grad)
            p.sub_(self.state[p]["average"], alpha=0.01)
        return loss

    @torch.no_grad()
    def eval(self):
        for p in self.param_groups[0]["params"]:
            p.add_(1.0)

class Heir(Listed):
    pass

class Other(Listed):
    def step(self, closure=None):
        return super().step(closure)

class Swapping(Listed):
    def eval(self):
        self.param_groups[0]["params"][0].data.zero_()
"""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = types.ModuleType("listed_package.optimizers")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, module.__dict__)
    listed = OptimizerPackage(
        "listed-package", ("1.4",), {module.__name__: ("Listed",)}, writers=("train", "eval")
    )
    monkeypatch.setitem(PACKAGES, "listed_package", listed)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.4.2")
    gate.wait()
    yield module
    steps._is_installed_version_tested.cache_clear()


def is_deferred(cls: type[Any]) -> bool:
    p = param()
    opt = cls([p])
    run_steps(opt, 4)
    parts = deferred(p, *state_tensors(opt))
    assert len(parts) == 2 and parts[0] == parts[1]
    return parts[0]


def test_listed_class_and_subclasses_with_its_step_are_deferred(package):
    assert is_deferred(package.Heir)
    assert is_deferred(package.Listed)


def test_subclass_that_overrides_a_writing_method_is_captured(package):
    assert is_deferred(package.Listed)
    assert not is_deferred(package.Other)
    assert not is_deferred(package.Swapping)


def test_replaced_step_of_a_listed_class_is_not_known(package):
    original = package.Listed.step

    def step(self: Any, closure: Any = None) -> Any:
        return original(self, closure)

    package.Listed.step = step
    assert not is_deferred(package.Listed)


@pytest.mark.parametrize(
    ("version", "known"), [("1.4", True), ("1.4.10", True), ("1.40", False), ("2.1.4", False)]
)
def test_only_optimizers_of_tested_versions_are_deferred(package, version, known, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert is_deferred(package.Listed) == known


def unknown_versions(installed: dict[str, str]) -> list[str]:
    """Return sentences about installed packages whose version is not in the list."""
    return [
        f"{package.distribution} {version} is none of {', '.join(package.versions)}: read what it"
        " changed, run this file with it, and add the version to third_party.toml"
        for package in PACKAGES.values()
        if (version := installed.get(package.distribution))
        and not package.is_tested_version(version)
    ]


def test_warning_names_an_untested_version():
    assert unknown_versions({"schedulefree": "1.4.3", "torch": "9.9"}) == []
    (warning,) = unknown_versions({"schedulefree": "1.5"})
    assert warning.startswith("schedulefree 1.5 is none of 1.4")


def test_every_installed_version_is_known():
    installed = {}
    for package in PACKAGES.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package.distribution] = importlib.metadata.version(package.distribution)
    assert not (unknown := unknown_versions(installed)), "\n".join(unknown)


def test_class_of_a_missing_package_is_not_known(package, monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert not is_deferred(package.Listed)


def test_second_writing_method_waits_like_the_step(package, tmp_path):
    p = param(1 << 16)
    opt = package.Listed([p])
    run_steps(opt, 4)
    wanted = p.detach().clone()
    with slow("lane_copy", 0.05):
        handle = stillframe.async_save({"p": p.detach()}, tmp_path / "s.pt")
        opt.eval()
        report = handle.result()
    assert report is not None and report.deferred_nbytes == 4 << 16
    assert torch.equal(torch.load(tmp_path / "s.pt")["p"], wanted)
    assert not torch.equal(p, wanted)
    assert deferred(p) == [True]  # its own writes do not count as writes of other code
    assert package.Listed.eval.__name__ == "eval"


# ---- the packages themselves --------------------------------------------------------------------


def real(top: str, module: str, name: str) -> type[Any]:
    package = PACKAGES[top]
    try:
        version = importlib.metadata.version(package.distribution)
        found: type[Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        pytest.skip(f"{package.distribution} is not installed, or not whole ({error})")
    if not steps._is_installed_version_tested(package):
        pytest.skip(f"{package.distribution} {version} is none of {package.versions}")
    return found


def made(cls: type[Any], model: nn.Module) -> Any:
    params = list(model.parameters())
    weights = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim < 2]
    muon = [{"params": weights, "use_muon": True}, {"params": others, "use_muon": False}]
    ways: list[Callable[[], Any]] = [
        lambda: cls(model) if cls.__name__ == "AdamMini" else cls(params),
        lambda: cls(params, lr=0.01),
        lambda: cls(params, lr=0.01, momentum=0.9),
        lambda: cls(params, num_iterations=50),
        lambda: cls(muon),
    ]
    if cls.__name__ == "SpectralSphere":
        return cls(weights)
    for way in ways:
        try:
            return way()
        except (TypeError, RuntimeError, NotImplementedError):
            continue
    raise AssertionError(f"no way to make a {cls}")


def copied(value: Any) -> list[Tensor]:
    """Copy everything in a state dict, including inner tensors of wrappers."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter):
            return [value.detach().clone()]
        return copied(vars(value))
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in copied(each)] if isinstance(value, list | tuple) else []


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("top", "module", "name"), ENTRIES, ids=lambda part: part)
def test_each_listed_class_has_the_reviewed_source(top, module, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the compiled variants need no test
    cls = real(top, module, name)
    assert issubclass(cls, Optimizer)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    opt = made(cls, model)
    if hasattr(opt, "train"):
        opt.train()

    def closure() -> Tensor:
        opt.zero_grad()
        x = torch.randn(4, 64)
        loss = ((model(x) - x.flip(1)) ** 2).mean()
        loss.backward(create_graph=name in ("AdaHessian", "SophiaH"))
        return loss

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": opt.state_dict()}

    for _ in range(5):
        opt.step(closure)
    order: list[list[Tensor]] = []
    gate.track(FakePending(lambda: order.append(copied(state()))))
    before = copied(state())
    calls: list[int] = []
    opt.step(lambda: (calls.append(len(order)), closure())[1])
    assert calls[0] == 0 and len(order) == 1, "the gate is after the closure"
    assert same(order[0], before), "nothing is written before the gate"
    assert not same(copied(state()), before)

    for between in (opt.step, getattr(opt, "eval", opt.step)):
        closure()
        before = copied(state())
        with slow("lane_copy", 0.002):
            handle = stillframe.async_save(state(), tmp_path / "s.pt")
            between()
            report = handle.result()
        assert report is not None and report.deferred_nbytes > 0
        assert report.fallbacks == ()
        loaded = torch.load(tmp_path / "s.pt", weights_only=False)
        assert same(copied(loaded), before)
        if hasattr(opt, "train"):
            opt.train()


if os.environ.get("STILLFRAME_THIRD_PARTY") == "required":

    def test_listed_packages_are_installed():
        for package in PACKAGES.values():
            assert steps._is_installed_version_tested(package), package.distribution
