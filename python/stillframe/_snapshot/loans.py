"""Lends a snapshot's memory to processes that were not forked: `snapshot(tree, shared="spawn")`.

    multiprocessing pickles a tree    as offsets of its storages in the memory, and an offer
    a process unpickles it            asks for the memory, gets the descriptor, maps it
    its last tensor is gone, or the   the channel ends; the memory goes back to the pool
    process has ended in any way

    offered ──asked for──▶ lent ──the channel ends──▶ over
       └──────────withdrawn, recalled──────────────────▲

The descriptor is sent only when the borrower asks for it. So one thread, the lender's,
decides whether a borrower still gets the memory. A borrower that does not gets an error, and maps
nothing. One offer, and so one descriptor, serves all storages of a pickle.

A borrower maps the memory privately: as in a forked child, its writes are seen neither by the
snapshot nor by another process.

Callers that need memory of the pool wait for memory on loan for two minutes. A loop that waits for
its next item keeps the last one, and may never give it back. So after that time memory on loan
counts as held by its user.

The reducers here handle storages on loan, which `torch.multiprocessing` would move to shared memory
of its own, one by one. torch's reducer gets all others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from stillframe import _core
from stillframe._snapshot.holds import in_thread
from stillframe.errors import StillframeError

PATIENCE_S = 120.0  # how long others wait for memory on loan, in seconds

_loans: list[Loan] = []  # current loans; changed in single steps, by any thread
_offering = threading.RLock()  # no fork while a channel is made: its end would leak
_lenders: weakref.WeakKeyDictionary[_core.SnapshotMemory, Lender] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    keeps_bits = False


_thread = _Thread()


class Lender:
    """The lender of one snapshot's memory, kept as long as the memory has tensors here.

    Args:
        location: The position of the memory, as `_core.Snapshot.file` returns it.
        patience_s: How long others wait for memory on loan; None if it comes back for sure.
    """

    def __init__(
        self, core: _core.Snapshot, location: tuple[int, int, int, int], patience_s: float | None
    ) -> None:
        self.core = core
        self.descriptor, self.offset, self.begin, self.nbytes = location
        self.patience_s = patience_s
        self._offsets = set(core.offsets())  # other snapshots' memory may be between them
        self._readers: list[object] = []

    def __reduce__(self) -> Any:
        raise TypeError(
            "a snapshot's memory reaches another process through multiprocessing only: as an"
            " argument of a Process, or through a Queue or Pipe"
        )

    def has(self, address: int) -> bool:
        return address - self.begin in self._offsets

    def offer(self) -> resource_sharer.DupFd:
        """Make a channel through which one process can ask for the memory."""
        with _offering:
            ours, theirs = socket.socketpair()
            with theirs:
                channel = resource_sharer.DupFd(theirs.fileno())
            loan = Loan(self, ours)
            _loans.append(loan)
        in_thread(loan.serve, loan.end)
        return channel

    def reader(self) -> Callable[[], None]:
        """Register a process that will read memory on loan; return the function to call at its end.

        When the last reader ends, offers that no process has taken are withdrawn.
        """
        mark = object()
        self._readers.append(mark)

        def ended() -> None:
            self._readers.remove(mark)
            if not self._readers:
                for loan in self._loans():
                    loan.withdraw()

        return ended

    def recall(self) -> None:
        """End every loan, even if processes still have tensors."""
        for loan in self._loans():
            loan.recall()

    def _loans(self) -> list[Loan]:
        return [loan for loan in list(_loans) if loan.lender is self]


class Loan:
    """The loan to one process, with the channel to it."""

    def __init__(self, lender: Lender, channel: socket.socket) -> None:
        self.lender = lender
        self._channel = channel
        self._lock = threading.RLock()  # decides between asked for and withdrawn
        self._asked = self._over = False
        channel.settimeout(lender.patience_s)
        if not lender.core.hold():
            channel.close()
            raise StillframeError("the snapshot's memory has gone back to the pool already")
        self._give_back = lender.core.unhold

    def serve(self) -> None:
        """Serve the channel until the loan is over; called on a thread of its own."""
        while True:
            try:
                message = self._channel.recv(1)
                if not message or not self._lend():
                    return
            except TimeoutError:
                self._count_as_used()
            except OSError:  # the borrower was killed meanwhile
                return

    def _lend(self) -> bool:
        with self._lock:
            self._asked = not self._over
        if self._asked:
            socket.send_fds(self._channel, [b"\0"], [self.lender.descriptor])
        return self._asked

    def _count_as_used(self) -> None:
        """Let other threads no longer wait for this memory: it counts as held by its user."""
        core = self.lender.core
        core.view()
        core.will_return(False)
        core.unhold()
        self._give_back = core.unview
        self._channel.settimeout(None)

    def end(self) -> None:
        self._channel.close()
        _loans.remove(self)
        self._give_back()

    def withdraw(self) -> None:
        """End the loan unless the memory was asked for."""
        with self._lock:
            if self._asked:
                return
            self.recall()

    def forget(self) -> None:
        """Close a forked child's copy of the channel, which would hide the borrower's end."""
        self._channel.close()

    def recall(self) -> None:
        with self._lock:
            self._over = True
        with contextlib.suppress(OSError):  # the channel has ended
            self._channel.shutdown(socket.SHUT_RDWR)


def lend(
    core: _core.Snapshot, memory: _core.SnapshotMemory, patience_s: float | None
) -> Lender | None:
    """Make multiprocessing pickle the tensors over `memory` by their offsets in it.

    Returns None if there is nothing to lend: the memory is private, or empty.
    """
    location = core.file()
    if location is None:
        return None
    ForkingPickler.register(Lender, _reduce_lender)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    _register_tensors()
    lender = _lenders[memory] = Lender(core, location, patience_s)
    return lender


def keep_bits() -> None:
    """Keep conjugate and negative bits of all tensors that multiprocessing pickles on this thread.

    Without this, only tensors in memory on loan keep them.
    """
    _register_tensors()
    _thread.keeps_bits = True


def _register_tensors() -> None:
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce_tensor)


def explanation() -> str:
    """Return a sentence on memory on loan for the message about a full pool."""
    if not _loans:
        return ""
    return (
        " Other processes have memory that was lent to them (shared='spawn'): it comes back when"
        " their tensors are gone, and a loop that waits for its next item keeps the last one until"
        " then, so that the pool needs room for two."
    )


def _forked() -> None:
    """Drop the parent's loans in a forked child, and multiprocessing's copies of their channels.

    multiprocessing drops these copies in its own processes, but not after `os.fork`.
    """
    _offering.release()
    if _loans:
        resource_sharer._resource_sharer._afterfork()  # type: ignore[attr-defined]
    for loan in _loans:
        loan.forget()
    _loans.clear()


os.register_at_fork(
    before=_offering.acquire, after_in_parent=_offering.release, after_in_child=_forked
)


# ---- in the lending process ----


def _lender_of(storage: torch.UntypedStorage) -> Lender | None:
    if storage.device.type != "cpu" or storage.nbytes() == 0:
        return None
    address = storage.data_ptr()
    return next((each for each in list(_lenders.values()) if each.has(address)), None)


def _reduce_lender(lender: Lender) -> Any:
    return _borrow, (lender.offer(), lender.offset, lender.nbytes)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    lender = _lender_of(storage)
    if lender is None:
        return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    return _storage, (lender, storage.data_ptr() - lender.begin, storage.nbytes())


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Reduce a tensor with its conjugate and negative bits, which torch's reducer loses."""
    if (
        tensor.layout is not torch.strided
        or not (tensor.is_conj() or tensor.is_neg())
        or not (_thread.keeps_bits or _lender_of(tensor.untyped_storage()) is not None)
    ):
        return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    bits = tensor.is_conj(), tensor.is_neg()
    parameter = isinstance(tensor, torch.nn.Parameter)
    return _with_bits, (_toggled(tensor.detach(), *bits), *bits, parameter, tensor.requires_grad)


