"""Small trainings of every kind, for the mutation oracle.

A `Training` makes one real step with `advance`, returns its whole state, and tells which tensors a
save between two steps should defer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from stillframe import register_optimizer
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

WIDTH = 512  # a weight of WIDTH x WIDTH float32 is 1 MiB

TRAININGS: dict[str, Callable[[], Training]] = {}


@dataclass
class Training:
    """A training in small.

    advance: makes a step. state: returns the whole state. deferred: returns the tensors that a save
    between two steps should defer.
    """

    advance: Callable[[], object]
    state: Callable[[], dict[str, Any]]
    deferred: Callable[[], Iterable[Tensor]]
    more_is_fine: bool = False  # deferring more tensors than `deferred` is allowed
    optimizers: list[Optimizer] = field(default_factory=list)
    model: nn.Module | None = None

    def deferred_nbytes(self) -> int:
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self.deferred()}
        return sum(s.nbytes() for s in storages.values() if s.nbytes() > 4096)


def training(make: Callable[[], Training]) -> Callable[[], Training]:
    TRAININGS[make.__name__] = make
    return make


def network(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *extra, nn.Linear(WIDTH, WIDTH))


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(4, WIDTH)
    loss: Tensor = ((model(x) - x.flip(1)) ** 2).mean()
    return loss


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return []


def owned(*optimizers: Optimizer) -> list[Tensor]:
    """Return the parameters and the optimizers' state."""
    found: list[Tensor] = []
    for opt in optimizers:
        for group in opt.param_groups:
            found.extend(group["params"])
        found.extend(tensors_in(dict(opt.state)))
    return found


def plain(
    model: nn.Module,
    opt: Optimizer,
    *,
    after_step: Callable[[], object] = lambda: None,
    extra: Callable[[], dict[str, Any]] = dict,
    deferred: Callable[[], Iterable[Tensor]] | None = None,
) -> Training:
    def advance() -> None:
        opt.zero_grad()
        loss_of(model).backward()
        opt.step()
        after_step()

    return Training(
        advance,
        lambda: {"model": model.state_dict(), "optim": opt.state_dict(), **extra()},
        deferred or (lambda: owned(opt)),
        optimizers=[opt],
        model=model,
    )


# ---- torch's optimizers -----------------------------------------------------------------------


@training
def sgd() -> Training:
    model = network()
    return plain(model, SGD(model.parameters(), lr=0.1))


@training
def sgd_with_momentum_and_a_scheduler() -> Training:
    model = network()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
    return plain(
        model, opt, after_step=scheduler.step, extra=lambda: {"lr": scheduler.state_dict()}
    )


@training
def adamw() -> Training:
    model = network()
    return plain(model, AdamW(model.parameters()))


@training
def adamw_foreach() -> Training:
    model = network()
    return plain(model, AdamW(model.parameters(), foreach=True, amsgrad=True))


@training
def adamw_fused() -> Training:
    model = network()
    return plain(model, AdamW(model.parameters(), fused=True))


@training
def adamw_with_a_tensor_lr() -> Training:
    model = network()
    lr = torch.full((WIDTH * WIDTH,), 0.001)[0]  # in a storage of 1 MiB
    opt = AdamW(model.parameters(), lr=lr, foreach=False)

    def decay() -> None:
        lr.mul_(0.9)

    return plain(model, opt, after_step=decay, extra=lambda: {"lr": lr})


@training
def adamw_compiled() -> Training:
    model = network()
    opt = AdamW(model.parameters())
    step = torch.compile(lambda: opt.step(), backend="eager")
    made = plain(model, opt)

    def advance() -> None:
        opt.zero_grad()
        loss_of(model).backward()
        step()

    made.advance = advance
    return made


@training
def lbfgs() -> Training:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    opt = LBFGS([weight], lr=0.1, max_iter=4, history_size=3)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = ((weight - 1) ** 4).mean()
        loss.backward()
        return loss

    return Training(
        lambda: opt.step(closure),
        lambda: {"weight": weight.detach(), "optim": opt.state_dict()},
        lambda: [weight],
        more_is_fine=True,  # the history that exists for long enough
        optimizers=[opt],
    )


