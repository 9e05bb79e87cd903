"""Files made of parts, which the core's threads write from memory that must not change meanwhile.

    parts = Parts()
    places = parts.append([row_of(tensor), b"bytes", ...])     an archive of torch.save, or bytes
    handle = submit_parts(engine, parts, path, owners=[...])   a save without an entry in the log

The call copies nothing. Long parts are written from where they are, and short ones go through a few
buffers of the writers. So the sources, which `owners` keep alive, must not change before the handle
is done. A snapshot's tensors do not change.
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
from stillframe._save.options import SaveOptions
from stillframe._save.remote import Upload
from stillframe._tree.skeleton import Skeleton
from stillframe._watch import gate

Parts = _core.Parts
Row = tuple[str, int, tuple[int, ...], tuple[int, ...], int, int]

_STORAGES: dict[torch.dtype, str] = {
    dtype: name
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    if not name.startswith("Q")
}

# Returns what torch.save records of a tensor besides its bytes: its conjugate and negative bits.
_metadata = torch._C._get_tensor_metadata  # type: ignore[attr-defined]


def row_of(tensor: Tensor) -> Row | None:
    """Return what `Parts.append` needs to write a tensor as torch.save writes it alone.

    Returns:
        None if torch.save itself has to write the tensor. Its bytes are not adjacent in host
        memory, or it has more than bytes (quantized, sparse, conjugated, float8, a subclass).
    """
    name = _STORAGES.get(tensor.dtype)
    if (
        name is None
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or not is_dense(tensor)
        or _metadata(tensor)  # unlike is_conj and is_neg it keeps the interpreter lock
    ):
        return None
    numel = tensor.numel()
    nbytes = numel * tensor.element_size()
    address = tensor.data_ptr() if nbytes else 0
    return name, numel, tuple(tensor.size()), tensor.stride(), address, nbytes


def is_dense(tensor: Tensor) -> bool:
    """Return whether its elements fill a range of memory, each once, in any order of dimensions."""
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
        self._verdict.launched(self)  # `_settle` drops the sources

    def after_copy(self) -> None:
        pass


def submit_parts(
    engine: Engine,
    parts: Parts,
    path: Path,
    *,
    owners: Sequence[Any],
    durable: bool = True,
    upload: Upload | None = None,
) -> PartsSave:
    """Start the save of a file whose name nobody else writes, removes or reads.

    It has no entry in the log: it waits neither for other saves' slots nor for their ends, and
    later saves do not wait for it. As part of a save that is under way it may begin while the
    process ends. It waits while 64 such saves are under way.

    Args:
        parts: What is in it; empty afterwards.
        path: Where it goes, as for `async_save`; a link there is replaced.
        owners: Objects that keep the sources' memory alive; dropped when the save has ended.
        durable: As for `async_save`.
        upload: The upload that sends the file to a store; the caller then calls its `run`. `path`
            is only used in messages.

    Raises:
        As `async_save`, but for errors about an object: something wrong with the parts is an
        OSError or a MemoryError.
    """
    entered = time.perf_counter()
    options = SaveOptions(
        overlap=False,
        durable=durable,
        follow_link=False,
        wait_for_slot=True,
        ordered=False,
        stream=upload is not None,
    )
    with inside() as nested:
        core = core_of(engine)
        if upload is None:
            target = paths.target(path, follow_link=False, create_parents=False, durable=durable)
        else:
            target = paths.object_target(path)
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
            ordered=False,
        )
        if upload is not None:
            upload.file = save
        save.launch()
        note_use(engine)
        return save
