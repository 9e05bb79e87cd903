"""Groups of tensors that leave a device for the pool and return."""

import threading

import pytest
import stillframe
import torch
from fix_offloading import group, same
from fix_waits import eventually
from stillframe._base import device as _device
from stillframe._save import completion
from stillframe.offload import Offloader

MIB = 1 << 20


def test_offloaded_group_returns_bit_identical(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        assert ticket.nbytes == 4 * 5000 + 2 * 77 + 8 * 13
        assert same(offloader.onload(ticket), group(1))
        assert same(ticket.tensors(), group(1))


def test_offloader_may_be_the_first_use_of_a_device(fake, engine, monkeypatch):
    """stillframe creates no CUDA context, so torch must do so first."""
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(_device, "in_use", list)
        patch.setattr(torch, "empty", lambda *size, device: made.append(device))
        Offloader("cpu", engine=engine).close()
    assert made == [torch.device("cuda", 0)]


def test_group_without_bytes_takes_no_memory(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        before = dict(completion.copying)
        ticket = offloader.offload([torch.zeros(0, 3), torch.zeros(0)])
        # no entry is left, because nothing would remove it
        assert dict(completion.copying) == before
        assert ticket.done() and ticket._copies.is_over and ticket.nbytes == 0
        assert [each.shape for each in offloader.onload(ticket)] == [(0, 3), (0,)]


def test_views_stay_views_and_each_storage_is_copied_once(either, engine):
    whole = torch.arange(1000, dtype=torch.float32).reshape(10, 100)
    odd = whole.t()[3:50:2]
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload([whole, whole[2:5], whole, odd, whole[:1].expand(7, 100)])
        assert ticket.nbytes == 4000 + odd.numel() * 4
        back = offloader.onload(ticket)
        assert same(back, [whole, whole[2:5], whole, odd, whole[:1].expand(7, 100)])
        back[0][2] = -1
        assert (back[1][0] == -1).all() and (back[2][2] == -1).all()
        assert back[1].stride() == whole.stride() and back[4].stride() == (0, 1)


def test_slots_bound_the_groups_on_the_device(either, engine):
    with Offloader("cpu", slots=2, engine=engine) as offloader:
        tickets = [offloader.offload(group(i)) for i in range(4)]
        first = offloader.onload(tickets[0])
        assert offloader.prefetch(tickets[1]) and offloader.prefetch(tickets[1])
        assert not offloader.prefetch(tickets[2])
        second = offloader.onload(tickets[1])
        with pytest.raises(stillframe.StillframeError, match=r"all 2 slots .* release"):
            offloader.onload(tickets[2])
        offloader.release(first)
        third = offloader.onload(tickets[2])
        assert same(third, group(2)) and same(second, group(1))
        del second  # a group whose tensors are gone is not in use either
        assert same(offloader.onload(tickets[3]), group(3))
        assert offloader.stats()["groups_prefetched"] == 1


def test_released_group_keeps_its_bytes_while_referenced(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        tensors = offloader.onload(ticket)
        offloader.release(ticket)
        others = [offloader.onload(offloader.offload(group(i))) for i in (2, 3)]
        assert same(tensors, group(1)) and same(others[0], group(2))
        assert offloader.stats()["bytes_lingering"] == ticket.nbytes
        del tensors
        assert offloader.stats()["bytes_lingering"] == 0
        with pytest.raises(stillframe.StillframeError, match="released before"):
            offloader.release(ticket)


def test_host_never_waits_for_the_device(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        sources = group(1)
        fake.hold(True)
        ticket = offloader.offload(sources)
        assert offloader.prefetch(ticket)  # the stream waits for the leaving group, by event
        assert not ticket.done()
        fake.hold(False)
        assert same(offloader.onload(ticket), group(1))


def test_sources_are_kept_alive_until_their_copies_complete(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        pooled = offloader.adopt(group(2)).tensors()
        fake.hold(True)
        assert offloader.prefetch(pooled)
        (slot,) = offloader._copying_in
        assert not slot.try_to_finish() and slot._layout.sources
        fake.hold(False)
        assert same(offloader.onload(pooled), group(2))


def test_stats_have_the_times_of_copies_and_waits(fake, engine):
    events = fake.live("events")  # lanes of earlier engines keep some events
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        ticket.wait()
        # Another thread, because the thread that stopped the device must not wait for it.
        held, asked, before = threading.Event(), threading.Event(), 0

        def hold() -> None:
            fake.hold(True)
            held.set()
            asked.wait()
            eventually(lambda: fake.calls("cuStreamWaitEvent") > before)  # the stream waits
            fake.hold(False)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        assert offloader.prefetch(ticket)
        before = fake.calls("cuStreamWaitEvent")
        asked.set()
        offloader.onload(ticket)  # the current stream, which this thread represents, waits
        holder.join()

        def heard_of() -> bool:
            stats = offloader.stats()
            return bool(stats["onload_copy_s"] and stats["stream_waited_s"])

        assert eventually(heard_of)
        stats = offloader.stats()
        assert stats["offload_copy_s"] > 0
        assert stats["offload_gb_per_s"] > 0 and stats["onload_gb_per_s"] > 0
        assert stats["share_hidden"] < 1
    assert fake.live("events") < events + 64 + 64  # this engine's lanes keep no more


def test_cpu_tensors_are_onloaded_from_any_kind_of_memory(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        assert same(offloader.onload(group(1)), group(1))
        pooled = offloader.adopt(group(2)).tensors()
        assert same(offloader.onload(pooled), group(2))
        staged = offloader.stats()["bytes_staged"]
        assert staged == (0 if either == "cpu" else sum(t.nbytes for t in group(1)))
