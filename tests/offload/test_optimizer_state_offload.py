"""Offloaded optimizer state: it is in the pool between steps and gives the same results."""

import copy

import pytest
import stillframe
import torch
from fix_offloading import same, squares, state, tensors_of
from fix_waits import eventually
from stillframe import testing
from stillframe.offload import offload_optimizer_state
from torch import nn

WIDTH = 64  # the weights have 16 KiB, so their state is offloaded


def network(depth=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


def groups(model):
    return [{"params": list(layer.parameters())} for layer in model]


def batch(step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


KINDS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, centered=True),
}


def steps(model, opt, nr=4, first=0):
    for step in range(first, first + nr):
        opt.zero_grad()
        squares(model, batch(step)).backward()
        opt.step()
    return [*state(model), *(t.detach().clone() for t in tensors_of(opt.state_dict()["state"]))]


@pytest.mark.parametrize("name", KINDS)
def test_step_equals_that_of_a_resident_state(either, name):
    model = network()
    other = copy.deepcopy(model)
    opt, away = KINDS[name](groups(model)), KINDS[name](groups(other))
    with offload_optimizer_state(away) as handle:
        assert same(steps(model, opt), steps(other, away))
        stats = handle.stats()
        assert stats["groups_onloaded"] >= 3 * 4
        assert stats["groups_prefetched"] == stats["groups_onloaded"] * 3 // 4
    assert same(steps(model, opt), steps(other, away))


def test_existing_optimizer_state_is_taken_over(either):
    model = network()
    opt = KINDS["AdamW"](groups(model))
    steps(model, opt)
    other, opt2 = copy.deepcopy((model, opt))
    with offload_optimizer_state(opt2):
        assert same(steps(model, opt), steps(other, opt2))


def test_between_steps_the_state_is_in_the_pool(either):
    with stillframe.Engine(pool_bytes=1 << 26, block_bytes=1 << 16) as engine:
        model = network()
        opt = KINDS["Adam"](groups(model))
        with offload_optimizer_state(opt, engine=engine):
            before = engine.stats()["leased_bytes"]
            steps(model, opt)
            big = [t for t in tensors_of(dict(opt.state)) if t.nbytes >= 4096]
            assert len(big) == 4 * 3
            assert engine.stats()["leased_bytes"] - before >= sum(t.nbytes for t in big)


def test_training_with_closures_schedulers_and_scalers_equals_the_plain_one(either):
    def run(model, opt):
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            opt.zero_grad()
            scaler.scale(squares(model, batch(step))).backward()
            scaler.step(opt)
            scaler.update()
            scheduler.step()

        def closure():
            opt.zero_grad()
            loss = squares(model, batch(9))
            loss.backward()
            return loss

        return [opt.step(closure).detach(), *state(model, opt)]

    model = network()
    other = copy.deepcopy(model)
    opt, away = KINDS["AdamW"](groups(model)), KINDS["AdamW"](groups(other))
    with offload_optimizer_state(away):
        assert same(run(model, opt), run(other, away))


def test_training_with_missing_gradients_and_added_groups_equals_the_plain_one(either):
    def run(model, opt):
        for step in range(4):
            opt.zero_grad()
            squares(model[: 2 + step % 3], batch(step)).backward()
            if step % 2:
                for p in model[1].parameters():
                    p.grad = None
            opt.step()
            if step == 2:
                opt.add_param_group({"params": list(model[3].parameters())})
        return state(model, opt)

    model = network()
    other = copy.deepcopy(model)
    opt, away = KINDS["AdamW"](groups(model[:3])), KINDS["AdamW"](groups(other[:3]))
    with offload_optimizer_state(away):
        assert same(run(model, opt), run(other, away))


def test_state_of_an_added_group_is_in_the_pool(either):
    model = network()
    opt = KINDS["AdamW"](groups(model[:3]))
    with offload_optimizer_state(opt) as handle:
        steps(model, opt, 1)
        opt.add_param_group({"params": list(model[3].parameters())})
        for onloaded, offloaded in ((3, 4), (4, 4)):  # the first step makes the state
            before = handle.stats()
            steps(model, opt, 1)
            after = handle.stats()
            assert after["groups_onloaded"] - before["groups_onloaded"] == onloaded
            assert after["groups_offloaded"] - before["groups_offloaded"] == offloaded


