"""Observation of storages on a device, whose bytes the host cannot read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import stillframe
import torch
from fix_processes import run_python
from fix_training import Training, adamw, adamw_fused, sgd
from fix_waits import eventually
from stillframe._base import device
from stillframe._watch import ownership
from test_mutation_oracle import WRITES, assert_same, few_threads, now, read, warmed_up

__all__ = ["few_threads"]  # a fixture


def counts(training: Training) -> tuple[int, int, int]:
    """Return how many storages of the first optimizer are (undecided, deferrable, captured)."""
    owner = ownership.find(training.optimizers[0])
    assert owner is not None
    return owner.observer.counts()


def test_storages_changed_only_by_steps_are_deferrable_from_the_third_gate_on(fake):
    training = adamw()
    seen = []
    for _ in range(4):
        training.advance()
        seen.append(counts(training))
    # Three storages of each weight are large enough; biases are always captured.
    assert seen == [(6, 0, 0), (6, 0, 0), (0, 6, 0), (0, 6, 0)]


def test_probe_does_not_wait_for_the_device_and_its_verdict_comes_later(fake, monkeypatch):
    training = adamw()
    training.advance()
    handle = fake.stream()
    # On another thread, because this one queries probes and would hang if it waited.
    holder = threading.Thread(target=fake.hold, args=(True,))
    holder.start()
    holder.join()
    try:
        with monkeypatch.context() as elsewhere:
            # A current stream that is not the calling thread, so that waits on it block no thread.
            elsewhere.setattr(device, "current_stream", lambda index: handle)
            # Steps without gradients. An update would run on the host at once, and not wait on that
            # stream.
            training.optimizers[0].zero_grad()
            for _ in range(5):
                training.optimizers[0].step()
        assert counts(training) == (6, 0, 0)
    finally:
        fake.hold(False)

    def decided() -> bool:
        # writes nothing; the probes of that stream may not have completed
        training.optimizers[0].step()
        return counts(training) == (0, 6, 0)

    assert eventually(decided)


def test_write_through_data_between_steps_is_noticed_on_a_device(fake):
    training = adamw()
    assert training.model is not None
    for _ in range(6):
        training.advance()
        for parameter in training.model.parameters():
            parameter.data.mul_(0.999)  # the version does not change
    assert counts(training) == (0, 4, 2)


@pytest.mark.parametrize("index", [0, -1], ids=["first", "last"])
def test_write_to_the_first_or_last_element_is_noticed(fake, index):
    training = adamw()
    assert training.model is not None
    for _ in range(4):
        training.advance()
        for parameter in training.model.parameters():
            parameter.data.view(-1)[index] += 1
    assert counts(training) == (0, 4, 2)


def test_step_inside_a_graph_capture_is_not_probed(fake):
    training = adamw()
    fake.capture(True)
    training.advance()  # the fixture fails if a call is captured into the graph
    fake.capture(False)
    assert counts(training)[1] == 0


def test_memory_in_several_segments_is_probed_line_by_line(tmp_path, fake, engine):
    fake.segments(1 << 16)
    training = warmed_up(adamw, steps=4)
    assert counts(training) == (0, 6, 0)
    wanted = now(training)
    report = stillframe.async_save(training.state(), tmp_path / "a", engine=engine).result()
    assert report is not None and report.deferred_nbytes > 0
    assert any("refused" in each for each in report.fallbacks)
    assert_same(read(tmp_path / "a"), wanted)
    fake.segments(0)
    batches = fake.calls("cuMemcpyBatchAsync_v2")
    stillframe.save([torch.ones(10) for _ in range(9)], tmp_path / "a", engine=engine)
    assert fake.calls("cuMemcpyBatchAsync_v2") == batches + 1  # probes still take place


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
@pytest.mark.parametrize("make", [adamw, adamw_fused, sgd], ids=lambda m: m.__name__)
def test_a_write_before_the_copy_fails_the_save_and_keeps_the_old_file(
    make, write, tmp_path, fake, engine
):
    path = tmp_path / "state.pt"
    training = warmed_up(make, steps=6)
    stillframe.save(training.state(), path, engine=engine)
    old = path.read_bytes()
    fake.delay(200_000_000, seed=7)
    handle = stillframe.async_save(training.state(), path, engine=engine)
    write(training)
    with pytest.raises(stillframe.TornSnapshotError, match="wait_staged"):
        handle.result()
    fake.delay(0)
    assert path.read_bytes() == old
    # From now on this optimizer's storages are captured.
    wanted = now(training)
    handle = stillframe.async_save(training.state(), path, engine=engine)
    write(training)
    report = handle.result()
    assert report is not None and report.deferred_nbytes == 0
    assert_same(read(path), wanted)


@pytest.mark.parametrize(("numel", "is_deferred"), [(1 << 14, False), ((1 << 14) + 1, True)])
def test_storages_up_to_64_kib_are_captured(numel, is_deferred, tmp_path, engine):
    parameter = torch.nn.Parameter(torch.zeros(numel))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(12):
        parameter.grad = torch.ones(numel)
        optimizer.step()
    report = stillframe.async_save([parameter.detach()], tmp_path / "a", engine=engine).result()
    assert report is not None and report.deferred_nbytes == is_deferred * 4 * numel


BLIND = """
import sys, torch, stillframe
sys.path.append({oracle!r})
from fix_training import adamw
from stillframe import testing
with testing.host_as_device() as fake:
    fake.fail({call!r}, code={code})
    training = adamw()
    for _ in range(6):
        training.advance()
    assert fake.hits == 1
    report = stillframe.async_save(training.state(), sys.argv[1]).result()
    assert report.deferred_nbytes == 0, report
    assert report.captured_nbytes > 6 << 20
    stillframe.default_engine().close()
    assert fake.violations == [], fake.violations
"""


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuEventCreate", "cuEventRecord"])
def test_storages_on_an_unreadable_device_are_captured(call, tmp_path):
    oracle = str(Path(__file__).parents[1] / "oracle")
    code = BLIND.format(oracle=oracle, call=call, code=2)
    done = run_python("-c", code, tmp_path / "a", env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    assert "from now on, saves copy during the call" in done.stderr  # the log has this line


GROWN = """
import sys
sys.path.append(sys.argv[1])
import stillframe, torch
from fix_training import WIDTH, adamw
from stillframe import testing
from stillframe._watch import ownership
with testing.host_as_device():
    training = adamw()
    training.advance()  # there is room for these
    (optimizer,) = training.optimizers
    more = [torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(8)]
    optimizer.add_param_group({"params": more})
    for step in range(8):
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)
        optimizer.step()
        if step == 1:
            stillframe.save(training.state(), sys.argv[2])  # finds what is not known yet
    assert ownership.find(optimizer).observer.counts() == (0, 6 + 24, 0)
    stillframe.default_engine().close()
"""


def test_parameter_group_added_later_is_probed(tmp_path):
    # Python itself reports a write beyond the end.
    env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONMALLOC": "debug"}
    oracle = Path(__file__).parents[1] / "oracle"
    done = run_python("-c", GROWN, oracle, tmp_path / "a", env=env)
    assert done.returncode == 0, done.stderr
