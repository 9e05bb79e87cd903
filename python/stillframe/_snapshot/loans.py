"""Lends a snapshot's memory to processes that were not forked: `snapshot(tree, shared="spawn")`.

    when multiprocessing pickles a tree      the pickle has the offsets of the storages in the
                                             memory, and a channel: the offer
    when a process (borrower) unpickles it   it asks for the memory over the channel, gets the file
                                             descriptor, and maps it
    when its last tensor is gone, or the     the channel ends, and the memory goes back to the pool
    process has ended in any way

    offered ──asked for──▶ lent ──the channel ends──▶ over
       └──────────withdrawn, recalled──────────────────▲

The lending process sends the descriptor only when the borrower asks for it. A borrower that asks
too late gets an error. One offer serves all storages of a pickle. A borrower maps the memory
privately, so nobody else sees its writes.

Calls that need memory of the pool wait up to two minutes for memory on loan. Then they raise
PoolExhaustedError, because the borrower may keep the memory for long: a loop keeps the tensors of
its last item while it waits for the next one.

A *reducer* tells multiprocessing how to pickle the objects of a class. The reducers here handle
storages on loan and leave all others to torch's reducers, which move storages to shared memory.
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
from stillframe._snapshot.holds import call_on_thread_after
from stillframe.errors import StillframeError

PATIENCE_S = 120.0  # how long callers that need memory on loan wait for it

_loans: list[Loan] = []  # offered or lent; any thread changes the list, by atomic operations
# Held while a channel is made, and by `os.fork`. A forked child closes the channels in `_loans`, so
# every channel that exists at a fork must be there.
_offering = threading.RLock()
# The lenders, by the memory that they lend.
_lenders: weakref.WeakKeyDictionary[_core.SnapshotMemory, Lender] = weakref.WeakKeyDictionary()


class _ThreadState(threading.local):
    keeps_bits = False  # whether the thread has called `keep_conj_and_neg_bits`


_thread = _ThreadState()


class Lender:
    """The lender of one snapshot's memory, kept as long as the memory has tensors in this process.

    Args:
        core: The core's snapshot.
        location: The result of `core.file()`: file descriptor, offset in the file, address, and
            bytes.
        patience_s: How many seconds other callers wait for the memory while it is on loan. None
            waits without a limit, for memory that is sure to come back.
    """

    def __init__(
        self, core: _core.Snapshot, location: tuple[int, int, int, int], patience_s: float | None
    ) -> None:
        self.core = core
        self.descriptor, self.offset, self.begin, self.nbytes = location
        self.patience_s = patience_s
        # The offsets of this snapshot's storages. Other snapshots may be in the memory too.
        self._offsets = set(core.offsets())
        self._readers: list[object] = []  # a mark for each process of `register_reader`

    def __reduce__(self) -> Any:
        raise TypeError(
            "a snapshot's memory reaches another process through multiprocessing only: as an"
            " argument of a Process, or through a Queue or Pipe"
        )

    def has(self, address: int) -> bool:
        """Return whether a storage of the snapshot is at this address."""
        return address - self.begin in self._offsets

    def offer(self) -> resource_sharer.DupFd:
        """Make a channel through which one process can ask for the memory. Serve our end on a
        thread, and return the other end."""
        with _offering:
            ours, theirs = socket.socketpair()
            with theirs:  # closed here, because `DupFd` duplicates it
                channel = resource_sharer.DupFd(theirs.fileno())
            loan = Loan(self, ours)
            _loans.append(loan)
        call_on_thread_after(loan.serve, loan.end)
        return channel

    def register_reader(self) -> Callable[[], None]:
        """Register a process that will read memory on loan. Return a function to call when the
        process has ended. The last such call withdraws the offers that no process has taken."""
        mark = object()
        self._readers.append(mark)

        def ended() -> None:
            self._readers.remove(mark)
            if not self._readers:
                for loan in self._loans_of_this_lender():
                    loan.end_loan_unless_asked()

        return ended

    def recall(self) -> None:
        """End every loan, even if processes still have tensors."""
        for loan in self._loans_of_this_lender():
            loan.recall()

    def _loans_of_this_lender(self) -> list[Loan]:
        return [loan for loan in list(_loans) if loan.lender is self]


class Loan:
    """The loan to one process, and our end of its channel. The memory is held until `end`."""

    def __init__(self, lender: Lender, channel: socket.socket) -> None:
        self.lender = lender
        self._channel = channel
        self._lock = threading.RLock()  # protects `_asked` and `_over`
        self._asked = False  # the borrower has asked in time, and gets the memory
        self._over = False  # the loan was withdrawn or recalled
        channel.settimeout(lender.patience_s)
        if not lender.core.hold():
            channel.close()
            raise StillframeError("the snapshot's memory has gone back to the pool already")
        self._give_back = lender.core.unhold  # what `end` calls

    def serve(self) -> None:
        """Answer the borrower until the channel ends; it sends one byte to ask for the memory."""
        while True:
            try:
                message = self._channel.recv(1)  # empty if the channel has ended
                if not message or not self._send_descriptor_if_valid():
                    return
            except TimeoutError:  # after `patience_s` seconds without an end
                self._count_memory_as_in_use()
            except OSError:  # the borrower was killed
                return

    def _send_descriptor_if_valid(self) -> bool:
        """Send the descriptor, unless the loan was withdrawn; return whether it was sent."""
        with self._lock:
            self._asked = not self._over
        if self._asked:
            socket.send_fds(self._channel, [b"\0"], [self.lender.descriptor])
        return self._asked

    def _count_memory_as_in_use(self) -> None:
        """Turn the hold into a view, so that the memory counts as held by its user. Callers that
        need this memory then raise PoolExhaustedError instead of waiting."""
        core = self.lender.core
        core.view()
        core.will_return(False)  # so nobody waits for the memory any more
        core.unhold()
        self._give_back = core.unview
        self._channel.settimeout(None)  # from now on, wait for the borrower without a limit

    def end(self) -> None:
        """Give the memory back when the channel has ended."""
        self._channel.close()
        _loans.remove(self)
        self._give_back()

    def end_loan_unless_asked(self) -> None:
        """End the loan, unless the borrower has asked for the memory."""
        with self._lock:
            if self._asked:
                return
            self.recall()

    def forget(self) -> None:
        """Close a forked child's copy of our end. While it is open, the borrower does not see that
        the parent has closed its end."""
        self._channel.close()

    def recall(self) -> None:
        """End the loan, even if the borrower still has tensors."""
        with self._lock:
            self._over = True
        with contextlib.suppress(OSError):  # the channel has ended already
            self._channel.shutdown(socket.SHUT_RDWR)


def lend(
    core: _core.Snapshot, memory: _core.SnapshotMemory, patience_s: float | None
) -> Lender | None:
    """Have multiprocessing pickle the tensors over `memory` by their offsets in the memory. Return
    the lender, or None if the memory is private or empty. For `patience_s` see `Lender`."""
    location = core.file()
    if location is None:
        return None
    ForkingPickler.register(Lender, _pickle_lender_as_offer)
    ForkingPickler.register(torch.UntypedStorage, _pickle_storage_as_offset)
    _register_tensor_reducers()
    lender = _lenders[memory] = Lender(core, location, patience_s)
    return lender


def keep_conj_and_neg_bits() -> None:
    """Keep the conjugate and negative bits of all tensors that multiprocessing pickles on this
    thread from now on. Without this call, only tensors in memory on loan keep them."""
    _register_tensor_reducers()
    _thread.keeps_bits = True


def _register_tensor_reducers() -> None:
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _pickle_tensor_with_bits)


def explain_loans() -> str:
    """Return a sentence about loans for the message about a full pool, or ""."""
    if not _loans:
        return ""
    return (
        " Other processes have memory that was lent to them (shared='spawn'): it comes back when"
        " their tensors are gone, and a loop that waits for its next item keeps the last one until"
        " then, so that the pool needs room for two."
    )


def _reset_in_forked_child() -> None:
    """Close the parent's channels in a forked child."""
    _offering.release()  # acquired before the fork
    if _loans:
        # multiprocessing keeps copies of the borrowers' ends: have it close them.
        resource_sharer._resource_sharer._afterfork()  # type: ignore[attr-defined]
    for loan in _loans:
        loan.forget()
    _loans.clear()


