"""How held memory and memory on loan return. test_loans.py tests what borrowers get."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import stillframe
import torch
from fix_snapshots import MIB
from fix_waits import leased
from stillframe._snapshot import holds, loans


def only_loan_of(taken: stillframe.Snapshot[Any]) -> loans.Loan:
    """Return the only loan of this lender; loans of other tests may still be ending."""
    lender = loans._lender_of(taken.tree["w"].untyped_storage())
    assert lender is not None
    (loan,) = lender._loans_of_this_lender()
    return loan


def test_loan_taken_before_the_last_reader_ends_is_kept():
    with stillframe.Engine(pool_bytes=MIB, block_bytes=MIB, shared_memory=True) as engine:
        taken = stillframe.snapshot({"w": torch.ones(9)}, shared="spawn", engine=engine)
        reader: concurrent.futures.Future[None] = concurrent.futures.Future()
        taken.hold_until(reader)
        borrowed = pickle.loads(ForkingPickler.dumps(taken.tree))
        loan = only_loan_of(taken)
        taken.release()
        reader.set_result(None)
        assert not loan._over
        assert leased(engine) == MIB
        assert borrowed["w"].eq(1).all()


def test_forked_process_keeps_no_end_of_a_loans_channel():
    with stillframe.Engine(pool_bytes=MIB, block_bytes=MIB, shared_memory=True) as engine:
        taken = stillframe.snapshot({"w": torch.ones(9)}, shared="spawn", engine=engine)
        data = ForkingPickler.dumps(taken.tree)
        loan = only_loan_of(taken)
        number = loan._channel.fileno()
        child = os.fork()
        if child == 0:
            os._exit(os.path.exists(f"/proc/self/fd/{number}"))
        assert os.waitpid(child, 0)[1] == 0
        taken.release()
        assert pickle.loads(data)["w"].eq(1).all()


def test_memory_returns_even_if_the_wait_for_its_holder_fails(caplog):
    def fails() -> None:
        raise OSError("no such process")

    given_back = threading.Event()
    holds.call_on_thread_after(fails, given_back.set)
    assert given_back.wait(60)
    assert "no such process" in caplog.text


class Memory:
    """A fake memory of a snapshot that records its holders and their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def hold(self) -> bool:
        self.calls.append("hold")
        return True

    def will_return(self, yes: bool) -> None:
        self.calls.append(f"will return: {yes}")

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


class Channel:
    """A fake channel whose other end follows the test; sending over it is an error."""

    def __init__(self, *received: bytes | OSError) -> None:
        self.received = list(received)
        self.timeouts: list[float | None] = []
        self.closed = False

    def settimeout(self, timeout: float | None) -> None:
        self.timeouts.append(timeout)

    def recv(self, nbytes: int) -> bytes:
        each = self.received.pop(0)
        if isinstance(each, OSError):
            raise each
        return each

    def shutdown(self, how: int) -> None:
        raise OSError("the other end is gone")

    def close(self) -> None:
        self.closed = True


def loan_over(channel: Channel) -> tuple[loans.Loan, list[str]]:
    lender: Any = SimpleNamespace(core=Memory(), patience_s=0.5, descriptor=-1)
    return loans.Loan(lender, channel), lender.core.calls


def test_overdue_loan_counts_as_held_by_the_user():
    """Others wait for a hold, which ends by itself, but not for a view."""
    channel = Channel(TimeoutError(), b"")
    loan, calls = loan_over(channel)
    loans._loans.append(loan)
    loan.serve()
    assert calls == ["hold", "view", "will return: False", "unhold"]
    assert channel.timeouts == [0.5, None]  # it warns once, and the hold was given back by then
    loan.end()
    assert calls[4:] == ["unview"] and channel.closed and loan not in loans._loans


def test_killed_borrower_returns_its_loan():
    loan, calls = loan_over(Channel(ConnectionResetError()))
    loans._loans.append(loan)
    loan.serve()
    loan.end()
    assert calls == ["hold", "unhold"]


def test_recalled_memory_is_not_on_loan():
    loan, _ = loan_over(Channel(b"\0"))
    loan.recall()  # no process is left to notify
    loan.serve()
    assert not loan._asked


def test_a_forked_child_has_no_loans_and_may_lend_its_own():
    with stillframe.Engine(pool_bytes=MIB, block_bytes=MIB, shared_memory=True) as engine:
        taken = stillframe.snapshot({"w": torch.ones(9)}, shared="spawn", engine=engine)
        data = ForkingPickler.dumps(taken.tree)
        child = os.fork()
        if child == 0:
            free: list[bool] = []
            thread = threading.Thread(
                target=lambda: free.append(loans._offering.acquire(blocking=False))
            )
            thread.start()
            thread.join()
            os._exit(0 if free == [True] and loans.explain_loans() == "" else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert "lent to them" in loans.explain_loans()
        taken.release()
        assert pickle.loads(data)["w"].eq(1).all()
