"""Waits and lifetimes in an Offloader, and unusual tensors."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import stillframe
import torch
from fix_offloading import group, same
from stillframe._base import device as _device
from stillframe.offload import Offloader
from torch.multiprocessing.reductions import StorageWeakRef

MIB = 1 << 20


# ---- who waits ----------------------------------------------------------------------------


def test_later_work_waits_for_the_copies_of_a_reused_group(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        # a delay of each operation of a stream, so that the write would come first
        fake.delay(20_000_000)
        sources = group(1)
        before = fake.calls("cuStreamWaitEvent")
        ticket = offloader.offload(sources, reuse=True)
        # our stream waits for theirs, and theirs for ours
        assert fake.calls("cuStreamWaitEvent") - before == 2
        for source in sources:
            source.zero_()
        assert same(ticket.tensors(), group(1))


def test_weights_may_be_written_after_wait_read(fake, engine):
    with Offloader("cpu", slots=2, engine=engine) as offloader:
        one, two = (offloader.adopt(group(i)).tensors() for i in (1, 2))
        fake.delay(200_000_000)
        assert offloader.prefetch(one) and offloader.prefetch(two)
        before = offloader.stats()["host_waited_s"]
        offloader.wait_read()
        assert offloader.stats()["host_waited_s"] > before
        copied = fake.copied_bytes
        for tensor in (*one, *two):
            tensor.zero_()
        assert copied == sum(tensor.nbytes for tensor in (*one, *two))


def test_onloaded_group_is_complete_when_it_is_used(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.adopt(group(1))
        fake.delay(20_000_000)
        assert same(offloader.onload(ticket), group(1))


def test_host_waits_and_counts_it_if_a_stream_cannot_wait(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.adopt(group(1))
        fake.hold(True)
        assert offloader.prefetch(ticket)
        fake.capture(True)  # the graph must not contain events of other streams
        released = threading.Event()

        def let_go() -> None:
            released.set()
            fake.hold(False)

        release = threading.Timer(0.05, let_go)
        release.start()
        try:
            tensors = offloader.onload(ticket)
            has_waited = released.is_set()
        finally:
            fake.capture(False)
        release.join()
        assert has_waited
        assert same(tensors, group(1))
        assert offloader.stats()["host_waited_s"] > 0


def test_offload_waits_for_the_current_stream(fake, engine, monkeypatch):
    """Only work on the calling thread's current stream is waited for."""
    asked: list[int] = []

    def current(device: int) -> int:
        asked.append(device)
        return stream

    with Offloader("cpu", engine=engine) as offloader:
        stream = fake.stream()
        monkeypatch.setattr(_device, "current_stream", current)
        ticket = offloader.offload(group(1))
        assert ticket._copies.stream == (0, stream)
        back = offloader.onload(ticket)
        offloader.wait_read()  # the calling thread is not that stream, so it may read now
        assert same(back, group(1))
        assert set(asked) == {0}


