"""Promises of an Offloader besides the bytes: lifetimes, bounds and helpful errors."""

from __future__ import annotations

import random
import threading

import pytest
import stillframe
import torch
from fix_offloading import group, same
from fix_waits import leased
from stillframe import testing
from stillframe._offload import slot as _slot
from stillframe.offload import Offloader, Ticket
from torch.multiprocessing.reductions import StorageWeakRef

MIB = 1 << 20
LARGE = 100_000  # elements: such a group shares no block


# ---- lifetimes ----------------------------------------------------------------------------


def test_sources_live_until_their_copy_completes_and_no_longer(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        sources = group(1)
        storage = StorageWeakRef(sources[0].untyped_storage())
        fake.hold(True)
        ticket = offloader.offload(sources)
        del sources
        assert not storage.expired()
        fake.hold(False)
        ticket.wait()
        assert storage.expired()
        assert same(ticket.tensors(), group(1))


def test_number_of_queued_groups_is_bounded_while_the_host_runs_ahead(fake, engine):
    fake.delay(3_000_000)
    with Offloader("cpu", slots=2, engine=engine) as offloader:
        alive = []
        tickets = []
        for i in range(6):
            sources = group(i)
            alive.append(StorageWeakRef(sources[0].untyped_storage()))
            tickets.append(offloader.offload(sources))
            del sources
            assert sum(not each.expired() for each in alive) <= 2
        assert all(same(ticket.tensors(), group(i)) for i, ticket in enumerate(tickets))


def test_dropped_ticket_keeps_its_memory_until_the_copy_completes(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        ticket.wait()
        held = leased(engine)
        fake.hold(True)
        assert offloader.prefetch(ticket)
        ticket.release()
        del ticket
        assert leased(engine) == held > 0
        fake.hold(False)
        offloader.close()
        assert leased(engine) == 0


def test_pool_memory_returns_with_its_last_reference(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        tensors = ticket.tensors()
        assert all(a is b for a, b in zip(tensors, ticket.tensors(), strict=True))
        ticket.release()
        assert leased(engine) > 0 and same(tensors, group(1))
        del tensors
        offloader.onload(offloader.offload(group(2)))
        offloader.close()
        assert leased(engine) == 0


def test_memory_of_a_dropped_onload_is_not_reused_before_its_copy_completes(fake, engine):
    with Offloader("cpu", slots=1, engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        ticket.wait()
        fake.delay(2_000_000)
        for _ in range(5):
            assert offloader.prefetch(ticket)
            offloader.release(ticket)  # the stream waits for the copies before the memory is freed
            assert offloader.stats()["bytes_lingering"] == 0


# ---- order and changes ------------------------------------------------------------------------


def test_write_to_a_source_during_its_copy_is_reported(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        sources = group(1)
        fake.hold(True)
        ticket = offloader.offload(sources)
        sources[1].zero_()
        with pytest.raises(stillframe.TornSnapshotError, match="reuse=True"):
            offloader.onload(ticket)
        fake.hold(False)
        with pytest.raises(stillframe.TornSnapshotError, match=r"tensors \[1\]"):
            ticket.tensors()


def test_reuse_allows_writes_to_the_sources(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        sources = group(1)
        ticket = offloader.offload(sources, reuse=True)
        sources[0].zero_()
        assert same(ticket.tensors(), group(1))


def test_group_written_after_its_prefetch_is_onloaded_again(either, engine, caplog):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.adopt(group(1))
        assert offloader.prefetch(ticket)
        pooled = ticket.tensors()  # tensors() writes nothing
        offloader.onload(ticket)
        assert offloader.stats()["groups_prefetched"] == 1
        assert offloader.prefetch(ticket) and offloader.prefetch(pooled)
        pooled[0].mul_(2)
        assert torch.equal(offloader.onload(ticket)[0], group(1)[0] * 2)
        assert torch.equal(offloader.onload(pooled)[0], group(1)[0] * 2)
        assert offloader.stats()["groups_stale"] == 2
    assert caplog.text.count("between prefetch() and onload()") == 1


def test_save_of_a_tickets_tensors_holds_their_state_at_the_call(either, engine, tmp_path):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        others = offloader.offload(group(2))
        handle = stillframe.async_save(ticket.tensors(), tmp_path / "a.pt", engine=engine)
        ticket.tensors()[0].zero_()
        handle.result()
        assert same(torch.load(tmp_path / "a.pt"), group(1))
        # the file has no bytes of other groups
        assert (tmp_path / "a.pt").stat().st_size < ticket.nbytes + 65536
        assert same(others.tensors(), group(2))


def test_pool_memory_is_pinned_before_it_is_copied_to_the_device(engine):
    """The ticket's memory was filled before a driver was in use."""
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.adopt(group(1))
    with testing.host_as_device() as driver, Offloader("cpu", engine=engine) as offloader:
        registered = driver.live("registered")
        assert same(offloader.onload(ticket), group(1))
        assert driver.live("registered") > registered
        for pooled in (ticket, offloader.adopt(group(2)), offloader.offload(group(3))):
            offloader.release(offloader.onload(pooled.tensors()))
        assert offloader.stats()["bytes_staged"] == 0
        assert driver.violations == []


def test_group_is_onloaded_with_one_copy(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload([torch.ones(n) for n in (5, 700, 33, 12_000)])
        before = fake.calls("cuMemcpyHtoDAsync_v2")
        tensors = offloader.onload(ticket)
        assert fake.calls("cuMemcpyHtoDAsync_v2") - before == 1
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        assert len({tensor.data_ptr() % 512 for tensor in tensors}) == 1


def test_small_groups_share_blocks_that_return_with_their_last_group(either):
    with (
        stillframe.Engine(pool_bytes=16 * MIB, block_bytes=MIB) as engine,
        Offloader("cpu", engine=engine) as offloader,
    ):
        tickets = [offloader.offload([torch.full((4096,), float(i))]) for i in range(200)]
        assert leased(engine) == 4 * MIB  # 64 groups share a block
        for i, ticket in enumerate(tickets):
            assert bool((offloader.onload(ticket)[0] == i).all())
        kept = tickets[0].tensors()
        offloader.wait_read()
        del tickets[:64]
        assert leased(engine) == 4 * MIB and bool((kept[0] == 0).all())
        del kept
        assert leased(engine) == 3 * MIB
        # larger than a quarter of a block, so it shares none
        large = offloader.offload([torch.zeros(MIB // 16 + 1)])
        assert leased(engine) == 4 * MIB
        del ticket, tickets, large
        offloader.close()
        assert leased(engine) == 0


# ---- bounds ------------------------------------------------------------------------------------


def test_full_pool_error_names_its_holders(either):
    with (
        stillframe.Engine(pool_bytes=4 * MIB, block_bytes=MIB) as engine,
        Offloader("cpu", engine=engine) as offloader,
    ):
        tickets = [offloader.offload(group(i, LARGE)) for i in range(4)]
        with pytest.raises(stillframe.PoolExhaustedError, match="tickets count as snapshots"):
            offloader.offload(group(4, LARGE))
        tickets[0].release()
        assert same(offloader.offload(group(5, LARGE)).tensors(), group(5, LARGE))
        assert same(tickets[3].tensors(), group(3, LARGE))


def test_offload_waits_for_memory_that_will_return_and_counts_it(fake):
    with (
        stillframe.Engine(pool_bytes=2 * MIB, block_bytes=MIB) as engine,
        Offloader("cpu", engine=engine) as offloader,
    ):
        kept = offloader.offload(group(1, LARGE))
        ticket = offloader.offload(group(2, LARGE))
        ticket.wait()
        fake.hold(True)
        assert offloader.prefetch(ticket)
        ticket.release()
        threading.Timer(0.05, fake.hold, (False,)).start()
        assert same(offloader.offload(group(3, LARGE)).tensors(), group(3, LARGE))
        assert offloader.stats()["host_waited_s"] > 0 and offloader.stats()["host_waits"] == 1
        assert same(kept.tensors(), group(1, LARGE))


def test_prefetched_group_gives_its_slot_to_an_onload(either, engine):
    with Offloader("cpu", slots=1, engine=engine) as offloader:
        one, two = offloader.offload(group(1)), offloader.offload(group(2))
        assert offloader.prefetch(one)
        assert same(offloader.onload(two), group(2))
        assert same(offloader.onload(one), group(1))


def test_full_device_raises_and_nothing_is_lost(either, engine, monkeypatch):
    def full(device: torch.device, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        with monkeypatch.context() as patch:
            patch.setattr(_slot, "_allocate", full)
            assert not offloader.prefetch(ticket)
            with pytest.raises(torch.OutOfMemoryError):
                offloader.onload(ticket)
        assert same(offloader.onload(ticket), group(1))


# ---- random schedules --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_use_by_two_threads_keeps_every_group_intact(either, seed):
    """Each thread has its own groups; both share few slots and a small pool."""
    engine = stillframe.Engine(pool_bytes=16 * MIB, block_bytes=MIB)
    offloader = Offloader("cpu", slots=4, engine=engine)
    wrong: list[object] = []

    def use(thread: int) -> None:
        chance = random.Random(seed * 2 + thread)
        here: list[tuple[int, Ticket]] = []
        try:
            for turn in range(25):
                if len(here) < 3:
                    number = 1000 * thread + turn
                    here.append((number, offloader.offload(group(number, 1 + number % 900))))
                number, ticket = here[chance.randrange(len(here))]
                if chance.random() < 0.4:
                    offloader.prefetch(ticket)
                if chance.random() < 0.8:
                    back = offloader.onload(ticket)
                    if not same(back, group(number, 1 + number % 900)):
                        wrong.append(number)
                    del back
                if chance.random() < 0.4:
                    here.remove((number, ticket))
                    ticket.release()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    offloader.close()
    engine.close()
    assert wrong == []
