"""Files made of parts, which the core's threads write from memory that must not change meanwhile.

    parts = Parts()
    offsets = parts.append([description_of(tensor), b"bytes", ...])  adds archives or bytes
    handle = submit_parts(engine, parts, path, owners=[...])   starts a save outside the log

The call copies nothing, so the sources must not change before the handle is done. `owners` keep
them alive. Callers pass tensors of snapshots, which do not change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import paths
from stillframe._base.calls import inside_call
from stillframe._save import completion
from stillframe._save.core_save import CoreSave
from stillframe._save.engine import Engine, Path, core_of, note_use
from stillframe._save.options import SaveOptions
from stillframe._save.remote import Upload
from stillframe._tree.skeleton import Skeleton
from stillframe._watch import gate

Parts = _core.Parts
# A tensor: (torch's storage class, number of elements, shape, strides, address, length in bytes)
Row = tuple[str, int, tuple[int, ...], tuple[int, ...], int, int]

# The name of torch's storage class for each dtype, except the quantized ones (Q...).
_STORAGES: dict[torch.dtype, str] = {
    dtype: name
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    if not name.startswith("Q")
}

# Returns a tensor's conjugate and negative bits, or {} if neither is set. Unlike is_conj and
# is_neg, it does not release the interpreter lock.
_conj_and_neg_bits = torch._C._get_tensor_metadata  # type: ignore[attr-defined]


def description_of(tensor: Tensor) -> Row | None:
    """Return what `Parts.append` needs to write a file of torch.save with this tensor alone.

    Return None if torch.save has to write the file. That is so if the tensor's bytes are not
    adjacent in host memory, and for quantized, sparse, conjugated, float8 and subclass tensors.
    """
    name = _STORAGES.get(tensor.dtype)
    if (
        name is None
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or not has_no_gaps_or_overlaps(tensor)
        or _conj_and_neg_bits(tensor)
    ):
        return None
    numel = tensor.numel()
    nbytes = numel * tensor.element_size()
    address = tensor.data_ptr() if nbytes else 0
    return name, numel, tuple(tensor.size()), tensor.stride(), address, nbytes


def has_no_gaps_or_overlaps(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory without gaps or overlap."""
    if tensor.is_contiguous():
        return True
    numel = 1  # the number of elements in the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != numel:
            return False
        numel *= size
    return True


class PartsSave(CoreSave):
    """A save that reads its sources until it has ended. So `_settle` drops the sources. The methods
    here keep them, unlike those of `CoreSave`."""

    def _make_steps_wait_after_call(self) -> None:
        self._verdict.make_steps_wait(self)

    def on_copy_ended(self) -> None:
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
    """Start the save of a file that is part of a larger save. Nobody else uses the file's name.

    The save takes no slot and has no entry in the log. It waits only while 64 such saves are under
    way. It may begin during the process's exit.

    Args:
        parts: The contents of the file; empty afterwards.
        path: The file, as for `async_save`; a link there is replaced.
        owners: Objects that keep the sources' memory alive; dropped when the save has ended.
        durable: As for `async_save`.
        upload: The upload that sends the file to a store. The caller then calls `upload.run`, and
            `path` is only used in messages.

    Raises:
        Exception: As `async_save`, but wrong parts raise OSError or MemoryError.
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
    with inside_call() as nested:
        core = core_of(engine)
        if upload is None:
            target = paths.target(path, follow_link=False, create_parents=False, durable=durable)
        else:
            target = paths.make_remote_target(path)
        flags = options.flags(nested=nested, when_busy="wait")
        # The larger save has begun already, so this part of it may begin during the exit.
        completion.thread.start(under_way=True)
        ticket = _core.Ticket.of_parts(
            core, target.directory, target.name, parts, flags, target.file_system
        )
        # A skeleton without a pickle; it only keeps the owners alive.
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