os.register_at_fork(
    before=_offering.acquire,
    after_in_parent=_offering.release,
    after_in_child=_reset_in_forked_child,
)


# ---- in the lending process ----


def _lender_of(storage: torch.UntypedStorage) -> Lender | None:
    """Return the lender of a storage's memory, or None if the memory has no lender."""
    if storage.device.type != "cpu" or storage.nbytes() == 0:
        return None
    address = storage.data_ptr()
    for lender in list(_lenders.values()):
        if lender.has(address):
            return lender
    return None


def _pickle_lender_as_offer(lender: Lender) -> Any:
    """Pickle a lender as an offer, which the borrower unpickles with `_map_borrowed_memory`."""
    return _map_borrowed_memory, (lender.offer(), lender.offset, lender.nbytes)


def _pickle_storage_as_offset(storage: torch.UntypedStorage) -> Any:
    """Pickle a storage on loan as its offset in the memory."""
    lender = _lender_of(storage)
    if lender is None:
        return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    return _storage_over_memory, (lender, storage.data_ptr() - lender.begin, storage.nbytes())


def _pickle_tensor_with_bits(tensor: torch.Tensor) -> Any:
    """Pickle a tensor with its conjugate and negative bits, which torch's reducer loses."""
    has_bits = tensor.layout is torch.strided and (tensor.is_conj() or tensor.is_neg())
    keeps_bits = has_bits and (
        _thread.keeps_bits or _lender_of(tensor.untyped_storage()) is not None
    )
    if not keeps_bits:
        return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    conj, neg = tensor.is_conj(), tensor.is_neg()
    without_bits = _toggle_bits(tensor.detach(), conj, neg)
    parameter = isinstance(tensor, torch.nn.Parameter)
    return _rebuild_tensor_with_bits, (without_bits, conj, neg, parameter, tensor.requires_grad)


