"""Which storages a save may defer, for every kind of optimizer."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fix_gate import (
    NUMEL,
    deferred,
    give_gradients,
    lanes,
    param,
    run_steps,
    skeleton_of,
    state_tensors,
)
from stillframe import _core
from stillframe._tree.skeleton import SOURCE
from stillframe._watch import gate, ownership
from stillframe._watch.memory_owners import Marks
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer


@pytest.fixture(autouse=True)
def no_left_over_steps() -> Iterator[None]:
    """Forget optimizers of earlier tests whose step raised; they would count as active."""
    if ownership.active():
        gc.collect()
    assert not ownership.active()
    yield


def adamw(*params: nn.Parameter, **options: Any) -> AdamW:
    return AdamW(list(params), **options)


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str
)
def test_parameters_and_state_are_deferred_after_two_clean_cycles(options):
    p = param()
    opt = adamw(p, **options)
    for step in range(1, 6):
        run_steps(opt, 1)
        wanted = step >= 3  # the gates of steps 2 and 3 found nothing changed
        assert deferred(p, *state_tensors(opt)) == [wanted] * 3


def test_nothing_is_deferred_with_overlap_false():
    p = param()
    opt = adamw(p)
    run_steps(opt, 4)
    skeleton = skeleton_of([p])
    assert gate.defer(skeleton, overlap=False).indices == []
    assert lanes(skeleton) == [0]


def test_1200_storages_are_decided_by_the_fourth_gate():
    params = [param(2048) for _ in range(400)]
    opt = adamw(*params)
    run_steps(opt, 3)
    give_gradients(opt)
    opt.step()
    owner = ownership.find(opt)
    assert owner is not None
    assert owner.observer.counts() == (0, 1200, 0)


def test_small_storages_are_captured():
    p, q = param(1024), param(1025)  # 4096 bytes, and 4100
    opt = adamw(p, q)
    run_steps(opt, 4)
    assert deferred(p, q) == [False, True]


def test_a_small_view_of_a_large_storage_is_deferred_with_it():
    flat = torch.randn(NUMEL)
    p, q = nn.Parameter(flat[:10]), nn.Parameter(flat[10:])
    opt = SGD([p, q], lr=0.1)
    run_steps(opt, 4)
    assert deferred(p, q) == [True, True]


def test_stateless_optimizer_owns_parameters_with_gradients_at_a_step():
    p, q = param(), param()
    opt = SGD([p, q], lr=0.1)
    for _ in range(4):
        p.grad = torch.ones_like(p)
        opt.step()
    assert deferred(p, q) == [True, False]
    for _ in range(4):  # the save above met `q`, which has gradients from now on
        q.grad = torch.ones_like(q)
        opt.step()
        deferred(q)
    assert deferred(p, q) == [True, True]


def test_a_parameter_without_state_among_others_with_state_is_captured():
    # Like a momentum encoder in Adam(self.parameters()): requires_grad, but never a gradient.
    p, encoder = param(), param()
    opt = Adam([p, encoder])
    for _ in range(5):
        p.grad = torch.ones_like(p)
        opt.step()
        with torch.no_grad():
            encoder.lerp_(p, 0.01)
    assert deferred(p, encoder) == [True, False]


def test_frozen_parameters_are_captured():
    p, q = param(), param()
    opt = adamw(p, q)
    run_steps(opt, 4)
    q.requires_grad_(False)
    assert deferred(p, q) == [True, False]


def test_storage_is_deferred_only_if_all_its_owners_are_trained():
    flat = torch.randn(2 * NUMEL)
    p, q = nn.Parameter(flat[:NUMEL]), nn.Parameter(flat[NUMEL:])
    opt = adamw(p, q)
    run_steps(opt, 4)
    assert deferred(p) == [True]
    q.requires_grad_(False)
    assert deferred(p) == [False]


def test_storage_shared_with_a_frozen_parameter_is_captured():
    flat = torch.randn(2 * NUMEL)
    p = nn.Parameter(flat[:NUMEL])
    frozen = nn.Parameter(flat[NUMEL:], requires_grad=False)
    opt = adamw(p, frozen)
    run_steps(opt, 5)
    assert deferred(p) == [False]
    assert deferred(*state_tensors(opt)) == [True, True]


def test_tensor_removed_from_groups_or_state_is_captured():
    p, q, r = param(), param(), param()
    opt = adamw(p, q, r)
    run_steps(opt, 4)
    old = opt.state[q]["exp_avg"]
    assert deferred(p, q, r, old) == [True] * 4
    opt.param_groups[0]["params"].remove(p)
    del opt.state[q]
    assert deferred(p, q, r, old) == [False, False, True, False]


def test_tensors_outside_the_optimizer_are_captured():
    p = param()
    opt = adamw(p)
    run_steps(opt, 4)
    ema, plain = p.detach().clone(), torch.randn(NUMEL)
    assert deferred(p, ema, plain) == [True, False, False]


def test_a_tensor_lr_is_captured():
    p = param()
    lr = torch.full((NUMEL,), 0.001)[0]
    opt = SGD([p], lr=lr, foreach=False)
    run_steps(opt, 4)
    assert deferred(p, lr) == [True, False]


def test_shared_memory_is_captured():
    p, q = param(), param()
    p.share_memory_()
    opt = adamw(p, q)
    run_steps(opt, 4)
    assert deferred(p, q) == [False, True]
    q.share_memory_()  # the same StorageImpl, with other memory
    assert deferred(p, q) == [False, False]
    run_steps(opt, 4)
    assert deferred(p, q) == [False, False]


def test_a_registered_subclass_of_tensor_is_captured():
    class Special(nn.Parameter):
        pass

    p = Special(torch.randn(NUMEL))
    opt = SGD([p], lr=0.1)
    run_steps(opt, 5)
    assert deferred(p) == [False]


# ---- observation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.clamp_(-0.5, 0.5),
        lambda p: p.data.mul_(0.999),
        lambda p: torch._foreach_mul_([p], 0.999),
        lambda p: p.data[0].add_(1),
        lambda p: p.data[NUMEL // 2].add_(1),
        lambda p: p.data[-1].add_(1),
    ],
    ids=["clamp", "data", "foreach", "start", "middle", "end"],
)
def test_storage_written_between_steps_is_captured(write):
    p, q = param(), param()
    opt = adamw(p, q)

    def between() -> None:
        with torch.no_grad():
            write(p)

    run_steps(opt, 4, between)
    assert deferred(p, q, *state_tensors(opt)) == [False, True, True, True, True, True]


def test_storage_changed_once_is_captured_until_load_state_dict():
    p, q = param(), param()
    opt = adamw(p, q)
    run_steps(opt, 1)
    p.data.mul_(2)
    run_steps(opt, 10)
    assert deferred(p, q) == [False, True]
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert deferred(p, q, *state_tensors(opt)) == [False] * 6
    run_steps(opt, 2)
    assert deferred(p, q) == [False, False]
    run_steps(opt, 1)
    assert deferred(p, q, *state_tensors(opt)) == [True] * 6


def test_max_norm_embeddings_are_captured():
    embedding = nn.Embedding(64, 64, max_norm=0.1)
    head = nn.Linear(64, 64)
    opt = SGD([*embedding.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    for _ in range(4):
        opt.zero_grad()
        head(embedding(torch.arange(64))).sum().backward()
        opt.step()
    assert deferred(embedding.weight, head.weight) == [False, True]


def test_new_storages_are_captured_until_observed():
    p = param()
    opt = adamw(p)
    run_steps(opt, 4)
    p.data = torch.randn(NUMEL)
    assert deferred(p, *state_tensors(opt)) == [False, True, True]
    run_steps(opt, 3)
    assert deferred(p, *state_tensors(opt)) == [True, True, True]


@pytest.mark.parametrize("by", ["a new parameter", "a parameter that moves"])
def test_storage_with_a_new_tensor_is_captured_until_observed_again(by):
    p, q = param(), param()
    opt = adamw(p, q)
    run_steps(opt, 4)
    assert deferred(p, q) == [True, True]
    if by == "a parameter that moves":
        q.data = p.detach()
    other = p.detach() if by == "a new parameter" else torch.randn(NUMEL)
    opt.add_param_group({"params": [nn.Parameter(other)]})
    run_steps(opt, 1)
    assert deferred(p) == [False]
    run_steps(opt, 4)
    assert deferred(p) == [True]


def test_module_moved_there_and_back_is_captured_until_observed():
    module = nn.Linear(64, 64)
    opt = SGD(module.parameters(), lr=0.1, momentum=0.9)
    run_steps(opt, 4)
    assert deferred(module.weight) == [True]
    module.to(torch.float64).to(torch.float32)
    assert deferred(module.weight) == [False]
    run_steps(opt, 4)
    assert deferred(module.weight) == [True]


def test_a_resized_storage_is_captured():
    p = param()
    opt = adamw(p)
    run_steps(opt, 4)
    p.untyped_storage().resize_(8 * NUMEL)
    assert deferred(p) == [False]
    run_steps(opt, 1)
    p.untyped_storage().resize_(16 * NUMEL)  # between a record and its comparison
    run_steps(opt, 1)
    p.untyped_storage().resize_(0)
    owner = ownership.find(opt)
    assert owner is not None
    owner.compare()  # it must not read the freed memory
    assert deferred(p) == [False]


def test_resized_storage_is_deferred_after_it_is_observed_again():
    p = param()
    opt = SGD([p], lr=0.1)
    run_steps(opt, 4)
    p.untyped_storage().resize_(8 * NUMEL)
    assert deferred(p) == [False]
    run_steps(opt, 4)
    assert deferred(p) == [True]


def test_freed_memory_is_never_read():
    p = param(1 << 21)  # 8 MiB: unmapped as soon as it is freed
    opt = SGD([p], lr=0.1)
    run_steps(opt, 2)
    owner = ownership.find(opt)
    assert owner is not None
    p.untyped_storage().resize_(0)
    owner.compare()  # compares what was recorded at the end of the second step
    assert owner.observer.counts() == (0, 0, 1)


def test_a_group_added_later_is_observed():
    p, q = param(), param()
    opt = adamw(p)
    run_steps(opt, 4)
    opt.add_param_group({"params": [q]})
    assert deferred(p, q) == [True, False]
    run_steps(opt, 3)
    assert deferred(p, q) == [True, True]


def test_lists_and_dicts_in_the_state_are_observed():
    p = param()
    opt = torch.optim.LBFGS([p], max_iter=3, history_size=4)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (p**2).sum() + (p**4).sum()
        loss.backward()
        return loss

    for _ in range(8):
        opt.step(closure)
        old = list(opt.state[p]["old_dirs"])
        deferred(p, *old)  # finds new history, which is then enrolled
    assert deferred(p) == [True]
    opt.param_groups[0]["max_iter"] = 0
    for _ in range(4):
        opt.step(closure)
    assert all(deferred(*opt.state[p]["old_dirs"]))


def test_recursive_state_is_observed_without_a_loop():
    p = param()
    opt = adamw(p)
    run_steps(opt, 1)
    opt.state[p]["all"] = opt.state[p]
    run_steps(opt, 4)
    assert deferred(p, opt.state[p]["exp_avg"]) == [True, True]


def test_steps_do_not_enable_garbage_collection():
    p = param()
    gc.disable()
    try:
        opt = adamw(p)
        run_steps(opt, 4)
        assert deferred(p) == [True]
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_observation_stops_once_a_storage_is_decided():
    p = param()
    opt = adamw(p)
    run_steps(opt, 4)
    p.data[0] = 5.0  # a rare write, which the detectors find
    run_steps(opt, 1)
    assert deferred(p) == [True]


# ---- whose step it is -------------------------------------------------------------------------


class SubclassWithStep(SGD):
    """A SAM-like class: it writes parameters before and after calling its base."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.01)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.01)
        super().step()
        return loss


