"""Which objects keep storages alive during a copy, and which streams wait for it."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable

import pytest
import stillframe
import torch
from fix_training import adamw
from stillframe._base import device as _device
from stillframe._watch import gate, ownership
from stillframe.testing import FakeDriver
from test_mutation_oracle import few_threads, warmed_up

__all__ = ["few_threads"]  # a fixture

NBYTES = 3 << 20


class Memory(ctypes.c_char * NBYTES):
    """Memory that records when torch releases it."""


@pytest.fixture
def elsewhere(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes a stream current that is not the calling thread.

    It must not be called during training: steps run on the calling thread, and would not wait for
    probes of that stream.
    """
    handle = fake.stream()
    return lambda: monkeypatch.setattr(_device, "current_stream", lambda device: handle)


@pytest.mark.parametrize("overlap", [True, False], ids=["deferred", "captured"])
def test_storages_are_released_exactly_when_their_copies_end(
    overlap, tmp_path, fake, elsewhere, engine
):
    freed: list[int] = []

    def free(address: int) -> None:
        fake.freed(address, NBYTES)  # the fixture fails on a violation
        freed.append(address)

    backing = bytearray(NBYTES)  # stays allocated, so that a late copy does no harm
    memory = Memory.from_buffer(backing)
    parameter = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
    address = ctypes.addressof(memory)
    end = weakref.finalize(memory, free, address)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    # A verdict is given when the probes have completed, and the host does not wait for them.
    deadline = time.monotonic() + 60
    while True:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        owner = ownership.find(optimizer)
        assert owner is not None and time.monotonic() < deadline
        if owner.observer.counts() == (0, 3, 0):
            break
        time.sleep(0.001)
    parameter.grad = None

    elsewhere()
    fake.hold(True)
    try:
        handle = stillframe.async_save([parameter], tmp_path / "a", engine=engine, overlap=overlap)
        del memory, parameter, optimizer, owner
        gc.collect()
        assert freed == [] and end.alive
        gate.wait()
        assert freed == [] and end.alive
    finally:
        fake.hold(False)  # the engine waits for its copies
    report = handle.result()
    assert report is not None
    assert (report.deferred_nbytes > 0) == overlap
    gc.collect()
    assert freed == [address]


def test_only_the_steps_stream_waits_for_the_copies(tmp_path, fake, engine, monkeypatch):
    training = warmed_up(adamw, steps=12)
    streams = [fake.stream(), fake.stream()]  # neither is the calling thread
    monkeypatch.setattr(_device, "current_stream", lambda device: streams[0])
    fake.hold(True)  # otherwise all copies may complete before the gate
    try:
        handle = stillframe.async_save(training.state(), tmp_path / "a", engine=engine)
        waits = fake.calls("cuStreamWaitEvent")
        gate.wait()
        # The fixture checks that nothing synchronised.
        assert fake.calls("cuStreamWaitEvent") == waits + 1
        del streams[0]  # the next step uses another stream
        gate.wait()
        assert fake.calls("cuStreamWaitEvent") == waits + 2
    finally:
        fake.hold(False)
    report = handle.result()
    assert report is not None and report.deferred_nbytes > 0
