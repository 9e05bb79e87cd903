"""Random trainings: a seed determines the model, how it is offloaded, and all that happens.

A training records losses, gradients, weights and optimizer state at every point. The records of the
plain and the offloaded run must agree bit for bit.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import stillframe
import torch
from fix_offloading import WIDTH, state, tensors_of
from stillframe import testing
from stillframe._offload import activations
from stillframe.offload import offload_activations, offload_layers, offload_optimizer_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

KIB, MIB = 1 << 10, 1 << 20


class Boom(Exception):
    """The exception that is raised in the middle of a pass."""


class _Bang(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Boom("in backward")


class Part(nn.Module):
    """A layer, perhaps under a checkpoint, that may raise in forward or backward."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise Boom("in forward")
        if self.how == "plain" or not torch.is_grad_enabled():
            y = self.inner(x)
        else:
            y = checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")
        return _Bang.apply(y) if self.fails == "backward" else y


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x[:, None]).sum(1)


class Resident(nn.Module):
    """The first layer, which is never offloaded: the others' inputs have gradients then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) + x


KINDS = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "conv": Conv,
    "norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.2)),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)),
}


@dataclass
class Plan:
    """The choices that a seed determines: the model, what is offloaded, and what happens when.

    keep: layers that stay on the device. layers, state: whether layers or the optimizer's state are
    offloaded. parts: backwards before each step. evaluations: steps in which the model is evaluated
    too. saves: (step, pass) of each save. delay_ns: how much later the fake driver completes
    each operation.
    """

    seed: int
    keep: int = 0
    slots: int = 2  # slots of the optimizer's state, and of layers besides those that are kept
    ahead: int = 8  # slots of activations
    layers: bool = True
    activations: int | None = None  # number of activation groups that stay on the device
    optimizer: str = "AdamW"
    state: bool = False
    parts: int = 1
    steps: int = 3
    evaluations: set[int] = field(default_factory=set)
    fails: tuple[int, int, str] = (-1, 0, "")  # the step, the layer and the pass that fail
    saves: set[tuple[int, str]] = field(default_factory=set)
    pool_blocks: int = 0
    block_bytes: int = 16 * KIB
    delay_ns: int = 0


def plan(seed: int) -> Plan:
    chance = random.Random(seed)
    layers, kept_state = chance.choice(
        [(True, False), (True, False), (False, True), (False, False)]
    )
    made = Plan(seed, layers=layers, state=kept_state)
    made.keep = chance.randrange(3)
    made.activations = chance.choice([None, 0, 2]) if layers or kept_state else chance.randrange(3)
    made.optimizer = chance.choice(["AdamW", "SGD", "Adam fused"])
    made.parts = chance.choice([1, 1, 2, 3])
    made.steps = chance.randrange(2, 5)
    made.evaluations = {s for s in range(made.steps) if chance.random() < 0.3}
    if chance.random() < 0.4:
        where = chance.choice(["forward", "backward"])
        made.fails = (chance.randrange(made.steps), chance.randrange(100), where)
    for step in range(made.steps):
        for when in ("forward", "backward", "step"):
            if chance.random() < 0.25:
                made.saves.add((step, when))
    made.slots = chance.randrange(1, 4)
    made.ahead = chance.choice([1, 2, 3, 8])
    made.pool_blocks = chance.choice([16, 48, 160, 1000])  # `offloaded` tries more if it must
    made.block_bytes = chance.choice([4 * KIB, 16 * KIB, 64 * KIB])
    made.delay_ns = chance.choice([0, 0, 20_000, 300_000])
    return made


def model(seed: int) -> tuple[nn.Sequential, list[nn.Module]]:
    """Return the model, and its layers that may be offloaded, in order."""
    chance = random.Random(seed + 1)
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for _ in range(chance.randrange(2, 6)):
        if parts and chance.random() < 0.15:
            parts.append(chance.choice(parts))  # a shared layer, which is used more than once
            continue
        how = chance.choice(["plain", "plain", "plain", "reentrant", "not reentrant"])
        inner = KINDS[chance.choice(sorted(KINDS))]()
        part = Part(inner, how)
        linears = [m for m in inner.modules() if isinstance(m, nn.Linear)]
        others = [m for p in parts for m in p.modules() if isinstance(m, nn.Linear)]
        for each in linears:
            same = [other for other in others if other.weight.shape == each.weight.shape]
            if same and chance.random() < 0.2:
                each.weight = chance.choice(same).weight  # tied
        if chance.random() < 0.15:
            part.requires_grad_(False)
        parts.append(part)
    offloaded = list(parts)
    first = Resident()  # so that at least one layer is trained and inputs have gradients
    return nn.Sequential(first, *parts), offloaded


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return a parameter group for each layer; tied parameters are in the first."""
    seen: set[int] = set()
    groups = []
    for child in dict.fromkeys(net.children()):
        own = [p for p in child.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        if own:
            groups.append({"params": own})
    return groups


def _optimizer(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(_groups(net), lr=0.05, momentum=0.9)
    if kind == "AdamW":
        return torch.optim.AdamW(_groups(net), lr=0.01)
    return torch.optim.Adam(_groups(net), lr=0.01, fused=True)


def _numbers(seed: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


class Training:
    """One run of a plan.

    Args:
        folder: Where saves go; None: none are made, and nothing is offloaded.
    """

    def __init__(self, plan: Plan, folder: Path | None) -> None:
        self.plan, self.folder = plan, folder
        self.net, self.layers = model(plan.seed)
        self.optimizer = _optimizer(plan.optimizer, self.net)
        self.seen: list[Tensor] = []
        self.saves: list[tuple[Any, Any]] = []
        self.activations: Any = None

    def run(self) -> list[Tensor]:
        if self.folder is None:
            self._train()
            return self.seen
        size = self.plan.block_bytes
        with stillframe.Engine(pool_bytes=self.plan.pool_blocks * size, block_bytes=size) as engine:
            with ExitStack() as stack:
                self._offload(stack, engine)
                self._train(engine)
            for handle, expected in self.saves:
                found = stillframe.load(handle.result().path)
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
                assert all(map(same_bits, tensors_of(found), tensors_of(expected)))
            self.optimizer.zero_grad()
        return self.seen

    def _offload(self, stack: ExitStack, engine: stillframe.Engine) -> None:
        if self.plan.layers:
            keep = min(self.plan.keep, len(self.layers))
            layers = offload_layers(self.layers, device="cpu", keep=keep, engine=engine)
            stack.enter_context(layers)
            layers._offloader._max_slots = layers._residents._slots = keep + self.plan.slots
        if self.plan.state:
            optimizer = offload_optimizer_state(self.optimizer, engine=engine)
            stack.enter_context(optimizer)
            optimizer._offloader._max_slots = self.plan.slots
        if self.plan.activations is not None:
            self.activations = offload_activations(
                min_bytes=0, keep_last=self.plan.activations, device="cpu", engine=engine
            )

    def _train(self, engine: stillframe.Engine | None = None) -> None:
        torch.manual_seed(self.plan.seed)
        for step in range(self.plan.steps):
            # after a failed pass, the step uses the gradients that it left
            if self.plan.fails[0] != step - 1:
                self.optimizer.zero_grad()
            for part in range(self.plan.parts):
                self._pass(step, part, engine)
            if step in self.plan.evaluations:
                self.net.eval()
                with torch.no_grad():
                    self.seen.append(self.net(_numbers(-1)).clone())
                self.net.train()
            self.optimizer.step()
            self._save(step, "step", engine)
            self._check()

    def _pass(self, step: int, part: int, engine: stillframe.Engine | None) -> None:
        at, which, where = self.plan.fails
        failing = self.layers[which % len(self.layers)]
        fails = at == step and part == self.plan.parts - 1
        if fails and isinstance(failing, Part):
            failing.fails = where
        try:
            with ExitStack() as stack:
                if self.activations is not None:
                    stack.enter_context(self.activations)
                loss = (self.net(_numbers(100 * step + part)) ** 2).mean()
            self.seen.append(loss.detach().clone())
            self._save(step, "forward", engine)
            loss.backward()
            self._save(step, "backward", engine)
        except Boom:
            if not fails:
                raise
        finally:
            if isinstance(failing, Part):
                failing.fails = ""

    def _check(self) -> None:
        self.seen += state(self.net)
        self.seen += [t.detach().clone() for t in tensors_of(self.optimizer.state_dict()["state"])]

    def _save(self, step: int, when: str, engine: stillframe.Engine | None) -> None:
        if engine is None or (step, when) not in self.plan.saves:
            return
        tree = {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gradients": [p.grad for p in self.net.parameters()],
        }
        expected = copy.deepcopy(tree)
        assert self.folder is not None
        path = self.folder / f"{len(self.saves)}.pt"
        self.saves.append((stillframe.async_save(tree, path, engine=engine), expected))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare values bit for bit: a training may produce NaN and goes on with it."""
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


def offloaded(made: Plan, folder: Path) -> list[Tensor]:
    """Run a training offloaded, in the smallest pool that it fits into, and return its records."""
    while True:
        folder.mkdir(parents=True)
        try:
            return Training(made, folder).run()
        except stillframe.PoolExhaustedError:
            made.pool_blocks *= 2
            if made.pool_blocks > 10_000:
                raise
            shutil.rmtree(folder)


def differences(seed: int, folder: Path, driver: testing.FakeDriver | None) -> Iterator[str]:
    """Run the training of a seed both ways and return the differences."""
    made = plan(seed)
    plain = Training(made, None).run()
    if driver is not None:
        driver.reset()
        driver.delay(made.delay_ns, seed + 1)
    try:
        with mock.patch.object(activations, "_SLOTS", made.ahead):
            away = offloaded(made, folder)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    finally:
        if driver is not None:
            driver.delay(0)
    if len(plain) != len(away):
        yield f"{len(plain)} tensors, and {len(away)} offloaded"
    for index, (one, other) in enumerate(zip(plain, away, strict=False)):
        if not same_bits(one, other):
            yield f"tensor {index} of {len(plain)}"
            break
    if driver is not None:
        yield from driver.violations
        if driver.calls("sync"):
            yield "the host waited for the device"