class SubclassWithoutStep(SGD):
    pass


def sgd_like(cls: type[SGD], p: nn.Parameter) -> SGD:
    return cls([p], lr=0.1, momentum=0.9)


def test_a_subclass_with_a_step_of_its_own_is_captured():
    p = param()
    opt = sgd_like(SubclassWithStep, p)
    run_steps(opt, 5)
    assert deferred(p, *state_tensors(opt)) == [False, False]


def test_a_subclass_that_inherits_step_is_deferred():
    p = param()
    opt = sgd_like(SubclassWithoutStep, p)
    run_steps(opt, 4)
    assert deferred(p) == [True]


def test_a_registered_class_is_deferred_and_its_subclass_with_another_step_is_not():
    class Registered(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            super().step()
            super().step()
            return loss

    class Inheriting(Registered):
        pass

    class Overriding(Registered):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    made_before = sgd_like(Registered, param())
    run_steps(made_before, 1)
    gate.register_optimizer(Registered)
    made = [made_before, *(sgd_like(c, param()) for c in (Registered, Inheriting, Overriding))]
    for opt in made:
        run_steps(opt, 4)
    assert [deferred(o.param_groups[0]["params"][0]) for o in made] == [
        [True],
        [True],
        [True],
        [False],
    ]


def test_step_inside_another_step_does_not_count_as_a_clean_cycle():
    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            super().step()
            super().step()

    gate.register_optimizer(Twice)
    SGD([param()], lr=0.1)  # after the first SGD, torch runs hooks around SGD's own step too
    p = param()
    opt = sgd_like(Twice, p)
    run_steps(opt, 2)
    assert deferred(p) == [False]
    run_steps(opt, 1)
    assert deferred(p) == [True]


def test_register_optimizer_refuses_other_classes():
    with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer"):
        gate.register_optimizer(nn.Linear)
    with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer"):
        gate.register_optimizer(SGD([param()], lr=0.1))


def test_lr_schedulers_do_not_hide_the_step():
    p = param()
    opt = adamw(p)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 10)
    run_steps(opt, 4, scheduler.step)
    assert deferred(p) == [True]


