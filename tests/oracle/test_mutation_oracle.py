"""The mutation oracle: every saved file equals the state at the call, byte for byte.

Real trainings go on right after each call while the copies are held back. So anything that was not
captured in the call and that the gate does not protect is overwritten before it is copied. The
tests also assert which bytes are deferred: a save that captures everything proves nothing.

``STILLFRAME_ORACLE_ROUNDS`` sets how many saves each training makes (3).
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_training import TRAININGS, Training, adamw, adamw_fused, owned, sgd
from stillframe._watch import gate
from stillframe.testing import slow
from torch import Tensor

ROUNDS = int(os.environ.get("STILLFRAME_ORACLE_ROUNDS", "3"))
HELD_BACK_S = 0.1  # the delay of each copy
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch.compile's imports give it


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Use few torch threads, so that the lane has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
    stillframe.wait_all()


def assert_same(got: Any, wanted: Any, where: str = "state") -> None:
    """Assert that two trees are equal, tensors bit for bit."""
    assert type(got) is type(wanted), where
    if isinstance(wanted, Tensor):
        assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        one, two = (t.detach().reshape(-1).view(torch.uint8) for t in (got, wanted))
        differing = int((one != two).sum())
        assert differing == 0, f"{where}: {differing} of {one.numel()} bytes differ"
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), where
        for key in wanted:
            assert_same(got[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
            assert_same(g, w, f"{where}.{i}")
    else:
        assert got == wanted, where


def now(training: Training) -> dict[str, Any]:
    return copy.deepcopy(training.state())


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def warmed_up(make: Callable[[], Training], steps: int = 4) -> Training:
    training = make()
    for _ in range(steps):
        training.advance()
    return training


@pytest.mark.parametrize("name", TRAININGS)
def test_every_file_holds_the_state_at_the_call(name, tmp_path):
    training = warmed_up(TRAININGS[name])
    path = tmp_path / "state.pt"
    gate_wait_s = 0.0
    with slow("lane_copy", HELD_BACK_S / max(1, len(list(training.deferred())))):
        for _ in range(ROUNDS):
            wanted, late = now(training), training.deferred_nbytes()
            handle = stillframe.async_save(training.state(), path)
            training.advance()
            training.advance()
            report = handle.result()
            assert report is not None
            assert_same(read(path), wanted)
            if training.more_is_fine:
                assert report.deferred_nbytes >= late > 0
            else:
                assert report.deferred_nbytes == late
            gate_wait_s += report.gate_wait_s
    assert (gate_wait_s > 0) == (late > 0)


@pytest.mark.parametrize("make", [adamw, adamw_fused], ids=lambda m: m.__name__)
def test_saves_in_flight_together_each_hold_their_own_step(make, tmp_path):
    training = warmed_up(make)
    made = []
    with slow("lane_copy", 0.005):
        for i in range(2 * ROUNDS):
            made.append((now(training), stillframe.async_save(training.state(), tmp_path / f"{i}")))
            if i % 2:
                training.advance()
        for i, (wanted, handle) in enumerate(made):
            handle.result()
            assert_same(read(tmp_path / str(i)), wanted)


def test_saves_from_the_first_step_on_are_correct(tmp_path):
    training = adamw()
    late = []
    with slow("lane_copy", 0.005):
        for _ in range(6):
            wanted = now(training)
            handle = stillframe.async_save(training.state(), tmp_path / "state.pt")
            training.advance()
            late.append(handle.result().deferred_nbytes > 0)
            assert_same(read(tmp_path / "state.pt"), wanted)
    assert late == [False, False, False, True, True, True]


def test_a_save_inside_a_step_captures_everything(tmp_path):
    training = warmed_up(adamw)
    opt, model = training.optimizers[0], training.model
    assert model is not None
    made: list[Any] = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(torch.randn(4, 512)).pow(2).mean()
        loss.backward()
        made.append((now(training), stillframe.async_save(training.state(), tmp_path / "s.pt")))
        return loss

    with slow("lane_copy", 0.05):
        opt.step(closure)
        report = made[0][1].result()
    assert report.deferred_nbytes == 0
    assert_same(read(tmp_path / "s.pt"), made[0][0])


def test_with_overlap_false_everything_is_captured(tmp_path):
    training = warmed_up(adamw)
    wanted = now(training)
    handle = stillframe.async_save(training.state(), tmp_path / "s.pt", overlap=False)
    scribble(training)
    assert handle.result().deferred_nbytes == 0
    assert_same(read(tmp_path / "s.pt"), wanted)


def test_threads_that_train_and_save_do_not_tear_each_others_saves(tmp_path):
    trainings = [warmed_up(adamw_fused) for _ in range(2)]
    failures: list[BaseException] = []
    late: list[int] = []

    def train(number: int) -> None:
        training, path = trainings[number], tmp_path / f"{number}.pt"
        try:
            for _ in range(4 * ROUNDS):
                wanted = now(training)
                handle = stillframe.async_save(training.state(), path)
                training.advance()
                late.append(handle.result().deferred_nbytes)
                assert_same(read(path), wanted)
        except BaseException as error:
            failures.append(error)

    with slow("lane_copy", 0.002):
        threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert any(late)


# ---- parameters changed outside a step ----------------------------------------------------------


def scribble(training: Training) -> None:
    with torch.no_grad():
        for tensor in owned(*training.optimizers):
            tensor.mul_(1.5)


def scribble_data(training: Training) -> None:
    for tensor in owned(*training.optimizers):
        tensor.data.mul_(1.5)


def scribble_foreach(training: Training) -> None:
    torch._foreach_mul_([t.detach() for t in owned(*training.optimizers)], 1.5)


def load_the_model(training: Training) -> None:
    assert training.model is not None
    loaded = {k: v * 1.5 for k, v in training.model.state_dict().items()}
    training.model.load_state_dict(loaded)


def swap_in_an_average(training: Training) -> None:
    assert training.model is not None
    for p in training.model.parameters():
        p.data.copy_(torch.zeros_like(p))


WRITES = [scribble, scribble_data, scribble_foreach, load_the_model, swap_in_an_average]


def new_storages(training: Training) -> None:
    assert training.model is not None
    training.model.to(torch.float64)
    for group in training.optimizers[0].param_groups:
        for p in group["params"]:
            p.data = torch.zeros(4)


def load_the_optimizer(training: Training) -> None:
    opt = training.optimizers[0]
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].zero_()
    opt.load_state_dict(state)


def resize(training: Training) -> None:
    for tensor in owned(*training.optimizers):
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "write", [*WRITES, new_storages, load_the_optimizer, resize], ids=lambda w: w.__name__
)
def test_after_wait_staged_anything_may_be_changed(write, tmp_path):
    training = warmed_up(adamw)
    wanted = now(training)
    with slow("lane_copy", 0.01):
        handle = stillframe.async_save(training.state(), tmp_path / "s.pt")
        handle.wait_staged()
        write(training)
        assert handle.result().deferred_nbytes > 0
    assert_same(read(tmp_path / "s.pt"), wanted)


@pytest.mark.parametrize("write", [new_storages, load_the_optimizer], ids=lambda w: w.__name__)
def test_replaced_storage_does_not_tear_a_save(write, tmp_path):
    training = warmed_up(adamw)
    wanted = now(training)
    with slow("lane_copy", 0.05):
        handle = stillframe.async_save(training.state(), tmp_path / "s.pt")
        write(training)
        assert handle.result().deferred_nbytes > 0
    assert_same(read(tmp_path / "s.pt"), wanted)


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
@pytest.mark.parametrize("make", [adamw, adamw_fused, sgd], ids=lambda m: m.__name__)
def test_a_write_while_the_copy_is_held_back_fails_the_save_and_keeps_the_old_file(
    make, write, tmp_path
):
    path = tmp_path / "state.pt"
    training = warmed_up(make)
    stillframe.save(training.state(), path)
    old = path.read_bytes()
    with slow("lane_copy", HELD_BACK_S):
        handle = stillframe.async_save(training.state(), path)
        write(training)
        with pytest.raises(stillframe.TornSnapshotError, match="wait_staged") as caught:
            handle.result()
    assert any(name in str(caught.value) for name in ("model.", "optim."))
    assert path.read_bytes() == old
    # From now on this optimizer's storages are captured.
    wanted = now(training)
    handle = stillframe.async_save(training.state(), path)
    scribble(training)
    assert handle.result().deferred_nbytes == 0
    assert_same(read(path), wanted)


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
def test_write_at_any_moment_is_noticed_or_harmless(write, tmp_path):
    path = tmp_path / "state.pt"
    outcomes = []
    for delay_s in [0.0] * ROUNDS + [0.002, 0.01]:
        training = warmed_up(adamw_fused)
        stillframe.save({"old": 1}, path)
        wanted = now(training)
        with slow("lane_copy", delay_s):
            handle = stillframe.async_save(training.state(), path)
            write(training)
            try:
                handle.result()
                outcomes.append("saved")
            except stillframe.TornSnapshotError:
                outcomes.append("torn")
                wanted = {"old": 1}
        assert_same(read(path), wanted)
    assert outcomes[-1] == "torn"


def test_write_after_a_step_does_not_tear(tmp_path):
    training = warmed_up(adamw)
    with slow("lane_copy", 0.02):
        for _ in range(ROUNDS):
            wanted = now(training)
            handle = stillframe.async_save(training.state(), tmp_path / "s.pt")
            training.advance()  # the gate compares the version before the step continues
            scribble(training)
            assert handle.result() is not None
            assert_same(read(tmp_path / "s.pt"), wanted)
            training.optimizers[0].load_state_dict(training.optimizers[0].state_dict())


def one_element(training: Training) -> None:
    """Write one element through ``.data``, which changes no version and seldom hits a sample."""
    training.optimizers[0].param_groups[0]["params"][0].data.view(-1)[100_003] += 1.0


def test_a_sparse_write_that_counts_a_version_is_noticed(tmp_path):
    training = warmed_up(adamw)
    with slow("lane_copy", 3 * HELD_BACK_S):
        handle = stillframe.async_save(training.state(), tmp_path / "s.pt")
        with torch.no_grad():
            training.optimizers[0].param_groups[0]["params"][0].view(-1)[100_003] += 1.0
        with pytest.raises(stillframe.TornSnapshotError, match=r"model\.0\.weight"):
            handle.result()


def test_check_mutation_notices_a_sparse_write_that_counts_no_version(tmp_path):
    training = warmed_up(adamw)
    with slow("lane_copy", 3 * HELD_BACK_S):
        handle = stillframe.async_save(training.state(), tmp_path / "s.pt", check_mutation=True)
        one_element(training)
        with pytest.raises(stillframe.TornSnapshotError):
            handle.result()


@pytest.mark.xfail(
    raises=pytest.fail.Exception,
    strict=True,
    reason="a sparse .data write between call and copy: no version is counted and no sample lies "
    "there; docs/guarantees.md states it, wait_staged() or check_mutation=True is the remedy",
)
def test_a_sparse_data_write_outside_the_step_is_noticed(tmp_path):
    for _ in range(8):  # one line in eight is sampled here, and other lines each time
        training = warmed_up(sgd)
        with slow("lane_copy", HELD_BACK_S):
            handle = stillframe.async_save(training.state(), tmp_path / "s.pt")
            one_element(training)
            with pytest.raises(stillframe.TornSnapshotError):
                handle.result()


# ---- the oracle itself --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, adamw_fused, sgd], ids=lambda m: m.__name__)
def test_oracle_notices_a_missing_gate(make, tmp_path, monkeypatch):
    training = warmed_up(make)
    monkeypatch.setattr(gate, "track", lambda *_: None)
    monkeypatch.setattr(gate, "_wait_for_unlaunched_calls", lambda: None)
    wanted = now(training)
    with slow("lane_copy", 3 * HELD_BACK_S):
        handle = stillframe.async_save(training.state(), tmp_path / "s.pt")
        training.advance()
        with pytest.raises((stillframe.TornSnapshotError, AssertionError)):
            handle.result()
            assert_same(read(tmp_path / "s.pt"), wanted)
