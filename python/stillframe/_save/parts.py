"""Files made of parts: written by the core's threads from memory that stays as it is until the end.

    parts = Parts()
    places = parts.append([row_of(tensor), b"bytes", ...])     an archive of torch.save, or bytes
    handle = submit_parts(engine, parts, path, owners=[...])   a save without a place in the log

Nothing is copied in the call: what is long enough is written from where it is, the rest goes
through a few buffers of the writers. So the sources, which `owners` keep alive, may not change
before the handle is done: a snapshot's tensors do not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import paths
from stillframe._base.calls import inside
from stillframe._save import completion
from stillframe._save.core_save import CoreSave
from stillframe._save.engine import Engine, Path, core_of, note_use
from stillframe._save.handle import SaveHandle
from stillframe._save.options import SaveOptions
from stillframe._tree.skeleton import Skeleton
from stillframe._watch import gate

Parts = _core.Parts
Row = tuple[str, int, tuple[int, ...], tuple[int, ...], int, int]

_STORAGES: dict[torch.dtype, str] = {
    dtype: name
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    if not name.startswith("Q")
}

# What torch.save adds to a tensor: its conjugate and negative bits.
_metadata = torch._C._get_tensor_metadata  # type: ignore[attr-defined]


def row_of(tensor: Tensor) -> Row | None:
    """What `Parts.append` needs of a tensor, to write what torch.save does of it alone.

    Returns:
        None where torch.save has to write it: its bytes do not stand together in host memory, or
        are not all there is of it (quantized, sparse, conjugated tensors, subclasses, float8).
    """
    name = _STORAGES.get(tensor.dtype)
    if (
        name is None
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or not is_dense(tensor)
        or _metadata(tensor)  # is_conj and is_neg let go of the interpreter lock
    ):
        return None
    numel = tensor.numel()
    nbytes = numel * tensor.element_size()
    address = tensor.data_ptr() if nbytes else 0
    return name, numel, tuple(tensor.size()), tensor.stride(), address, nbytes


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != reach:
            return False
        reach *= size
    return True


class PartsSave(CoreSave):
    """A save whose sources are read until it has ended."""

    def _go_on(self) -> None:
        self._verdict.launched(self)  # and the sources stay: `_settle` lets go of them

    def after_copy(self) -> None:
        pass


def submit_parts(
    engine: Engine,
    parts: Parts,
    path: Path,
    *,
    owners: Sequence[Any],
    durable: bool = True,
) -> SaveHandle:
    """Starts the save of a file that has a name which nobody else writes, removes or reads. It
    has no place in the log: it waits neither for other saves' slots nor for their ends, and what
    comes later does not wait for it. As a part of a save that is under way it may begin while the
    process ends. Waits where as many such saves are under way as there may be.

    Args:
        parts: What is in it; empty afterwards.
        path: Where it goes, as for `async_save`; a link there is replaced.
        owners: Whatever keeps the sources' memory; let go of when the save has ended.
        durable: As for `async_save`.

    Raises:
        As `async_save`, but for what concerns an object: what is wrong with the parts is an OSError
        or a MemoryError.
    """
    entered = time.perf_counter()
    options = SaveOptions(
        overlap=False, durable=durable, follow_link=False, wait_for_slot=True, ordered=False
    )
    with inside() as nested:
        core = core_of(engine)
        target = paths.target(path, follow_link=False, create_parents=False, durable=durable)
        flags = options.flags(nested=nested, when_busy="wait")
        completion.completion.start(under_way=True)
        ticket = _core.Ticket.of_parts(
            core, target.directory, target.name, parts, flags, target.file_system
        )
        sources = Skeleton(b"", list(owners), _core.Numbers([]), bytearray(), len(owners), [])
        save = PartsSave(
            ticket,
            sources,
            gate.Deferral(),
            path=target.shown,
            given=path,
            on_durable=None,
            entered=entered,
        )
        save.launch()
        note_use(engine)
        return save
