"""`shared="spawn"`: other processes map the memory, and the pool waits for them.

In most tests one process lends to itself, because it pickles in the same way. The last tests start
processes.
"""

from __future__ import annotations

import concurrent.futures
import errno
import gc
import multiprocessing
import os
import pickle
import resource
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import stillframe
import torch
from fix_loans import seen, work
from fix_snapshots import MIB
from fix_waits import eventually, leased
from stillframe._snapshot import loans
from stillframe.testing import fault

Tree = dict[str, torch.Tensor]


def all_loans_are_over() -> bool:
    """Wait for the threads of all loans, which may be slow."""
    gc.collect()
    return eventually(lambda: not loans._loans)


@pytest.fixture
def engine() -> Iterator[stillframe.Engine]:
    """Return an engine whose pool has room for two of `state()`."""
    assert all_loans_are_over()  # those of other tests
    with stillframe.Engine(pool_bytes=4 * MIB, block_bytes=MIB, shared_memory=True) as engine:
        yield engine


def state(value: float) -> Tree:
    return {name: torch.full((MIB // 4,), float(value)) for name in ("w", "x")}


def take(engine: stillframe.Engine, tree: Any) -> stillframe.Snapshot[Any]:
    return stillframe.snapshot(tree, shared="spawn", engine=engine)


def dumps(tree: Any) -> bytes:
    return bytes(ForkingPickler.dumps(tree))


def comes_to(engine: stillframe.Engine, nbytes: int) -> bool:
    return eventually(lambda: leased(engine) == nbytes)


@pytest.fixture
def torchs_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes that torch moves to shared memory of its own."""
    moved: list[int] = []
    share = torch.UntypedStorage._share_fd_cpu_

    def counted(storage: torch.UntypedStorage) -> Any:
        moved.append(storage.nbytes())
        return share(storage)

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", counted)
    return moved


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled_descriptors() -> int:
    """Return the descriptors once multiprocessing's thread has closed those it has sent."""
    before, now = -1, descriptors()
    while before != now:
        time.sleep(0.1)
        before, now = now, descriptors()
    return now


# ---- what arrives ----


def test_tensors_arrive_as_they_are_and_none_is_copied(engine, torchs_memory):
    weight = torch.randn(40, 30)
    number = torch.randn(7, dtype=torch.complex64)
    parameter = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64).conj(), False)
    tree = {
        "weight": weight,
        "transposed": weight.t(),
        "part": weight[3:5, ::2],
        "bytes": torch.arange(9, dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "conj": number.conj(),
        "neg": number.conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "other parameter": parameter,
        "object": {"step": 3, "name": "x"},
    }
    taken = take(engine, tree)
    new = pickle.loads(dumps(taken.tree))
    assert torchs_memory == []
    assert new["object"] == tree["object"]
    for name, tensor in tree.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        other = new[name]
        assert type(other) is type(tensor) and other.dtype is tensor.dtype
        assert torch.equal(other, tensor) and other.stride() == tensor.stride()
        assert other.storage_offset() == tensor.storage_offset()
        assert other.is_conj() is tensor.is_conj() and other.is_neg() is tensor.is_neg()
        assert other.requires_grad is tensor.requires_grad
    assert new["conj"].is_conj() and new["neg"].is_neg() and new["other parameter"].is_conj()
    ties = {new[name].untyped_storage().data_ptr() for name in ("weight", "transposed", "part")}
    assert len(ties) == 1
    new["weight"][3, 0] = 5
    assert new["part"][0, 0] == 5 and new["transposed"][0, 3] == 5
    # A write in the borrower does not change the lender's memory.
    assert torch.equal(taken.tree["weight"], weight)


def test_a_pickle_takes_one_descriptor_however_many_tensors_it_has(engine):
    taken = take(engine, [torch.full((10,), float(value)) for value in range(300)])
    pickle.loads(dumps(taken.tree))  # starts multiprocessing's thread
    assert all_loans_are_over()
    before = settled_descriptors()
    data = dumps(taken.tree)
    assert descriptors() - before == 2  # both ends of the channel
    new = pickle.loads(data)
    # The ends of the channel, and the descriptor that Python's mmap keeps.
    assert descriptors() - before <= 3
    assert all(tensor.eq(value).all() for value, tensor in enumerate(new))


def test_memory_returns_when_both_processes_have_dropped_it(engine):
    taken = take(engine, state(1))
    borrowed = [pickle.loads(dumps(taken.tree)) for _ in range(2)]
    borrowed[1] = borrowed[1]["x"][5:]
    taken.release()
    while borrowed:
        assert leased(engine) == 2 * MIB
        take(engine, state(2)).release()  # it has other blocks
        assert borrowed[-1].eq(1).all()
        del borrowed[0]
    assert comes_to(engine, 0)


def test_loan_excludes_foreign_memory_between_its_parts(engine):
    small = [take(engine, [torch.full((MIB // 4,), float(value))]) for value in range(4)]
    small[0].release()
    small[2].release()
    apart = take(engine, state(7))  # in the blocks on both sides of the middle one
    small[1].release()
    middle = take(engine, [torch.ones(MIB // 4)])  # registered later, so searched later
    lender = loans._lender_of(apart.tree["w"].untyped_storage())
    assert lender is not None and lender.nbytes > 2 * MIB
    assert loans._lender_of(middle.tree[0].untyped_storage()) is not lender
    new = pickle.loads(dumps([apart.tree, middle.tree]))
    assert seen(new[0]) == [7] * 4 and float(new[1][0][-1]) == 1


def test_tensors_without_a_loan_are_pickled_by_torch(engine, torchs_memory):
    take(engine, state(1))
    private = stillframe.snapshot({"w": torch.ones(5)}, engine=engine)
    new = pickle.loads(dumps([private.tree, torch.ones(3), torch.zeros(0)]))
    assert torchs_memory == [20, 12]
    assert new[0]["w"].eq(1).all() and new[1].eq(1).all() and new[2].shape == (0,)


def test_conjugated_tensor_on_loan_keeps_requires_grad(engine):
    turned = torch.ones(3, dtype=torch.complex64).conj()
    taken = take(engine, [turned.detach().requires_grad_(), turned])
    new = pickle.loads(dumps(taken.tree))
    assert [each.is_conj() for each in new] == [True, True]
    assert [each.requires_grad for each in new] == [True, False]


def test_conj_and_neg_bits_without_a_loan_are_left_to_torch(engine):
    taken = take(engine, [torch.ones(3, dtype=torch.complex64).conj()])
    (lent_one,) = taken.tree
    assert loans._pickle_tensor_with_bits(lent_one)[0] is loans._rebuild_tensor_with_bits
    others = torch.ones(3, dtype=torch.complex64).conj()
    assert loans._pickle_tensor_with_bits(others)[0] is not loans._rebuild_tensor_with_bits


def test_bytes_are_copied_where_multiprocessing_does_not_pickle(engine):
    taken = take(engine, state(3))
    new = pickle.loads(pickle.dumps(taken.tree))
    taken.release()
    assert leased(engine) == 0 and seen(new) == [3] * 4
    with pytest.raises(TypeError, match=r"hand over its \.tree"):
        pickle.dumps(taken)
    with pytest.raises(TypeError, match="multiprocessing only"):
        pickle.dumps(loans.Lender.__new__(loans.Lender))


# ---- what never arrives ----


def test_untaken_offer_returns_when_its_reader_ends(engine):
    taken = take(engine, state(1))
    readers = [concurrent.futures.Future[None]() for _ in range(2)]
    lost, arrived = dumps(taken.tree), dumps(taken.tree)
    for reader in readers:
        taken.hold_until(reader)
    taken.release()
    readers[0].set_result(None)
    new = pickle.loads(arrived)  # a process may still request the other one
    open_loans = list(loans._loans)
    readers[1].set_result(None)
    assert [loan._over for loan in open_loans] == [True, False]  # their threads may be slow
    with pytest.raises(stillframe.StillframeError, match="not lent any more"):
        pickle.loads(lost)
    assert leased(engine) == 2 * MIB and seen(new) == [1] * 4
    del new
    assert comes_to(engine, 0)


def test_memory_returns_after_a_failed_pickle(engine):
    taken = take(engine, {**state(1), "z": threading.Lock()})
    with pytest.raises(TypeError, match="lock"):
        dumps(taken.tree)
    reader: concurrent.futures.Future[None] = concurrent.futures.Future()
    taken.hold_until(reader)
    taken.release()
    assert leased(engine) == 2 * MIB
    reader.set_result(None)
    assert comes_to(engine, 0)


def test_snapshot_waits_for_a_loan_but_not_forever(engine):
    first, second = take(engine, state(1)), take(engine, state(2))
    new = [pickle.loads(dumps(first.tree))]
    first.release()
    timer = threading.Timer(0.1, new.clear)
    timer.start()
    third = take(engine, state(3))
    assert not new and seen(third.tree) == [3] * 4
    timer.join()
    third.release()
    patient = take(engine, state(4))
    lender = loans._lender_of(patient.tree["w"].untyped_storage())
    assert lender is not None
    lender.patience_s = 0.05
    new = [pickle.loads(dumps(patient.tree))]
    patient.release()
    timer = threading.Timer(20, new.clear)  # ends a wait that should not happen
    timer.start()
    with pytest.raises(stillframe.PoolExhaustedError, match="lent"):
        take(engine, state(5))
    timer.cancel()
    timer.join()
    assert seen(new[0]) == [4] * 4  # the borrower still has its memory
    new.clear()
    second.release()
    assert comes_to(engine, 0)


def test_process_forked_before_the_loan_arrives_keeps_none_of_it(engine):
    taken = take(engine, state(1))
    data = dumps(taken.tree)
    reading, writing = os.pipe()
    child = os.fork()  # unlike multiprocessing's fork, this closes nothing
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    taken.release()
    new = pickle.loads(data)
    assert seen(new) == [1] * 4
    del new
    there = comes_to(engine, 0)
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)
    assert there


# ---- what is refused ----


def test_each_kind_of_memory_says_which_engine_it_needs(engine):
    with (
        stillframe.Engine(pool_bytes=4 * MIB, block_bytes=MIB) as private,
        pytest.raises(ValueError, match=r"Engine\(shared_memory=True\)"),
    ):
        stillframe.snapshot(state(1), shared="spawn", engine=private)
    with pytest.raises(ValueError, match="forked"):
        stillframe.snapshot(state(1), shared=True, engine=engine)
    with pytest.raises(ValueError, match="'spawn'"):
        stillframe.snapshot(state(1), shared="fork", engine=engine)
    with pytest.raises(TypeError, match="shared_memory"):
        stillframe.Engine(shared_memory=1)
    assert leased(engine) == 0


def test_a_system_without_such_memory_is_named():
    for number, text in ((errno.ENOSYS, "memfd_create"), (errno.EMFILE, "one descriptor")):
        with (
            fault("memfd", nth=1, err=number),
            pytest.raises(OSError, match=text) as raised,
        ):
            stillframe.Engine(pool_bytes=4 * MIB, block_bytes=MIB, shared_memory=True)
        assert raised.value.errno == number
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB - 1, limits[1]))
    try:
        with pytest.raises(OSError, match="ulimit -f"):
            stillframe.Engine(pool_bytes=4 * MIB, block_bytes=MIB, shared_memory=True)
        # a pool of default size
        with stillframe.Engine(block_bytes=MIB, shared_memory=True) as fitting:
            assert fitting.stats()["pool_bytes"] < 4 * MIB
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# ---- other processes ----


def test_a_spawned_process_reads_what_it_was_given_while_training_goes_on(engine, torchs_memory):
    context = multiprocessing.get_context("spawn")
    (link, theirs), (grandchild, its) = context.Pipe(), context.Pipe()
    trained = state(1)
    taken = take(engine, trained)
    process = context.Process(target=work, args=(taken.tree, theirs, its), daemon=True)
    process.start()
    taken.hold_until(process)
    taken.release()

    def ask(item: Any) -> Any:
        link.send(item)
        assert link.poll(30)
        return link.recv()

    for value in (2, 3):
        for tensor in trained.values():
            tensor.fill_(value)
        again = take(engine, trained)
        answers = ask(again.tree)
        again.release()
        assert answers == [[1] * 4, [value] * 4]
        assert leased(engine) == 4 * MIB
        if value == 2:
            assert ask("write") == [[1] * 4, [99] * 4]
            assert ask("forget the last") == [[1] * 4]
            assert comes_to(engine, 2 * MIB)
    assert torchs_memory == []
    assert ask("leave a grandchild") == [[1] * 4, [3] * 4]
    process.kill()
    process.join()
    assert leased(engine) == 4 * MIB  # the process still reads the memory
    grandchild.send("look")
    assert grandchild.poll(30) and grandchild.recv() == [[1] * 4, [3] * 4]
    assert comes_to(engine, 0)
