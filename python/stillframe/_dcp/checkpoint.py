"""The files of a checkpoint: its data files, their names, and the metadata that commits it.

    __0_0.3fa9c2d1.distcp   data of rank 0; 3fa9c2d1 is the id of its files in one save
    __1_0.77b0e41a.distcp   data of rank 1, which chooses an id of its own
    .metadata               names the data files of the current checkpoint

A data file is a sequence of items, each a complete torch.save archive. For most tensors the core
writes the archive straight from the tensor's memory. Other tensors and objects are first saved to
memory with torch.save. Each rank lays its files out, so that every item's offset is known. The rank
writes them when all ranks have agreed to save.

No data file replaces another. When all new data files exist and are synced, the new .metadata
replaces the old one. This is the commit; until then the old checkpoint stays complete. Afterwards
the data files that the new .metadata does not name are removed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import re
import uuid
from collections.abc import Callable, Sequence
from io import BytesIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from stillframe._base.calls import do_nothing
from stillframe._dcp.location import Location, Submit
from stillframe._dcp.uploads import FileUpload
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle
from stillframe._save.parts import Parts, Row, description_of
from stillframe._save.report import SaveReport

log = logging.getLogger("stillframe")

SUFFIX = ".distcp"
_ARCHIVE_NBYTES = 1024  # an estimate: the bytes of an item besides those of its tensor

# The names of data files: the rank, a number, and the id of the files. Names that PyTorch's own
# writer has made have no id.
_DATA_NAME = re.compile(r"__(\d+)_\d+(\.[0-9a-f]+)?\.distcp")
_TEMPORARY_METADATA_NAME = re.compile(r"(__\d+)?\.metadata\.[0-9a-f]+\.tmp")

Resolve = Callable[[WriteItem], torch.Tensor | BytesIO]  # returns an item's tensor or its pickle


# ---- names ----


def new_id() -> int:
    """Return a new id for the names of one rank's files in one save: 32 random bits."""
    return uuid.uuid4().int >> (128 - 32)


def id_text(files_id: int) -> str:
    return f"{files_id:08x}"


def data_name(prefix: str, number: int, files_id: int) -> str:
    """Return the name of the file `number` of a rank, whose prefix is "__RANK_"."""
    return f"{prefix}{number}.{id_text(files_id)}{SUFFIX}"


def with_new_id(name: str, ids: dict[str, str]) -> str:
    """Return the name of a data file with the id `ids[old id]` in place of the old one."""
    prefix, old, suffix = name.split(".")
    return f"{prefix}.{ids[old]}.{suffix}"


def metadata_name(rank: int | None) -> str:
    """Return the name of the metadata: the checkpoint's, or that of a rank that saves alone."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


def metadata_path(directory: str, rank: int | None) -> str:
    return os.path.join(directory, metadata_name(rank))


# ---- data files ----


class Item:
    """One archive: the row that describes it to the core, and the owner of its bytes. Calls `wait`
    before it reads bytes. Raises ValueError, with `name`, for a meta tensor."""

    __slots__ = ("owner", "row")

    def __init__(
        self,
        data: torch.Tensor | BytesIO,
        name: str = "a tensor",
        wait: Callable[[], object] = do_nothing,
    ) -> None:
        self.owner: object = None
        self.row: Row | memoryview
        if isinstance(data, torch.Tensor):
            tensor, row = data, description_of(data)
            if row is None:  # the core cannot write this tensor, but perhaps a plain copy of it
                if data.is_meta:
                    raise ValueError(
                        f"{name} is on the meta device and has no bytes to save: give it memory"
                        " (`to_empty`, `torch.empty_like(..., device='cpu')`), or leave it out"
                    )
                wait()
                tensor = _to_plain_tensor(data.detach())
                row = description_of(tensor)
            if row is not None:
                self.row, self.owner = row, tensor
                return
            # The core cannot write it either.
            data = BytesIO()
            torch.save(tensor, data)
        self.row = data.getbuffer()


def _to_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor that the core can write, if possible."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if description_of(tensor) is not None else tensor.contiguous()


class DataFile:
    """A file that is first laid out and then written. The items' bytes must not change before they
    are written."""

    def __init__(self, name: str, items: Sequence[Item]) -> None:
        self.name = name
        self._parts = Parts()
        # The offset and the length of each item, in bytes.
        self.ranges = self._parts.append([item.row for item in items])
        self._owners = [item.owner for item in items if item.owner is not None]
        self._save: SaveHandle | FileUpload | None = None

    def start(self, submit: Submit) -> None:
        """Start writing the file."""
        self._save = submit(self._parts, self.name, self._owners)
        self._owners = []  # `_save` refers to them now

    def failure(self) -> BaseException | None:
        """Wait until writing, if started, has ended; return the error, if any."""
        return None if self._save is None else self._save.exception()

    def wait_and_check_written(self) -> bool:
        """Wait until writing has ended; return whether the whole file was written."""
        return self._save is not None and self.failure() is None

    def report(self) -> SaveReport:
        """Return the report of the file, which must be written."""
        assert self._save is not None
        report = self._save.result()
        assert report is not None
        return report


class RankFiles:
    """The data files of this rank in one save.

    Args:
        buckets: The items of each file.
        resolve: Returns the tensor or the bytes of an item.
        location: Where the files go.
        name: Returns the name of the file with a given number.
        wait: Waits until the tensors' bytes are copied. Called before bytes are read here.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[WriteItem]],
        resolve: Resolve,
        location: Location,
        name: Callable[[int], str],
        wait: Callable[[], object] = do_nothing,
    ) -> None:
        self._buckets = buckets
        self._location = location
        self._files = []
        # With gradients, reading a DTensor's local tensor would make an autograd node.
        with torch.no_grad():
            for number, bucket in enumerate(buckets):
                items = [Item(resolve(item), item.index.fqn, wait) for item in bucket]
                self._files.append(DataFile(name(number), items))
        self.ranges = [file.ranges for file in self._files]

    def start(self, *, durable: bool, engine: Engine | None) -> None:
        """Start writing all files. After a SaveError no file is left."""
        submit = self._location.make_submit_function(durable=durable, engine=engine)
        try:
            for file in self._files:
                file.start(submit)
        except BaseException:
            self.discard()
            raise

    def wait(self) -> None:
        """Wait until all files are written. After a SaveError no file is left."""
        failure = self.wait_and_get_first_failure()
        if failure is not None:
            self.discard()
            raise failure

    def wait_and_get_first_failure(self) -> BaseException | None:
        """Wait until writing has ended. Return the error of the first file that failed, if any."""
        failures = [file.failure() for file in self._files]
        return next((each for each in failures if each is not None), None)

    def discard(self) -> None:
        """Remove the files that were written."""
        self._location.remove(self.names())
        self._files = []

    def names(self) -> list[str]:
        """Wait until writing has ended; return the names of the files that were written."""
        return [file.name for file in self._files if file.wait_and_check_written()]

    def reports(self) -> list[SaveReport]:
        return [file.report() for file in self._files]

    def results(self) -> list[WriteResult]:
        """Return the file, the offset and the length of each item, as DCP's write results."""
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=length,
                storage_data=_StorageInfo(file.name, offset, length),
            )
            for file, bucket in zip(self._files, self._buckets, strict=True)
            for item, (offset, length) in zip(bucket, file.ranges, strict=True)
        ]


