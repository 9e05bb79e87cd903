"""Layers that live on the CPU train like resident ones, bit for bit."""

import copy
import functools

import pytest
import stillframe
import torch
from fix_offloading import (
    WIDTH,
    Bang,
    Block,
    Recurrent,
    Transformer,
    adam,
    agree,
    mlp,
    next_token,
    numbers,
    same,
    squares,
    state,
    tokens,
    train,
    twice,
)
from stillframe.offload import offload_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

TEXT = {"loss": next_token, "batch": tokens}


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(*mlp())
        self[1].requires_grad_(False)
        self[2][0].bias.requires_grad_(False)


class Repeats(nn.Module):
    """A model that uses one layer three times, and a module inside a layer twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.one(self.two(self.one(self.one(x))))

    def layers(self):
        return [self.one, self.one, self.two, self.one]


class MaxNorm(nn.Module):
    """An embedding whose forward writes to its weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, max_norm=0.5)
        self.out = nn.Linear(WIDTH, 11)

    def forward(self, x):
        return self.out(self.embedding(x))


class Counter(nn.Module):
    """A module whose forward replaces its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.scale = self.scale * 0.9
        return self.linear(x) * self.scale


class Positions(nn.Module):
    """A module with a buffer that backward needs and that no forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * self.angles


def branches(kind):
    return nn.Sequential(*(kind() for _ in range(3)))