def _toggled(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


# ---- in the process that uses the loan ----


class MemoryOnLoan(mmap.mmap):
    """Memory on loan, kept as long as a tensor refers to it.

    When it is freed, it closes the channel, so the owner knows that the loan has ended.
    """

    channel: socket.socket

    def __del__(self) -> None:
        self.channel.close()


def _borrow(channel: resource_sharer.DupFd, offset: int, nbytes: int) -> MemoryOnLoan:
    """Ask the owner for the memory and map it.

    Raises:
        StillframeError: The memory is not lent any more.
    """
    descriptors: list[int] = []
    asked = socket.socket(fileno=channel.detach())
    try:
        asked.sendall(b"\0")
        _, descriptors, _, _ = socket.recv_fds(asked, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # the other end is gone
        pass
    if not descriptors:
        asked.close()
        raise StillframeError(
            "the memory of this snapshot is not lent any more: what its hold_until was given has"
            " ended, or the process that took it has"
        )
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        memory = MemoryOnLoan(descriptors[0], nbytes, flags, access, offset=offset)
    except BaseException:
        asked.close()
        raise
    finally:
        os.close(descriptors[0])
    memory.channel = asked
    return memory


def _storage(memory: MemoryOnLoan, offset: int, nbytes: int) -> torch.UntypedStorage:
    bytes_of = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
    return bytes_of.untyped_storage()


def _with_bits(
    tensor: torch.Tensor, conj: bool, neg: bool, parameter: bool, requires_grad: bool
) -> torch.Tensor:
    """Return the tensor, or a Parameter of it, with its conjugate and negative bits."""
    tensor = _toggled(tensor, conj, neg)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