class Rounds(torch.optim.Optimizer):
    """An optimizer whose step visits the groups twice and reads a group's state again."""

    def __init__(self, groups):
        super().__init__(groups, {})
        self.after_group = lambda: None

    @torch.no_grad()
    def step(self, closure=None):
        for _ in range(2):
            for group in self.param_groups:
                for p in group["params"]:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    assert self.state[p]["mean"] is mean
                for p in group["params"]:
                    p.sub_(self.state[p]["mean"], alpha=0.1)
                del mean
                self.after_group()


def test_group_read_again_within_a_step_is_onloaded_again(either):
    stillframe.register_optimizer(Rounds)
    model = network(3)
    other = copy.deepcopy(model)
    opt, away = Rounds(groups(model)), Rounds(groups(other))
    with offload_optimizer_state(away) as handle:
        assert same(steps(model, opt, 1), steps(other, away, 1))
        before = handle.stats()
        assert same(steps(model, opt, 2, 1), steps(other, away, 2, 1))
        after = handle.stats()
    # Three groups, twice in a step; each is onloaded once for several lookups in a row.
    assert after["groups_onloaded"] - before["groups_onloaded"] == 2 * 6
    assert after["groups_offloaded"] - before["groups_offloaded"] == 2 * 6
    # Prefetched in the first round; in the second round it has just left the device.
    assert after["groups_prefetched"] - before["groups_prefetched"] == 2 * 2


def test_two_groups_at_most_are_on_the_device(either):
    stillframe.register_optimizer(Rounds)
    model = network()
    opt = Rounds(groups(model))
    seen = []
    with offload_optimizer_state(opt) as handle:
        steps(model, opt, 1)

        def inspect():
            # Memory on the device is kept until its copy completes.
            assert eventually(lambda: not handle.stats()["bytes_lingering"])
            seen.append(handle.stats())

        opt.after_group = inspect
        steps(model, opt, 1)
    assert len(seen) == 8
    assert all(each["slots_in_use"] <= 2 and each["bytes_lingering"] == 0 for each in seen)


def test_small_state_is_not_offloaded(either):
    model = network(2)
    opt = KINDS["Adam"](groups(model))
    with offload_optimizer_state(opt):
        steps(model, opt, 1)
        counts = [state["step"] for state in dict(opt.state).values()]
        steps(model, opt, 1)
        after = [state["step"] for state in dict(opt.state).values()]
        assert all(a is b for a, b in zip(counts, after, strict=True))


def test_remove_leaves_an_ordinary_state(either):
    with stillframe.Engine(pool_bytes=1 << 24, block_bytes=1 << 16) as engine:
        model = network(2)
        opt = KINDS["Adam"](groups(model))
        plain, other = copy.deepcopy((model, opt))
        with offload_optimizer_state(opt, engine=engine):
            assert same(steps(model, opt), steps(plain, other))
        assert engine.stats()["leased_bytes"] == 0
        assert type(opt.state) is type(other.state)
        for tensor in tensors_of(dict(opt.state)):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_replaced_state_is_taken_over(either):
    model = network(2)
    opt = KINDS["SGD"](groups(model))
    plain, other = copy.deepcopy((model, opt))
    with offload_optimizer_state(opt) as handle:
        steps(model, opt, 1)
        opt.state = type(other.state)(dict, {p: dict(s) for p, s in opt.state.items()})
        before = handle.stats()["groups_onloaded"]
        steps(model, opt, 1, 1)
        assert handle.stats()["groups_onloaded"] - before == 2
        assert same(steps(model, opt, 1, 2), steps(plain, other, 3))