def _toggle_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """Return a view of a tensor with the given bits inverted."""
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


# ---- in the process that uses the loan ----


class BorrowedMemoryMap(mmap.mmap):
    """The borrower's mapping of memory on loan, kept alive by the tensors over it. When the mapping
    is freed, it closes the channel, which ends the loan."""

    channel: socket.socket

    def __del__(self) -> None:
        self.channel.close()


def _map_borrowed_memory(
    channel: resource_sharer.DupFd, offset: int, nbytes: int
) -> BorrowedMemoryMap:
    """Ask the lending process for the memory, and map `nbytes` of the file at `offset`.

    Raises:
        StillframeError: The memory is not lent any more.
    """
    descriptors: list[int] = []
    connection = socket.socket(fileno=channel.detach())
    try:
        connection.sendall(b"\0")
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # the lender has closed its end, so there is no descriptor
        pass
    if not descriptors:
        connection.close()
        raise StillframeError(
            "the memory of this snapshot is not lent any more: what its hold_until was given has"
            " ended, or the process that took it has"
        )
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        memory = BorrowedMemoryMap(descriptors[0], nbytes, flags, access, offset=offset)
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(descriptors[0])
    memory.channel = connection
    return memory


def _storage_over_memory(
    memory: BorrowedMemoryMap, offset: int, nbytes: int
) -> torch.UntypedStorage:
    """Return a storage over a part of the memory. It keeps the mapping alive."""
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
    return tensor.untyped_storage()


def _rebuild_tensor_with_bits(
    tensor: torch.Tensor, conj: bool, neg: bool, parameter: bool, requires_grad: bool
) -> torch.Tensor:
    tensor = _toggle_bits(tensor, conj, neg)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