def buckets(
    items: Sequence[WriteItem], nr_files: int, *, one_item_a_file: bool
) -> list[list[WriteItem]]:
    """Distribute the items among files of about the same size."""
    # Python objects come before tensors, as in files of PyTorch's writer.
    items = sorted(items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
    if one_item_a_file:
        return [[item] for item in items]
    total_nbytes = sum(map(_nbytes, items))
    file_nbytes = (total_nbytes + nr_files - 1) // nr_files  # rounded up
    made: list[list[WriteItem]] = []
    room = 0  # bytes left in the last file
    for item in items:
        if room <= 0:
            made.append([])
            room = file_nbytes
        made[-1].append(item)
        room -= _nbytes(item)
    return made


def _nbytes(item: WriteItem) -> int:
    """Estimate the bytes that an item takes in a file."""
    if item.tensor_data is None:  # a Python object
        return _ARCHIVE_NBYTES
    size = item.tensor_data.chunk.sizes
    return size.numel() * item.tensor_data.properties.dtype.itemsize + _ARCHIVE_NBYTES


# ---- the commit ----


@dataclasses.dataclass
class UncommittedCheckpoint:
    """A checkpoint that is ready to be committed."""

    metadata: Metadata
    location: Location
    name: str  # the metadata's name after the commit
    temporary: str  # the metadata's name until then


def prepare_metadata_commit(
    metadata: Metadata, location: Location, rank: int | None, files_id: int, *, durable: bool
) -> UncommittedCheckpoint:
    """Keep the metadata under a temporary name, which contains `files_id`. The data files need not
    exist yet. `rank` is None for a checkpoint of all ranks. After an OSError no file is left."""
    name = metadata_name(rank)
    new = UncommittedCheckpoint(metadata, location, name, f"{name}.{id_text(files_id)}.tmp")
    try:
        location.prepare(new.temporary, pickle.dumps(metadata), durable=durable)
    except BaseException:
        discard_metadata(new)
        raise
    return new


def discard_metadata(new: UncommittedCheckpoint) -> None:
    """Drop the metadata of a checkpoint that will not be committed."""
    new.location.discard(new.temporary)


def commit_metadata(new: UncommittedCheckpoint, *, durable: bool) -> None:
    """Commit the checkpoint: its metadata replaces the old one. Errors are those of
    `Location.commit`."""
    new.location.commit(new.temporary, new.name, durable=durable)


def get_data_file_names(metadata: Metadata) -> set[str]:
    """Return the names of a checkpoint's data files."""
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


def remove_unreferenced_files(metadata: Metadata, location: Location, rank: int | None) -> None:
    """Remove data files that the checkpoint does not name. If `rank` is given, this rank saves
    alone, so remove only its own files. Failures are only logged: an extra file does no harm."""
    named = get_data_file_names(metadata)
    try:
        names = location.names()
    except OSError as error:
        log.warning("stillframe: what %s does not need was not removed: %s", location.shown, error)
        return
    location.remove(
        [name for name in names if name not in named and _is_data_or_temporary_name(name, rank)]
    )


def _is_data_or_temporary_name(name: str, rank: int | None) -> bool:
    """Return whether `name` can be that of a data file, or of a temporary with metadata. If `rank`
    is given, this rank saves alone, so only its own data files count."""
    data = _DATA_NAME.fullmatch(name)
    if rank is not None:
        return data is not None and int(data[1]) == rank
    return data is not None or _TEMPORARY_METADATA_NAME.fullmatch(name) is not None


def remove_failed_save_files(names: Sequence[str], location: Location) -> None:
    """Remove the data files of a failed save, except files that the checkpoint names. There are
    such files if the save failed after its rename."""
    if not names:
        return
    try:
        named = get_data_file_names(pickle.loads(location.read(metadata_name(None))))
    except FileNotFoundError:
        named = set()
    except Exception as error:  # it is unknown which files are needed
        log.warning("stillframe: files of a failed save stay in %s: %s", location.shown, error)
        return
    location.remove([name for name in names if name not in named])