def test_wrapper_inside_the_hooks_is_not_taken_for_torchs_step():
    class Sneaky(SGD):
        @functools.wraps(SGD.step)
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(0.5)
            return super().step(closure)

    Sneaky.step.__dict__.pop("hooked", None)  # so that torch puts its hooks around it
    p = param()
    opt = Sneaky([p], lr=0.1)
    run_steps(opt, 5)
    assert deferred(p) == [False]


def test_an_instance_whose_step_was_replaced_is_captured():
    p = param()
    opt = adamw(p)
    run_steps(opt, 4)
    original = opt.step
    opt.step = lambda closure=None: original(closure)
    assert deferred(p) == [False]
    opt.__dict__.pop("step")
    assert deferred(p) == [True]


def test_class_that_skips_the_constructor_is_captured():
    class Bare(Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.param_groups = [{"params": params}]
            self.state = {}

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.add_(1)

    p = param()
    opt = Bare([p])
    for _ in range(5):
        opt.step()
    assert ownership.find(opt) is None
    assert deferred(p) == [False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's imports give it
def test_a_compiled_step_is_observed():
    p = param()
    opt = adamw(p)
    step = torch.compile(lambda: opt.step(), backend="eager")
    for _ in range(5):
        give_gradients(opt)
        step()
    assert deferred(p, *state_tensors(opt)) == [True, True, True]


def test_an_optimizer_in_the_backward_is_observed():
    module = nn.Linear(64, 128)
    made = {p: AdamW([p]) for p in module.parameters()}

    def hook(p: Tensor) -> None:
        made[p].step()
        made[p].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(4):
        module(torch.randn(2, 64)).sum().backward()
    assert deferred(module.weight) == [True]


def test_parameter_shared_by_two_optimizers_is_captured():
    shared, p, q = param(), param(), param()
    one, two = adamw(shared, p), adamw(shared, q)
    for _ in range(5):
        run_steps(one, 1)
        run_steps(two, 1)
    assert deferred(shared, p, q) == [False, True, True]
    # After the other owner is gone, the observation starts again.
    del two
    gc.collect()
    run_steps(one, 3)
    assert deferred(shared, p) == [True, True]


def test_parameter_listed_by_a_second_optimizer_is_captured():
    p = param()
    one = adamw(p)
    run_steps(one, 4)
    assert deferred(p) == [True]
    two = adamw(p)
    run_steps(two, 1)
    assert deferred(p) == [False]
    assert deferred(*state_tensors(one)) == [True, True]
    run_steps(two, 4)  # clean cycles do not matter while there is another owner
    assert deferred(p, *state_tensors(two)) == [False, True, True]


# ---- active steps -----------------------------------------------------------------------------


def test_everything_is_captured_during_any_step():
    p, q = param(), param()
    one, two = adamw(p), adamw(q)
    run_steps(one, 4)
    run_steps(two, 4)
    seen: list[list[bool]] = []

    def closure() -> float:
        seen.append(deferred(p, q))
        return 0.0

    give_gradients(two)
    two.step(closure)
    assert seen == [[False, False]]
    assert deferred(p, q) == [True, True]


def test_failed_step_captures_its_storages_until_a_step_completes():
    p, q = param(), param()
    one, two = adamw(p), adamw(q)
    run_steps(one, 4)
    run_steps(two, 4)

    def closure() -> float:
        raise ValueError("bad batch")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad batch"):
            one.step(closure)
    assert deferred(p, q) == [False, True]
    run_steps(two, 1)
    assert deferred(p, q) == [False, True]
    run_steps(one, 1)
    assert deferred(p, q) == [True, True]


def test_step_of_another_thread_counts_from_start_to_end():
    p, q = param(), param()
    one, two = adamw(p), adamw(q)
    run_steps(one, 4)
    run_steps(two, 4)
    inside, go_on = threading.Event(), threading.Event()

    def closure() -> float:
        inside.set()
        assert go_on.wait(60)
        raise ValueError("bad batch")

    def step() -> None:
        with pytest.raises(ValueError, match="bad batch"):
            two.step(closure)

    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(60)
    assert deferred(p, q) == [False, False]
    go_on.set()
    thread.join()
    assert deferred(p, q) == [True, False]


def test_compiled_function_counts_as_a_step_in_progress():
    p, q = param(), param()
    one, two = adamw(p), adamw(q)
    run_steps(one, 4)
    with pytest.raises(ZeroDivisionError):
        two.step(lambda: 1 / 0)
    seen: list[list[bool]] = []

    def torch_dynamo_resume_in_train_at_7() -> None:
        seen.append(deferred(p))

    torch_dynamo_resume_in_train_at_7()
    assert seen == [[False]]


def test_dead_optimizer_whose_step_raised_is_forgotten():
    p, q = param(), param()
    one, two = adamw(p), adamw(q)
    run_steps(one, 4)
    with pytest.raises(ZeroDivisionError):
        two.step(lambda: 1 / 0)
    assert deferred(p) == [True] and id(two) in ownership._active
    del two
    gc.collect()
    assert not ownership._active


def test_state_of_an_optimizer_that_tore_a_copy_stays_captured():
    p, q = param(), param()
    one, two = adamw(p), adamw(q)
    run_steps(one, 4)
    run_steps(two, 4)
    skeleton = skeleton_of([p, q])
    deferral = gate.defer(skeleton, overlap=True)
    deferral.close()
    deferral.distrust(1)
    deferral.distrust(99)
    assert deferred(p, q) == [True, False]
    run_steps(two, 5)
    assert deferred(p, q) == [True, False]


# ---- the version detector ---------------------------------------------------------------------


def test_torn_names_the_storage_whose_tensor_counted_a_write():
    params = [param() for _ in range(5)]
    opt = adamw(*params)
    run_steps(opt, 4)
    untouched = gate.defer(skeleton_of(params), overlap=True)
    untouched.close()
    assert untouched.torn() == -1
    skeleton = skeleton_of([torch.zeros(NUMEL), *params])
    deferral = gate.defer(skeleton, overlap=True)
    deferral.close()
    assert sorted(deferral.indices) == [1, 2, 3, 4, 5]
    with torch.no_grad():
        params[2].mul_(2)
    assert deferral.torn() == 3


def test_a_write_through_one_of_two_tensors_over_a_storage_is_noticed():
    flat = torch.randn(2 * NUMEL)
    p, q = nn.Parameter(flat[:NUMEL]), nn.Parameter(flat[NUMEL:])
    opt = SGD([p, q], lr=0.1)
    run_steps(opt, 4)
    for tensor in (p, q):
        deferral = gate.defer(skeleton_of([p, q]), overlap=True)
        deferral.close()
        assert deferral.indices == [0]
        with torch.no_grad():
            tensor.add_(1)
        assert deferral.torn() == 0


def test_observer_reads_run_no_python_code_under_a_default_device():
    p = param()
    opt = adamw(p)
    calls = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    run_steps(opt, 4)
    skeleton = skeleton_of([p])
    with Mode():
        deferral = gate.defer(skeleton, overlap=True)
        assert deferral.torn() == -1
    deferral.close()
    assert deferral.indices == [0]
    assert calls == []


# ---- memory -----------------------------------------------------------------------------------


def test_nothing_keeps_a_dead_optimizer_or_its_tensors_alive():
    p = param()
    opt = adamw(p)
    run_steps(opt, 4)
    assert deferred(p) == [True]
    exp_avg = weakref.ref(opt.state[p]["exp_avg"])
    refs = [weakref.ref(opt), weakref.ref(p), exp_avg]
    before = len(ownership._owners)
    del opt, p
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert len(ownership._owners) == before - 1


def test_optimizer_in_a_reference_cycle_with_its_parameter_is_freed():
    p = param()
    opt = adamw(p)
    p.owner = opt  # a cycle through the parameter
    opt.step = opt.step  # a cycle through the instance
    run_steps(opt, 4)
    ref = weakref.ref(opt)
    del opt, p
    gc.collect()
    assert ref() is None


def test_a_replaced_storage_is_freed_at_once():
    p = param()
    opt = adamw(p)
    run_steps(opt, 2)  # in the middle of the observation
    watched = p.untyped_storage()
    weak = watched._weak_ref()
    del watched
    p.data = torch.zeros(NUMEL)
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_cleared_state_is_freed_at_once():
    p = param()
    opt = adamw(p)
    run_steps(opt, 2)
    ref = weakref.ref(opt.state[p]["exp_avg"])
    opt.state.clear()
    assert ref() is None
    run_steps(opt, 4)
    assert deferred(p, *state_tensors(opt)) == [True] * 3


def test_storage_at_a_reused_address_is_new():
    for _ in range(20):
        p = param()
        opt = adamw(p)
        run_steps(opt, 4)
        assert deferred(p) == [True]
        del opt
        fresh = [torch.zeros(NUMEL) for _ in range(4)]
        assert deferred(p, *fresh) == [False] * 5
        del p
    gc.collect()


def test_entries_of_dead_optimizers_are_dropped():
    gc.collect()
    before = len(ownership._first_owners)
    p = param()
    opt = adamw(p)
    run_steps(opt, 3)
    assert len(ownership._first_owners) == before + 3
    del opt
    gc.collect()
    assert len(ownership._first_owners) == before


def test_copied_and_unpickled_optimizers_are_observed_anew():
    p = param()
    opt = adamw(p)
    run_steps(opt, 2)
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert ownership.find(twin) is None
        run_steps(twin, 4)
        assert deferred(twin.param_groups[0]["params"][0]) == [True]


def test_threads_with_their_own_optimizers_are_independent():
    made = [adamw(param(), param()) for _ in range(4)]
    start = threading.Barrier(len(made))
    failures: list[BaseException] = []

    def train(opt: AdamW) -> None:
        try:
            start.wait()
            for _ in range(50):
                run_steps(opt, 1)
                deferred(*opt.param_groups[0]["params"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(opt,)) for opt in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for opt in made:
        assert deferred(*opt.param_groups[0]["params"]) == [True, True]


def test_optimizers_may_die_while_others_are_listed():
    kept = [
        adamw(param()) for _ in range(30)
    ]  # so many that a tuple of them may start a collection
    for optimizer in kept:
        run_steps(optimizer, 1)
    gc.collect()
    thresholds = gc.get_threshold()
    try:
        for after in range(1, 20):
            dead: Any = adamw(param())
            run_steps(dead, 1)
            dead.itself = dead
            del dead
            gc.disable()
            gc.set_threshold(gc.get_count()[0] + after)
            gc.enable()
            for _ in range(20):
                assert len(list(ownership.living())) >= len(kept)
            gc.set_threshold(*thresholds)
            gc.collect()
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


class Wrapped(Tensor):
    """A wrapper tensor whose bytes are in inner tensors, like quantized states."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, codes.shape)
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def test_inner_tensors_of_a_wrapped_state_tensor_are_deferred():
    class Quantized(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if not self.state[p]:
                    self.state[p]["average"] = Wrapped(torch.zeros(NUMEL, dtype=torch.int64))
                self.state[p]["average"].codes.add_(1)
                p.sub_(0.1)

    gate.register_optimizer(Quantized)
    p = param()
    opt = Quantized([p])
    run_steps(opt, 4)
    assert deferred(p, opt.state[p]["average"].codes) == [True, True]


class Unsearchable(list[int]):
    def __contains__(self, _: object) -> bool:
        raise AssertionError("with many optimizers, a search for each takes for ever")


def test_unknown_optimizers_are_not_searched_for_deferrable_storages():
    class Stepping(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    p = param()
    opt = Stepping([p])
    run_steps(opt, 2)
    owner = ownership.find(opt)
    made = skeleton_of([p])
    marks = Marks(made.numbers, made.rows, Unsearchable(), [], [], [])
    assert owner is not None
    assert "its step is not known" in str(owner.why_captured(marks))
    SOURCE.pack_into(made.rows, 0, 0, 0, 1, 0)
    assert owner.why_captured(marks) is None


def test_row_index_out_of_range_or_table_of_a_wrong_type_is_refused():
    tensor = torch.zeros(1 << 16)
    numbers = _core.Numbers([tensor.untyped_storage()._cdata])
    with pytest.raises(IndexError, match="beyond the rows"):
        _core.Observer.defer_memory_owner([tensor], Marks(numbers, bytearray(), [], [], [], []))
    for unusable in ({}, [], None):
        marks = Marks(unusable, bytearray(24), [], [], [], [])
        with pytest.raises(TypeError):
            _core.Observer.defer_memory_owner([tensor], marks)
        if unusable != []:
            with pytest.raises(TypeError):
                _core.Numbers(unusable)
    for identity in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            _core.Numbers([identity])