def test_early_write_is_reported_even_without_a_check_in_between(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        sources = group(1)
        fake.hold(True)
        ticket = offloader.offload(sources)
        sources[0].zero_()
        fake.hold(False)
        with pytest.raises(stillframe.TornSnapshotError, match=r"tensors \[0\]"):
            ticket.tensors()


def test_close_waits_for_groups_that_are_leaving(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        fake.delay(20_000_000)
        tickets = [offloader.offload(group(i)) for i in range(2)]
    assert all(ticket.done() for ticket in tickets)


# ---- slots --------------------------------------------------------------------------------


def test_unused_prefetches_are_dropped_at_close(fake, engine):
    """The stream waits for the copy: torch gives its memory to the stream's next allocation."""
    with Offloader("cpu", engine=engine) as offloader:
        fake.delay(200_000_000)
        assert offloader.prefetch(offloader.adopt(group(1)))
        before = fake.calls("cuStreamWaitEvent")
        offloader.close()
        assert fake.calls("cuStreamWaitEvent") == before + 1


def test_latest_prefetch_is_the_first_to_give_up_its_slot(either, engine):
    with Offloader("cpu", slots=2, engine=engine) as offloader:
        tickets = [offloader.adopt(group(i)) for i in range(3)]
        assert offloader.prefetch(tickets[0]) and offloader.prefetch(tickets[1])
        assert same(offloader.onload(tickets[2]), group(2))
        offloader.onload(tickets[0])
        assert offloader.stats()["groups_prefetched"] == 1


def test_dropped_or_used_prefetch_gives_up_no_slot(either, engine):
    with Offloader("cpu", slots=1, engine=engine) as offloader:
        tickets = [offloader.adopt(group(i)) for i in range(2)]
        assert offloader.prefetch(tickets[0])
        offloader._give_up_prefetch(tickets[0])
        assert offloader.stats()["slots_in_use"] == 0
        assert offloader.prefetch(tickets[0])
        back = offloader.onload(tickets[1])
        offloader._give_up_prefetch(tickets[0])
        offloader._give_up_prefetch(tickets[1])  # the group is in use
        assert offloader.stats()["slots_in_use"] == 1 and same(back, group(1))


def test_storage_replaced_after_its_prefetch_is_onloaded_again(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        given = [torch.zeros(5000)]
        assert offloader.prefetch(given)
        given[0].data = torch.ones(5000)  # the version does not change
        assert bool((offloader.onload(given)[0] == 1).all())


def test_prefetched_groups_are_dropped_if_the_device_is_full(either, engine, monkeypatch):
    from stillframe._offload import slot

    real = slot._allocate
    with Offloader("cpu", slots=3, engine=engine) as offloader:
        tickets = [offloader.adopt(group(i)) for i in range(2)]
        assert offloader.prefetch(tickets[0])

        def room(device: torch.device, nbytes: int) -> torch.Tensor:
            if offloader._slots:
                raise torch.OutOfMemoryError("no room for two")
            return real(device, nbytes)

        monkeypatch.setattr(slot, "_allocate", room)
        assert same(offloader.onload(tickets[1]), group(1))


class _Circle:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.me, self.tensors = self, tensors


def test_tensors_in_a_reference_cycle_return_their_slot(either, engine):
    with Offloader("cpu", slots=1, engine=engine) as offloader:
        tickets = [offloader.adopt(group(i)) for i in range(2)]
        gc.disable()
        try:
            _Circle(offloader.onload(tickets[0]))
            assert same(offloader.onload(tickets[1]), group(1))
        finally:
            gc.enable()


def test_source_tensors_are_dropped_after_the_copy(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        sources = group(1)
        alive = [weakref.ref(source) for source in sources]
        back = offloader.onload(sources)
        offloader.wait_read()
        offloader.stats()
        del sources
        assert all(each() is None for each in alive)
        assert same(back, group(1))


# ---- devices that fail -----------------------------------------------------------------------


def test_device_failure_during_an_offload_is_raised(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        fake.hold(True)
        fake.fail_copy(1, 700)
        ticket = offloader.offload(group(1))
        fake.hold(False)
        with pytest.raises(stillframe.StillframeError, match="could not be copied off the device"):
            ticket.tensors()


# ---- what tensors may be like ------------------------------------------------------------------


def test_conjugated_and_negated_tensors_come_back(either, engine):
    numbers = torch.view_as_complex(torch.randn(7, 5, 2))
    given = [numbers.conj(), numbers.conj().imag, numbers]
    with Offloader("cpu", engine=engine) as offloader:
        assert same(offloader.onload(offloader.offload(given)), given)


def test_tensors_of_several_types_in_one_storage_come_back(either, engine):
    memory = torch.arange(64, dtype=torch.uint8)
    storage = memory.untyped_storage()
    odd = memory[1:20]
    floats = torch.empty(0, dtype=torch.float32).set_(storage, 2, (10,), (1,))
    with Offloader("cpu", engine=engine) as offloader:
        back = offloader.onload(offloader.offload([odd, floats]))
        assert torch.equal(back[0], odd)
        assert torch.equal(back[1].view(torch.int32), floats.view(torch.int32))


def test_storage_of_a_strided_view_is_freed_after_the_offload(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        whole = torch.arange(10_000, dtype=torch.float32).reshape(100, 100)
        storage = StorageWeakRef(whole.untyped_storage())
        ticket = offloader.offload([whole[:, ::2]])
        expected = whole[:, ::2].clone()
        del whole
        assert storage.expired()  # only a contiguous copy of it is kept
        assert torch.equal(ticket.tensors()[0], expected)
