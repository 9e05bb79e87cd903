"""The observer called directly, without saves or steps: what it reads, and when."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fix_gate import NUMEL, deferred, lanes, param, run_steps, skeleton_of
from stillframe import _core
from stillframe._tree.skeleton import SOURCE
from stillframe._watch import gate, ownership
from stillframe._watch.memory_owners import Marks
from torch.optim import SGD

LARGE = 1 << 21  # floats; 8 MiB, which are unmapped as soon as they are freed
KEPT = 1 << 16  # bytes; larger storages of a memory owner are copied late


@pytest.fixture
def present() -> Iterator[Callable[[str, Callable[[Any], Any]], None]]:
    """Make observers read an attribute of torch through a function until the test ends."""
    names = []

    def take(name: str, function: Callable[[Any], Any]) -> None:
        names.append(name)
        _core.Observer.present(name, function)

    yield take
    for name in names:
        _core.Observer.present(name, None)


def groups_of(*params: torch.nn.Parameter) -> list[dict[str, Any]]:
    for each in params:
        each.grad = torch.ones_like(each)  # only a tensor with a gradient counts as trained
    return [{"params": list(params)}]


def enrolled(groups: list[dict[str, Any]], state: dict[Any, Any] | None = None) -> _core.Observer:
    observer = _core.Observer({}, 1)
    assert observer.enrol(groups, state or {}) == []
    return observer


def marks_of(*tensors: torch.Tensor) -> Marks:
    made = skeleton_of(tensors)
    return Marks(made.numbers, made.rows, [], [], [], [])


# ---- what is still there ----------------------------------------------------------------------


def test_observer_does_not_read_memory_that_was_exchanged():
    p = param(LARGE)
    observer = enrolled(groups_of(p))
    p.share_memory_()  # the same StorageImpl, of the same length
    observer.compare()
    assert observer.counts() == (0, 0, 1)


def test_observer_does_not_read_memory_that_has_shrunk(present):
    elsewhere = torch.zeros(NUMEL)
    present("data_ptr", lambda storage: elsewhere.data_ptr())
    p = param()
    observer = enrolled(groups_of(p))
    p.untyped_storage().resize_(2 * NUMEL)
    observer.compare()
    assert observer.counts() == (0, 0, 1)


def test_observer_does_not_read_memory_whose_address_torch_refuses(present):
    p = param()
    groups = groups_of(p)
    observer = enrolled(groups)
    present("data_ptr", lambda storage: 1 / 0)
    observer.compare()
    assert observer.counts() == (0, 0, 1)
    again = enrolled(groups)
    assert again.counts() == (0, 0, 0)


def test_storage_with_a_new_length_is_captured():
    p = param()
    opt = SGD([p], lr=0.1)
    run_steps(opt, 4)
    skeleton = skeleton_of([p])
    address, nbytes, lane, device = SOURCE.unpack_from(skeleton.rows)
    SOURCE.pack_into(skeleton.rows, 0, address, nbytes // 2, lane, device)
    deferral = gate.defer(skeleton, overlap=True)
    deferral.close()
    assert (deferral.indices, lanes(skeleton)) == ([], [0])


def test_storage_captured_between_two_probes_stays_captured():
    p = param()
    groups = groups_of(p)
    observer = enrolled(groups)
    observer.compare()
    assert observer.stepped(groups, {}) is False
    observer.capture(p.untyped_storage()._cdata)
    observer.compare()
    assert observer.counts() == (0, 0, 1)


def test_storage_in_place_of_a_vanished_one_is_observed():
    p = param()
    groups = groups_of(p)
    observer = enrolled(groups)
    observer.compare()
    p.data = torch.zeros(NUMEL)
    assert observer.stepped(groups, {}) is False
    assert observer.counts() == (0, 0, 1)
    assert observer.stepped(groups, {}) is True


def test_inference_tensors_are_captured():
    p = param()
    with torch.inference_mode():
        average = torch.zeros(NUMEL)
    observer = enrolled(groups_of(p), {p: {"average": average}})
    assert observer.counts() == (1, 0, 1)


# ---- when there is nothing to do --------------------------------------------------------------


def test_undeferrable_tensors_are_not_enrolled_again():
    p, small = param(), param(10)
    opt = SGD([p, small], lr=0.1)
    run_steps(opt, 4)
    assert deferred(p, small) == [True, False]
    owner = ownership.find(opt)
    assert owner is not None
    assert owner.observer.is_idle(opt.param_groups, opt.state)


# ---- devices ----------------------------------------------------------------------------------


def test_storages_on_unreadable_devices_stay_undecided(present):
    # More storages than the observer probes, on devices that no driver has.
    params = [param((1 << 14) + 1) for _ in range(40)]
    numbers = {id(p): 100 + number for number, p in enumerate(params)}
    present("is_cpu", lambda tensor: False)
    present("device_index", lambda tensor: numbers[id(tensor)])
    groups = groups_of(*params)
    observer = enrolled(groups)
    for _ in range(3):
        assert observer.due() == ()
        observer.compare()
        assert observer.stepped(groups, {}) is False
    assert observer.counts() == (40, 0, 0)


# ---- what a memory owner has ------------------------------------------------------------------


def test_memory_owners_storages_are_marked_once_and_only_if_large():
    large, small = torch.zeros(KEPT // 4 + 1), torch.zeros(KEPT // 4)
    marks = marks_of(small, large)
    _core.Observer.defer_memory_owner([small, large, large], marks)
    assert (marks.indices, marks.storage_numbers) == ([1], [1])
    assert [marks.is_deferred(number) for number in range(2)] == [False, True]


def test_memory_owners_inference_tensor_is_refused_and_leaves_no_marks():
    with torch.inference_mode():
        kept = torch.zeros(KEPT)
    marks = marks_of(kept)
    with pytest.raises(RuntimeError, match="Inference tensors"):
        _core.Observer.defer_memory_owner([kept], marks)
    assert (marks.indices, marks.storage_numbers, marks.tensors, marks.versions) == ([], [], [], [])
    assert not marks.is_deferred(0)


# ---- what is left -----------------------------------------------------------------------------


def test_observer_releases_everything_that_it_observed():
    owned: dict[Any, Any] = {}
    p = param()
    observer = _core.Observer(owned, 1)
    observer.enrol(groups_of(p), {})
    assert list(owned.values()) == [1]
    watched = p.untyped_storage()._weak_ref()
    observer.forget()
    assert owned == {}
    del p
    gc.collect()
    assert torch.UntypedStorage._expired(watched)
    torch.UntypedStorage._free_weak_ref(watched)
