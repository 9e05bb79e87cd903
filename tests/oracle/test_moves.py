"""Memory that moves or is freed after a save is copied before."""

from __future__ import annotations

import inspect
import threading
import weakref

import moving
import pytest
import stillframe
import torch
from fix_gate import FakePending, deferred, param, run_steps, skeleton_of
from fix_processes import run_python
from stillframe._watch import gate, moves
from stillframe.testing import slow
from torch.optim import SGD


@pytest.fixture(scope="module")
def ways() -> tuple[dict[str, str], str]:
    """Run moving.py and return the outcome of each way and the output."""
    done = run_python("-W", "ignore", moving.__file__, timeout=200)
    return dict(line.split() for line in done.stdout.splitlines()), done.stderr[-4000:]


@pytest.mark.parametrize("name", moving.WAYS)
def test_storage_moved_after_the_call_is_copied_first(ways, name):
    statuses, stderr = ways
    assert statuses.get(name) == "0", stderr


@pytest.fixture
def copied() -> torch.nn.Parameter:
    """Return a parameter whose storage is deferrable."""
    gate.wait()
    p = param()
    opt = SGD([p], lr=0.1)
    run_steps(opt, 4)
    p.optimizer = opt
    return p


def test_move_waits_only_for_a_storage_being_copied(copied):
    pending = FakePending()
    gate.track(pending, gate.defer(skeleton_of([copied]), overlap=True))
    param().untyped_storage().resize_(0)
    torch.zeros(9).share_memory_()
    assert pending.waits == 0
    copied.untyped_storage().resize_(20000 * 4)
    assert pending.waits == 1
    copied.untyped_storage().resize_(30000 * 4)
    assert pending.waits == 1


def test_move_waits_again_for_copies_on_a_device(copied):
    class OnDevice(FakePending):
        def gate(self) -> bool:
            super().gate()
            return False

    pending = OnDevice()
    gate.track(pending, gate.defer(skeleton_of([copied]), overlap=True))
    copied.untyped_storage().resize_(20000 * 4)
    copied.untyped_storage().resize_(30000 * 4)
    assert pending.waits == 2
    gate.untrack(pending)
    assert not gate.is_any_copy_pending()


def test_move_waits_for_a_save_call_of_another_thread(copied):
    deferral = gate.defer(skeleton_of([copied]), overlap=True)
    moved = threading.Event()

    def move() -> None:
        copied.data.share_memory_()
        moved.set()

    thread = threading.Thread(target=move)
    thread.start()
    assert not moved.wait(0.2)
    pending = FakePending()
    gate.track(pending, deferral)
    assert moved.wait(60)
    thread.join()
    assert pending.waits == 1


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model whose optimizer was observed until all storages were decided."""
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    run_steps(optimizer, 4)
    optimizer.zero_grad()
    return model, optimizer


def test_swap_tensors_works_as_without_stillframe():
    model, optimizer = stepped()
    assert deferred(model.weight) == [True]
    torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.full((100, 100), 7.0)))
    assert model.weight[0, 0] == 7
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert deferred(model.weight) == [False]
    run_steps(optimizer, 4)
    assert deferred(model.weight) == [True]


def test_swap_tensors_accepts_keyword_arguments():
    model, _ = stepped()
    torch.utils.swap_tensors(t1=model.weight, t2=torch.nn.Parameter(torch.full((100, 100), 7.0)))
    assert model.weight[0, 0] == 7


def test_swap_waits_for_earlier_copies(tmp_path):
    model, _ = stepped()
    before = model.weight.detach().clone()
    with slow("lane_copy", 0.1):
        handle = stillframe.async_save(model.state_dict(), tmp_path / "x.pt")
        torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.zeros(100, 100)))
        assert handle.state != "staging"
    assert handle.result().deferred_nbytes == 40000
    assert torch.equal(torch.load(tmp_path / "x.pt")["weight"], before)


def test_swap_is_still_refused_for_foreign_weak_references():
    model, _ = stepped()
    theirs = weakref.ref(model.weight)
    with pytest.raises(RuntimeError, match="t1 because it has weakref"):
        torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.zeros(2)))
    assert theirs() is model.weight


def test_wrapped_methods_keep_their_names_and_signatures():
    assert list(inspect.signature(torch.utils.swap_tensors).parameters) == ["t1", "t2"]
    base = torch._C.StorageBase.resize_
    assert torch.UntypedStorage.resize_.__doc__ == base.__doc__
    for name in moves._MOVERS:
        method = getattr(torch.UntypedStorage, name)
        assert method.__name__ == name
        assert method.__wrapped__ is not method
    assert "self" in str(inspect.signature(torch.UntypedStorage._share_fd_cpu_))
    with pytest.raises(RuntimeError, match="expects an int"):
        torch.zeros(2).untyped_storage().resize_("many")
