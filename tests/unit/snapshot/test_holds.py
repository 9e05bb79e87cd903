"""How the memory of a snapshot goes back that somebody holds. test_lent.py has what they get."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import stillframe
import torch
from fix_snapshots import MIB, leased
from stillframe._snapshot import holds, lent


def only_loan_of(taken: stillframe.Snapshot[Any]) -> lent.Loan:
    """Loans of others may be ending still."""
    lender = lent._lender_of(taken.tree["w"].untyped_storage())
    assert lender is not None
    (loan,) = lender._loans()
    return loan


def test_what_is_borrowed_is_not_withdrawn_with_the_end_of_the_last_reader() -> None:
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


def test_a_forked_process_has_no_end_of_a_channel_that_would_hide_the_lenders() -> None:
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


def test_memory_goes_back_though_the_wait_for_its_holder_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> None:
        raise OSError("no such process")

    given_back = threading.Event()
    holds.in_thread(fails, given_back.set)
    assert given_back.wait(60)
    assert "no such process" in caplog.text
