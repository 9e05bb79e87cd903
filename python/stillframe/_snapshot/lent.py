"""Memory of a snapshot in other processes that were not forked: `snapshot(tree, shared="spawn")`.

    multiprocessing pickles a tree    its storages by their place in the memory, and an offer of it
    a process unpickles it            asks for the memory, gets the descriptor, maps it
    its last tensor is gone, or it    the channel's end says so; the memory goes back to the pool
    has ended, however

    offered ──asked for──▶ lent ──the channel ends──▶ over
       └──────────withdrawn, recalled──────────────────▲

The descriptor goes over the channel only when somebody asks: so it is decided in one place, the
lender's thread, whether a borrower still gets the memory. One that does not is told, and maps
nothing. One offer, and so one descriptor, serves all storages of a pickle.

A borrower maps the memory privately: what it writes is its own, as in a forked child, and neither
the snapshot nor another process sees it.

Others who want memory of the pool wait for what is lent, for two minutes: a loop that waits for its
next item keeps the last one, and may never come back with it. After that it counts as what it is,
memory in somebody's hands.

What is reduced here is what `torch.multiprocessing` would move to shared memory of its own, storage
by storage: its reducer gets all that is not lent.
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

PATIENCE_S = 120.0  # in which others wait for what is lent

_loans: list[Loan] = []  # under way; changed in one step each, by any thread
_offering = threading.RLock()  # no process is forked with an end of a channel that nobody closes
_lenders: weakref.WeakKeyDictionary[_core.SnapshotMemory, Lender] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    keeps_bits = False


_thread = _Thread()


class Lender:
    """Who lends one snapshot's memory: known as long as that memory has tensors here.

    Args:
        place: Of the memory, as `_core.Snapshot.file` says.
        patience_s: How long others wait for what is lent; None where somebody sees to its end.
    """

    def __init__(
        self, core: _core.Snapshot, place: tuple[int, int, int, int], patience_s: float | None
    ) -> None:
        self.core = core
        self.descriptor, self.offset, self.begin, self.nbytes = place
        self.patience_s = patience_s
        self._offsets = set(core.offsets())  # others' memory may lie between them
        self._readers: list[object] = []

    def __reduce__(self) -> Any:
        raise TypeError(
            "a snapshot's memory reaches another process through multiprocessing only: as an"
            " argument of a Process, or through a Queue or Pipe"
        )

    def has(self, address: int) -> bool:
        return address - self.begin in self._offsets

    def offer(self) -> resource_sharer.DupFd:
        """The channel by which one process can ask for the memory."""
        with _offering:
            ours, theirs = socket.socketpair()
            with theirs:
                channel = resource_sharer.DupFd(theirs.fileno())
            loan = Loan(self, ours)
            _loans.append(loan)
        in_thread(loan.serve, loan.end)
        return channel

    def reader(self) -> Callable[[], None]:
        """Somebody who reads what is lent; to be called at the end. With the last one's end the
        offers that nobody has taken are withdrawn: nobody will."""
        mark = object()
        self._readers.append(mark)

        def ended() -> None:
            self._readers.remove(mark)
            if not self._readers:
                for loan in self._loans():
                    loan.withdraw()

        return ended

    def recall(self) -> None:
        """Nobody reads it any more: every loan is over, whoever still has its tensors."""
        for loan in self._loans():
            loan.recall()

    def _loans(self) -> list[Loan]:
        return [loan for loan in list(_loans) if loan.lender is self]


class Loan:
    """What one process may have, and the channel to it."""

    def __init__(self, lender: Lender, channel: socket.socket) -> None:
        self.lender = lender
        self._channel = channel
        self._lock = threading.RLock()  # asked for or withdrawn: whichever is first
        self._asked = self._over = False
        channel.settimeout(lender.patience_s)
        if not lender.core.hold():
            channel.close()
            raise StillframeError("the snapshot's memory has gone back to the pool already")
        self._give_back = lender.core.unhold

    def serve(self) -> None:
        """Until it is over. On a thread of its own."""
        while True:
            try:
                said = self._channel.recv(1)
                if not said or not self._lend():
                    return
            except TimeoutError:
                self._tire()
            except OSError:  # the borrower was killed in between
                return

    def _lend(self) -> bool:
        with self._lock:
            self._asked = not self._over
        if self._asked:
            socket.send_fds(self._channel, [b"\0"], [self.lender.descriptor])
        return self._asked

    def _tire(self) -> None:
        """Others do not wait for it any more."""
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
        """Where nobody has asked for it."""
        with self._lock:
            if self._asked:
                return
            self.recall()

    def forget(self) -> None:
        """In a forked child, whose copy of the channel would hide the borrower's end."""
        self._channel.close()

    def recall(self) -> None:
        with self._lock:
            self._over = True
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_RDWR)


def lend(
    core: _core.Snapshot, memory: _core.SnapshotMemory, patience_s: float | None
) -> Lender | None:
    """Has multiprocessing pickle the tensors over `memory` by their place in it. None where there
    is nothing to lend: the memory is private, or empty."""
    place = core.file()
    if place is None:
        return None
    ForkingPickler.register(Lender, _reduce_lender)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    _register_tensors()
    lender = _lenders[memory] = Lender(core, place, patience_s)
    return lender


def keep_bits() -> None:
    """Has all tensors that multiprocessing pickles on this thread keep their conjugate and negative
    bits, those too whose memory is not lent."""
    _register_tensors()
    _thread.keeps_bits = True


def _register_tensors() -> None:
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce_tensor)


def sentence() -> str:
    """For who finds the pool full."""
    if not _loans:
        return ""
    return (
        " Other processes have memory that was lent to them (shared='spawn'): it comes back when"
        " their tensors are gone, and a loop that waits for its next item keeps the last one until"
        " then, so that the pool needs room for two."
    )


def _forked() -> None:
    """In the child: the loans are the parent's, and so are multiprocessing's copies of channels
    that nobody has asked for yet. Its own processes let go of them; `os.fork` knows of none."""
    _offering.release()
    if _loans:
        resource_sharer._resource_sharer._afterfork()  # type: ignore[attr-defined]
    for loan in _loans:
        loan.forget()
    _loans.clear()


os.register_at_fork(
    before=_offering.acquire, after_in_parent=_offering.release, after_in_child=_forked
)


# ---- here: what pickles ----


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
    """torch's way loses the conjugate and the negative bit."""
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


# ---- in the other process ----


class Borrowed(mmap.mmap):
    """The memory, as long as a tensor refers to it. With it goes the channel, which tells the
    lender."""

    channel: socket.socket

    def __del__(self) -> None:
        self.channel.close()


def _borrow(channel: resource_sharer.DupFd, offset: int, nbytes: int) -> Borrowed:
    """
    Raises:
        StillframeError: The memory is not to be had any more.
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
        memory = Borrowed(descriptors[0], nbytes, flags, access, offset=offset)
    except BaseException:
        asked.close()
        raise
    finally:
        os.close(descriptors[0])
    memory.channel = asked
    return memory


def _storage(memory: Borrowed, offset: int, nbytes: int) -> torch.UntypedStorage:
    bytes_of = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
    return bytes_of.untyped_storage()


def _with_bits(
    tensor: torch.Tensor, conj: bool, neg: bool, parameter: bool, requires_grad: bool
) -> torch.Tensor:
    tensor = _toggled(tensor, conj, neg)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