MODELS = {
    "an MLP": (mlp, list, {}),
    "accumulated gradients": (mlp, list, {"parts": 3}),
    "a transformer with tied embeddings": (Transformer, Transformer.layers, TEXT),
    "tied embeddings, accumulated": (Transformer, Transformer.layers, {**TEXT, "parts": 2}),
    "BatchNorm": (lambda: mlp(nn.BatchNorm1d(WIDTH)), list, {"parts": 2}),
    "frozen layers": (Frozen, list, {"parts": 2}),
    "a layer used several times": (Repeats, Repeats.layers, {"parts": 2}),
    "an LSTM": (Recurrent, lambda m: [m.first, m.rnn], {}),
    "weights that forward writes": (MaxNorm, lambda m: [m.embedding, m.out], TEXT),
    "buffers that forward replaces": (lambda: branches(Counter), list, {}),
    "buffers that backward needs": (lambda: branches(Positions), list, {}),
    "bf16 autocast": (
        Transformer,
        Transformer.layers,
        {**TEXT, "around": lambda: torch.autocast("cpu", torch.bfloat16)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_with_offloaded_layers_equals_the_plain_one(either, name):
    keep = int(either == "fake")
    make, layers, how = MODELS[name]
    torch.manual_seed(1)
    plain, offloaded = twice(make(), layers, offloaded={"keep": keep}, **how)
    assert agree(plain, offloaded)


def through_checkpoints(use_reentrant, nr, model, batch):
    """Run the model's layers under checkpoints of a given number of layers each."""
    x = model.embedding(batch[:, :-1])
    for start in range(0, len(model.blocks), nr):
        some = nn.Sequential(*model.blocks[start : start + nr])
        x = checkpoint(some, x, use_reentrant=use_reentrant)
    return nn.functional.cross_entropy(model.head(x).flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("nr", [1, 2, 4])
def test_training_with_checkpoints_around_layers_equals_the_plain_one(either, nr, use_reentrant):
    model = Transformer(4)
    loss = functools.partial(through_checkpoints, use_reentrant, nr)
    plain, offloaded = twice(model, Transformer.layers, loss=loss, batch=tokens, parts=2)
    assert agree(plain, offloaded)


class Checkpointed(Block):
    def __init__(self, use_reentrant):
        super().__init__()
        self.norms.append(nn.BatchNorm1d(WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.own, x, use_reentrant=self.use_reentrant)

    def own(self, x):
        return super().forward(self.norms[2](x.flatten(0, 1)).view_as(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_training_with_checkpoints_inside_layers_equals_the_plain_one(either, use_reentrant):
    model = Transformer()
    model.blocks = nn.ModuleList(Checkpointed(use_reentrant) for _ in range(3))
    plain, offloaded = twice(model, Transformer.layers, **TEXT)
    assert agree(plain, offloaded)


class Lowered(nn.Module):
    """Does what `dtype=` does, in plain torch: computes with differentiable low-precision
    copies."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            low = {name: p.bfloat16() for name, p in layer.named_parameters()}
            x = torch.func.functional_call(layer, low, x)
        return x


def test_low_precision_copy_goes_to_the_device_and_the_parameter_stays(either):
    layers = list(mlp())
    other = copy.deepcopy(layers)

    def low(seed):
        return numbers(seed).bfloat16()

    plain = train(Lowered(layers), batch=low, parts=2)
    with offload_layers(other, device="cpu", dtype=torch.bfloat16):
        offloaded = train(nn.Sequential(*other), batch=low, parts=2)
    assert agree(plain, offloaded)
    assert all(p.dtype is torch.float32 for layer in other for p in layer.parameters())


def test_training_with_clipping_and_scaling_equals_the_plain_one(either):
    def steps(model):
        torch.manual_seed(3)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        norms = []
        for step in range(4):
            opt.zero_grad()
            scaler.scale(squares(model, numbers(step))).backward()
            scaler.unscale_(opt)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            scaler.step(opt)
            scaler.update()
        return [*norms, *state(model, opt), torch.tensor(scaler.get_scale())]

    model = mlp()
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        assert same(steps(model), steps(other))


def test_optimizer_inside_backward_trains_as_the_plain_model(either):
    def steps(model):
        made = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def hook(p):
            made[p].step()
            made[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            squares(model, numbers(step)).backward()
        return state(model)

    model = mlp()
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        assert same(steps(model), steps(other))


def test_autograd_grad_returns_the_gradients(either):
    model = mlp()
    plain = torch.autograd.grad(squares(model, numbers(0)), list(model.parameters()))
    with offload_layers(model, device="cpu"):
        assert same(
            plain, torch.autograd.grad(squares(model, numbers(0)), list(model.parameters()))
        )
    assert all(p.grad is None for p in model.parameters())


def test_backward_for_some_parameters_leaves_other_gradients_unchanged(either):
    model = mlp()
    plain = torch.autograd.grad(squares(model, numbers(0)), [model[1][0].weight])
    with offload_layers(model, device="cpu"):
        squares(model, numbers(0)).backward(inputs=[model[1][0].weight])
    assert same(plain, [model[1][0].weight.grad])
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["1.0.weight"]


def test_backward_may_run_twice_and_create_graph_is_refused(either):
    def grads(model):
        loss = squares(model, numbers(0))
        loss.backward(retain_graph=True)
        loss.backward()
        return state(model)

    model = Repeats()
    other = copy.deepcopy(model)
    with offload_layers(other.layers(), device="cpu"):
        assert same(grads(model), grads(other))
        loss = squares(other, numbers(0))
        with pytest.raises(stillframe.StillframeError, match="create_graph"):
            torch.autograd.grad(loss, other.one.weight, create_graph=True)


def test_evaluation_between_steps_changes_nothing(either):
    def steps(model):
        opt = adam(model)
        seen = []
        for step in range(3):
            loss = squares(model, numbers(step))
            model.eval()
            with torch.no_grad():
                seen.append(squares(model, numbers(99)))
            with torch.inference_mode():
                seen.append(squares(model, numbers(98)).clone())
            model.train()
            opt.zero_grad()
            loss.backward()
            opt.step()
        return [*seen, *state(model, opt)]

    model = mlp(nn.BatchNorm1d(WIDTH))
    other = copy.deepcopy(model)
    for keep in (0, 2):
        with offload_layers(copied := copy.deepcopy(other), device="cpu", keep=keep):
            assert same(steps(copy.deepcopy(model)), steps(copied))


class FailsAt(nn.Module):
    """A layer whose backward raises while `fail` is set."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fail = False

    def forward(self, x):
        y = self.linear(torch.tanh(self.linear(x)))
        return Bang.apply(y) if self.fail else y


def test_error_in_backward_leaves_the_gradients_of_a_plain_one(either):
    def steps(model):
        opt, seen = adam(model), []
        for step in range(4):
            model[2].fail = step == 2
            if step != 3:  # the step after the failed backward uses the gradients that it left
                opt.zero_grad()
            loss = squares(model, numbers(step))
            if step == 2:
                with pytest.raises(ArithmeticError):
                    loss.backward()
                del loss
            else:
                loss.backward()
            seen += state(model)
            opt.step()
        return [*seen, *state(model, opt)]

    model = nn.Sequential(*mlp(depth=2), FailsAt(), *mlp(depth=2))
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        assert same(steps(model), steps(other))
        assert all(isinstance(p, nn.Parameter) for p in other.parameters())


def test_an_error_in_forward_leaves_the_module_as_it_was(either):
    class Picky(nn.Linear):
        def forward(self, x):
            if x.isnan().any():
                raise ArithmeticError("not a number")
            return super().forward(x)

    model = nn.Sequential(Picky(WIDTH, WIDTH), Picky(WIDTH, WIDTH))
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        before = list(other.parameters())
        with pytest.raises(ArithmeticError):
            other(torch.full((1, WIDTH), torch.nan))
        assert all(a is b for a, b in zip(before, other.parameters(), strict=True))
        assert agree(train(model), train(other))


def test_two_offloaded_models_train_independently(either):
    models = [mlp(), mlp(nn.BatchNorm1d(WIDTH))]
    others = copy.deepcopy(models)

    def steps(one, two):
        losses = []
        for step in range(3):
            x = one(numbers(step))
            losses.append(((x - two(x.detach())) ** 2).mean() + squares(two, x))
            losses[-1].backward()
        return [*losses, *state(one), *state(two)]

    with offload_layers(others[0], device="cpu"), offload_layers(others[1], device="cpu"):
        assert same(steps(*models), steps(*others))


# ---- saves ----


def test_save_during_training_holds_the_state_at_the_call(either, tmp_path):
    model = mlp(nn.BatchNorm1d(512), depth=3)
    for layer in model:
        layer[0] = nn.Linear(512, 512)
    opt = torch.optim.AdamW(model.parameters())
    saves = []
    with offload_layers(model, device="cpu"):
        for step in range(6):
            for part in range(2):
                x = torch.randn(4, 512)
                (model(x) ** 2).mean().backward()
                if part == step % 2:
                    tree = {
                        "model": model.state_dict(),
                        "optim": opt.state_dict(),
                        "grads": [p.grad for p in model.parameters()],
                    }
                    expected = copy.deepcopy(tree)
                    saves.append((stillframe.async_save(tree, tmp_path / f"{step}.pt"), expected))
            opt.step()
            opt.zero_grad()
    for handle, expected in saves:
        report = handle.result()
        found = stillframe.load(report.path)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any(handle.result().deferred_nbytes for handle, _ in saves)