# ---- ways to train ----------------------------------------------------------------------------


@training
def a_closure_as_lightning_passes_it() -> Training:
    model = network(nn.BatchNorm1d(WIDTH))
    opt = AdamW(model.parameters())

    def training_step(m: nn.Module) -> Tensor:
        opt.zero_grad()
        loss = loss_of(m)
        loss.backward()
        return loss

    made = plain(model, opt)
    made.advance = lambda: opt.step(closure=functools.partial(training_step, model))
    return made


@training
def an_optimizer_in_the_backward() -> Training:
    model = network()
    made = {p: AdamW([p]) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        made[p].step()
        made[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return Training(
        lambda: loss_of(model).backward(),
        lambda: {"model": model.state_dict(), "optim": [o.state_dict() for o in made.values()]},
        lambda: owned(*made.values()),
        optimizers=list(made.values()),
        model=model,
    )


@training
def gradient_accumulation() -> Training:
    model = network()
    opt = Adam(model.parameters())
    made = plain(model, opt)

    def advance() -> None:
        loss_of(model).backward()  # of the batch that began before the save
        opt.step()
        opt.zero_grad()
        for _ in range(2):
            loss_of(model).backward()

    made.advance = advance
    return made


@training
def a_grad_scaler() -> Training:
    model = network()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    made = plain(model, opt, extra=lambda: {"scaler": scaler.state_dict()})

    def advance() -> None:
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.update()

    made.advance = advance
    return made


@training
def two_optimizers_in_turn() -> Training:
    one, two = network(), network()
    first, second = AdamW(one.parameters()), SGD(two.parameters(), lr=0.1, momentum=0.9)

    def advance() -> None:
        for model, opt in ((one, first), (two, second)):
            opt.zero_grad()
            loss_of(model).backward()
            opt.step()

    return Training(
        advance,
        lambda: {
            "one": one.state_dict(),
            "two": two.state_dict(),
            "optim": [first.state_dict(), second.state_dict()],
        },
        lambda: owned(first, second),
        optimizers=[first, second],
    )


@training
def two_optimizers_over_shared_weights() -> Training:
    model = network()
    first = AdamW(model.parameters())
    second = SGD(model[0].parameters(), lr=0.01)

    def advance() -> None:
        for opt in (first, second):
            opt.zero_grad()
            loss_of(model).backward()
            opt.step()

    shared = set(model[0].parameters())
    return Training(
        advance,
        lambda: {"model": model.state_dict(), "optim": [first.state_dict(), second.state_dict()]},
        lambda: [t for t in owned(first) if t not in shared],
        optimizers=[first, second],
    )


@training
def tied_and_overlapping_weights() -> Training:
    flat = torch.randn(2 * WIDTH * WIDTH) * 0.01
    one = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
    two = nn.Parameter(flat[WIDTH * WIDTH :].view(WIDTH, WIDTH))
    model = network()
    model[0].weight, model[2].weight = one, two
    return plain(model, AdamW(model.parameters()), extra=lambda: {"flat": flat, "tied": one})


# ---- classes of one's own ---------------------------------------------------------------------


class Sam(Optimizer):
    """Sharpness-aware minimization in its usual form, as a wrapper of another optimizer."""

    def __init__(self, params: Iterable[nn.Parameter], base: Optimizer) -> None:
        super().__init__(params, {})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = self.state[p]["old"]
        self.base.step()

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


@training
def sam_around_another_optimizer() -> Training:
    model = network()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = Sam(model.parameters(), base)
    made = plain(model, base)

    def advance() -> None:
        base.zero_grad()
        loss_of(model).backward()
        opt.first_step()
        loss_of(model).backward()
        opt.second_step()

    made.advance = advance
    made.deferred = lambda: tensors_in(dict(base.state))  # the weights are swapped each time
    return made


class SamSgd(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        kept = []
        for p in (p for group in self.param_groups for p in group["params"]):
            kept.append((p, p.clone()))
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            loss = closure()
        for p, old in kept:
            p.copy_(old)
        super().step()
        return loss


@training
def sam_as_a_subclass() -> Training:
    model = network()
    opt = SamSgd(model.parameters(), lr=0.1, momentum=0.9)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    closure()
    made = plain(model, opt, deferred=list)
    made.advance = lambda: opt.step(closure)
    return made


class Sign(Optimizer):
    """A user's class that fulfils the conditions of `register_optimizer`."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.001})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p].setdefault("averages", {"short": [torch.zeros_like(p)]})
            state["short"][0].lerp_(p.grad, 0.1)
            p.add_(state["short"][0].sign(), alpha=-0.001)
        return loss


@training
def a_registered_class() -> Training:
    register_optimizer(Sign)
    model = network()
    return plain(model, Sign(model.parameters()))


class Unregistered(Sign):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@training
def an_unregistered_class() -> Training:
    model = network()
    return plain(model, Unregistered(model.parameters()), deferred=list)


# ---- tensors that others write ----------------------------------------------------------------


@training
def batch_norm() -> Training:
    model = network(nn.BatchNorm1d(WIDTH))
    wide = nn.BatchNorm1d(WIDTH * WIDTH)  # running statistics of 1 MiB each
    opt = AdamW([*model.parameters(), *wide.parameters()])

    def advance() -> None:
        opt.zero_grad()
        out = model(torch.randn(4, WIDTH))
        (out.mean() + wide(torch.randn(2, WIDTH * WIDTH)).pow(2).mean()).backward()
        opt.step()

    made = plain(model, opt, extra=lambda: {"wide": wide.state_dict()})
    made.advance = advance
    return made


@training
def an_average_of_the_weights() -> Training:
    model = network()
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    return plain(
        model,
        AdamW(model.parameters()),
        after_step=lambda: ema.update_parameters(model),
        extra=lambda: {"ema": ema.state_dict()},
    )


@training
def max_norm_embeddings() -> Training:
    embedding = nn.Embedding(WIDTH, WIDTH, max_norm=0.5)
    head = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(embedding, head)
    opt = AdamW(model.parameters())

    def advance() -> None:
        opt.zero_grad()
        model(torch.randint(WIDTH, (16,))).pow(2).mean().backward()
        opt.step()

    made = plain(model, opt)
    made.advance = advance
    made.deferred = lambda: [t for t in owned(opt) if t is not embedding.weight]
    return made


@training
def clamped_weights() -> Training:
    model = network()
    opt = AdamW(model.parameters())

    def clamp() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    return plain(model, opt, after_step=clamp, deferred=lambda: tensors_in(dict(opt.state)))


@training
def weights_clamped_before_the_step() -> Training:
    model = network()
    opt = AdamW(model.parameters())
    made = plain(model, opt, deferred=lambda: tensors_in(dict(opt.state)))

    def advance() -> None:
        for p in model.parameters():
            p.data.clamp_(-0.04, 0.04)  # the version does not change
            p.data.mul_(0.999)
        opt.zero_grad()
        loss_of(model).backward()
        opt.step()

    made.advance = advance
    return made


@training
def a_momentum_encoder_in_the_groups() -> Training:
    query, key = network(), network()
    model = nn.ModuleList([query, key])
    opt = Adam(model.parameters())

    def advance() -> None:
        with torch.no_grad():
            for k, q in zip(key.parameters(), query.parameters(), strict=True):
                k.lerp_(q, 0.1)
        opt.zero_grad()
        x = torch.randn(4, WIDTH)
        with torch.no_grad():
            target = key(x)
        ((query(x) - target) ** 2).mean().backward()
        opt.step()

    made = plain(model, opt)
    made.advance = advance
    made.deferred = lambda: [*query.parameters(), *tensors_in(dict(opt.state))]
    return made