def test_state_of_another_dtype_is_converted_as_by_torch(either):
    model = network(2)
    opt = KINDS["Adam"](groups(model))
    steps(model, opt, 1)
    plain, other = copy.deepcopy((model, opt))
    wide = copy.deepcopy(opt.state_dict())
    for entries in wide["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entries[key] = entries[key].double()
    with offload_optimizer_state(other):
        for each in (opt, other):
            each.load_state_dict(copy.deepcopy(wide))
        assert same(tensors_of(opt.state_dict()), tensors_of(other.state_dict()))
        assert same(steps(model, opt, 2), steps(plain, other, 2))


def test_state_dicts_load_in_both_directions(either, tmp_path):
    model = network()
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    opt, away, fresh = (KINDS["AdamW"](groups(m)) for m in (model, other, third))
    steps(model, opt)
    with offload_optimizer_state(away) as handle:
        other.load_state_dict(model.state_dict())
        away.load_state_dict(copy.deepcopy(opt.state_dict()))
        moved = handle.stats()["groups_onloaded"]
        assert same(tensors_of(opt.state_dict()), tensors_of(away.state_dict()))
        assert handle.stats()["groups_onloaded"] == moved
        assert same(steps(model, opt), steps(other, away))
        torch.save(away.state_dict(), tmp_path / "state.pt")
        fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
        third.load_state_dict(other.state_dict())
        other, away = copy.deepcopy((other, away))  # copies are ordinary optimizers
        assert type(away.state) is type(fresh.state)
    assert same(steps(model, opt), steps(third, fresh))
    assert same(steps(model, opt, 0), steps(other, away))


def test_load_state_dict_uses_no_device_memory(either, monkeypatch):
    model = network()
    opt = KINDS["Adam"](groups(model))
    steps(model, opt)
    saved = opt.state_dict()
    seen = []
    real = torch.optim.Optimizer._process_value_according_to_param_policy

    def policy(param, value, *args, **kwargs):
        seen.append(value.nbytes)
        return real(param, value, *args, **kwargs)

    monkeypatch.setattr(
        torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(policy)
    )
    with offload_optimizer_state(opt):
        opt.load_state_dict(saved)
    assert seen and max(seen) < 4096


def test_error_in_a_step_leaves_the_state_complete(either):
    model = network()
    opt = KINDS["SGD"](groups(model))
    with offload_optimizer_state(opt):
        steps(model, opt)
        before = copy.deepcopy(opt.state_dict())
        opt.param_groups[2]["lr"] = "much"
        squares(model, batch(0)).backward()
        with pytest.raises(TypeError):
            opt.step()
        after = opt.state_dict()
        tensors = tensors_of(after["state"])
        assert len(tensors) == len(tensors_of(before["state"]))
        assert all(isinstance(t, torch.Tensor) for t in tensors)
        third = [tensors_of(each["state"][6]) for each in (before, after)]
        assert same(*third)
        opt.param_groups[2]["lr"] = 0.1
        opt.step()


def test_prefetch_of_an_interrupted_step_is_repeated(either):
    def run(model, opt):
        steps(model, opt, 2)
        momenta = [opt.state[p]["momentum_buffer"] for p in model[1].parameters()]
        opt.param_groups[0]["lr"] = "much"
        with pytest.raises(TypeError):
            opt.step()
        opt.param_groups[0]["lr"] = 0.1
        for momentum in momenta:
            momentum.data.mul_(2)  # the version does not change
        for p in model[0].parameters():
            p.grad = None  # the next step begins with the second group
        opt.step()
        return steps(model, opt, 2, 2)

    model = network()
    other = copy.deepcopy(model)
    opt, away = KINDS["SGD"](groups(model)), KINDS["SGD"](groups(other))
    with offload_optimizer_state(away):
        assert same(run(model, opt), run(other, away))


def test_host_waits_once_per_step(either):
    model = network()
    opt = KINDS["Adam"](groups(model))
    with offload_optimizer_state(opt) as handle:
        steps(model, opt, 1)
        before = handle.stats()["host_waits"]
        steps(model, opt, 2, 1)
        # One wait in a step, and one for the state that the test reads.
        assert handle.stats()["host_waits"] == before + 2


def test_a_save_holds_the_state_at_the_call(either, tmp_path):
    model = network()
    opt = KINDS["AdamW"](groups(model))
    saves = []
    with offload_optimizer_state(opt):
        for step in range(6):
            opt.zero_grad()
            squares(model, batch(step)).backward()
            if step % 2:
                tree = {"model": model.state_dict(), "optim": opt.state_dict()}
                expected = copy.deepcopy(tree)
                saves.append((stillframe.async_save(tree, tmp_path / f"{step}.pt"), expected))
            opt.step()
            if step % 2 == 0:
                tree = {"model": model.state_dict(), "optim": opt.state_dict()}
                expected = copy.deepcopy(tree)
                saves.append((stillframe.async_save(tree, tmp_path / f"{step}.pt"), expected))
        for handle, expected in saves:
            found = stillframe.load(handle.result().path)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def large(depth=3, width=160):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def step(model, opt, seed):
    opt.zero_grad()
    made = torch.Generator().manual_seed(seed)
    squares(model, torch.randn(4, 160, generator=made)).backward()
    opt.step()


def test_save_copies_the_pooled_state_after_its_call(either, engine, tmp_path):
    model = large()
    opt = KINDS["AdamW"](groups(model))
    with offload_optimizer_state(opt, engine=engine):
        for seed in range(3):
            step(model, opt, seed)
        expected = copy.deepcopy(opt.state_dict())
        with testing.slow("lane_copy", 0.01):
            handle = stillframe.async_save(opt.state_dict(), tmp_path / "a.pt", engine=engine)
            step(model, opt, 3)
            opt.load_state_dict(copy.deepcopy(expected))
            step(model, opt, 4)
        report = handle.result()
        torch.testing.assert_close(stillframe.load(report.path), expected, rtol=0, atol=0)
        # Everything except step counts and small tensors.
        weights = sum(2 * layer.weight.nbytes for layer in model)
        assert report.deferred_nbytes == weights
        # Loaded state must be observed again.
        handle = stillframe.async_save(opt.state_dict(), tmp_path / "b.pt", engine=engine)
        assert handle.result().deferred_nbytes == 0


def test_state_written_outside_steps_is_copied_in_the_call(either, engine, tmp_path):
    model = large()
    opt = KINDS["AdamW"](groups(model))
    with offload_optimizer_state(opt, engine=engine):
        for seed in range(4):
            step(model, opt, seed)
            opt.state[model[0].weight]["exp_avg"].mul_(0.5)
        handle = stillframe.async_save(opt.state_dict(), tmp_path / "a.pt", engine=engine)
        expected = copy.deepcopy(opt.state_dict())
        opt.state[model[1].weight]["exp_avg"].zero_()
        report = handle.result()
        assert report.deferred_nbytes == 0
        torch.testing.assert_close(stillframe.load(report.path), expected, rtol=0, atol=0)


def test_write_during_a_save_tears_it_and_the_state_is_captured_from_then_on(
    either, engine, tmp_path
):
    model = large()
    opt = KINDS["AdamW"](groups(model))
    with offload_optimizer_state(opt, engine=engine):
        for seed in range(3):
            step(model, opt, seed)
        expected = copy.deepcopy(opt.state_dict())
        with testing.held("lane_copy"):
            handle = stillframe.async_save(opt.state_dict(), tmp_path / "a.pt", engine=engine)
            # The write changes no byte, but it counts as a write all the same.
            opt.state[model[1].weight]["exp_avg"].add_(0)
        error = handle.exception()
        if error is None and either == "fake":
            # On the fake driver the pool looks like device memory, whose copy may be done before
            # the write.
            torch.testing.assert_close(stillframe.load(handle.path), expected, rtol=0, atol=0)
            return
        assert isinstance(error, stillframe.TornSnapshotError)
        handle = stillframe.async_save(opt.state_dict(), tmp_path / "a.pt", engine=engine)
        assert handle.result().deferred_nbytes == 0


def test_unsupported_optimizers_are_refused():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = network(1)
    for opt in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), lr=0.1)):
        with pytest.raises(TypeError, match="may look at all of it at once"):
            offload_optimizer_state(opt)
    with pytest.raises(TypeError, match="got a Linear"):
        offload_optimizer_state(nn.Linear(1, 1))
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))])
    with pytest.raises(ValueError, match="several devices: cpu, meta"):
        offload_optimizer_state(opt)
    opt = torch.optim.SGD(model.parameters())
    with offload_optimizer_state(opt) as handle:
        with pytest.raises(ValueError, match="offloaded already"):
            offload_optimizer_state(opt)
        handle.remove()
    offload_optimizer_state(opt).remove()
