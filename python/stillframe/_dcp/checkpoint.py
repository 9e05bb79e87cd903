"""The directory of a checkpoint: its data files, their names, and the rename that commits it.

    __0_0.3fa9c2d1.distcp   data of rank 0; 3fa9c2d1 identifies its part of one save
    __1_0.77b0e41a.distcp   each rank chooses an id of its own
    .metadata               names the data files of the current checkpoint

A data file is a sequence of items, each a complete torch.save archive. For most tensors the core
writes the archive and takes the tensor's bytes from where they are. Anything it cannot describe
(quantized and sparse tensors, types without a storage class, Python objects) is saved to memory
with torch.save first. Files are laid out first, so that every item's offset is known, and written
when all ranks have agreed.

No data file replaces another. So none is missing while the old .metadata is in place, and all new
ones exist and are synced before the new .metadata replaces it. That rename is the only commit.
Files that the new .metadata does not name are removed afterwards: those of the old checkpoint and
of saves that died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from stillframe._base import steps
from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle
from stillframe._save.parts import Parts, Row, row_of, submit_parts
from stillframe._save.report import SaveReport

log = logging.getLogger("stillframe")

SUFFIX = ".distcp"

_DATA = re.compile(r"__(\d+)_\d+(\.[0-9a-f]+)?\.distcp")
_TEMPORARY = re.compile(r"(__\d+)?\.metadata\.[0-9a-f]+\.tmp")

Resolve = Callable[[WriteItem], torch.Tensor | BytesIO]


# ---- names ----


def new_id() -> int:
    """Return a new id for the names of one rank's files in one save."""
    return uuid.uuid4().int >> 96


def id_text(files_id: int) -> str:
    return f"{files_id:08x}"


def data_name(prefix: str, number: int, files_id: int) -> str:
    return f"{prefix}{number}.{id_text(files_id)}{SUFFIX}"


def renamed(name: str, ids: dict[str, str]) -> str:
    """Return the name of a data file with its id replaced by the new one."""
    prefix, old, suffix = name.split(".")
    return f"{prefix}.{ids[old]}.{suffix}"


def metadata_path(directory: str, rank: int | None) -> str:
    """Return the metadata's path: the checkpoint's, or that of a rank that saves alone."""
    return os.path.join(directory, ".metadata" if rank is None else f"__{rank}.metadata")


# ---- data files ----


class Item:
    """One archive: the row that describes it to the core, and the owner of its bytes.

    Args:
        wait: Waits until the bytes are copied. Called only for tensors whose bytes must be read
            here.

    Raises:
        ValueError: `data` is a meta tensor. The message contains its `name`.
    """

    __slots__ = ("owner", "row")

    def __init__(
        self,
        data: torch.Tensor | BytesIO,
        name: str = "a tensor",
        wait: Callable[[], object] = int,
    ) -> None:
        self.owner: object = None
        self.row: Row | memoryview
        if isinstance(data, torch.Tensor):
            tensor, row = data, row_of(data)
            if row is None:
                if data.is_meta:
                    raise ValueError(
                        f"{name} is on the meta device and has no bytes to save: give it memory"
                        " (`to_empty`, `torch.empty_like(..., device='cpu')`), or leave it out"
                    )
                wait()
                tensor = _plain(data.detach())
                row = row_of(tensor)
            if row is not None:
                self.row, self.owner = row, tensor
                return
            data = BytesIO()
            torch.save(tensor, data)
        self.row = data.getbuffer()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor on the CPU: for a strided one, contiguous and without conj and neg."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if row_of(tensor) is not None else tensor.contiguous()


class DataFile:
    """A file that is first laid out and then written.

    Args:
        path: Its target. An existing file is replaced once the new one is complete.
        items: Their bytes must not change until the file is written.

    Attributes:
        ranges: Offset and length of each item, in bytes.
    """

    def __init__(self, path: str, items: Sequence[Item]) -> None:
        self.path = path
        self._parts = Parts()
        self.ranges = self._parts.append([item.row for item in items])
        self._owners = [item.owner for item in items if item.owner is not None]
        self._save: SaveHandle | None = None

    def start(self, *, durable: bool, engine: Engine | None) -> None:
        """Start writing.

        Args:
            durable: Sync the file and its directory.
            engine: The engine whose threads write the file.
        """
        self._save = submit_parts(
            engine_or_default(engine),
            self._parts,
            self.path,
            owners=self._owners,
            durable=durable,
        )
        self._owners = []

    def failure(self) -> BaseException | None:
        """Wait until the file is written; return the error, if any."""
        return None if self._save is None else self._save.exception()

    def report(self) -> SaveReport:
        assert self._save is not None
        report = self._save.result()
        assert report is not None
        return report

    def discard(self) -> None:
        """Remove the file if it was written."""
        if self._save is not None and self.failure() is None and os.path.exists(self.path):
            os.unlink(self.path)


class RankFiles:
    """The data files of this rank in one save.

    Args:
        buckets: The items of each file.
        resolve: Returns the tensor or the bytes of an item.
        name: Returns the name of the file with a given number.
        wait: Waits until the tensors' bytes are copied. Called before bytes are read here.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[WriteItem]],
        resolve: Resolve,
        directory: str,
        name: Callable[[int], str],
        wait: Callable[[], object] = int,
    ) -> None:
        self._buckets = buckets
        self._files = []
        with torch.no_grad():  # then a DTensor's local tensor needs no autograd node
            for number, bucket in enumerate(buckets):
                items = [Item(resolve(item), item.index.fqn, wait) for item in bucket]
                self._files.append(DataFile(os.path.join(directory, name(number)), items))
        self.ranges = [file.ranges for file in self._files]

    def start(self, *, durable: bool, engine: Engine | None) -> None:
        """Start writing all files.

        Raises:
            SaveError: A file could not be started. No file is left.
        """
        try:
            for file in self._files:
                file.start(durable=durable, engine=engine)
        except BaseException:
            self._discard()
            raise

    def wait(self) -> None:
        """Wait until all files are written, and durable if that was asked for.

        Raises:
            SaveError: The operating system refused a step. No file is left.
        """
        failure = self.settle()
        if failure is not None:
            self._discard()
            raise failure

    def settle(self) -> BaseException | None:
        """Wait until all files have ended; return the first error, if any."""
        failures = [file.failure() for file in self._files]
        return next((each for each in failures if each is not None), None)

    def _discard(self) -> None:
        for file in self._files:
            file.discard()

    def paths(self) -> list[str]:
        return [file.path for file in self._files]

    def reports(self) -> list[SaveReport]:
        return [file.report() for file in self._files]

    def results(self) -> list[WriteResult]:
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=length,
                storage_data=_StorageInfo(os.path.basename(file.path), at, length),
            )
            for file, bucket in zip(self._files, self._buckets, strict=True)
            for item, (at, length) in zip(bucket, file.ranges, strict=True)
        ]


def buckets(
    items: Sequence[WriteItem], nr_files: int, *, one_item_a_file: bool
) -> list[list[WriteItem]]:
    """Distribute the items among files of about the same size."""
    # Objects come first, as in files of PyTorch's writer.
    items = sorted(items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
    if one_item_a_file:
        return [[item] for item in items]
    most = -(-sum(map(_nbytes, items)) // nr_files)
    made: list[list[WriteItem]] = []
    room = 0
    for item in items:
        if room <= 0:
            made.append([])
            room = most
        made[-1].append(item)
        room -= _nbytes(item)
    return made


def _nbytes(item: WriteItem) -> int:
    """Estimate the bytes that an item takes in a file."""
    if item.tensor_data is None:
        return 1024
    size = item.tensor_data.chunk.sizes
    return size.numel() * item.tensor_data.properties.dtype.itemsize + 1024


# ---- the commit ----


@dataclasses.dataclass
class ReadyCheckpoint:
    """A checkpoint that is ready to be committed. Its metadata has a temporary name."""

    metadata: Metadata
    path: str
    temporary: str


def write(
    metadata: Metadata, directory: str, rank: int | None, files_id: int, *, durable: bool
) -> ReadyCheckpoint:
    """Write the metadata under a temporary name. The data files need not exist yet.

    Args:
        files_id: The id in the names of the coordinator's data files.

    Raises:
        OSError: The metadata could not be written. No file is left.
    """
    path = metadata_path(directory, rank)
    new = ReadyCheckpoint(metadata, path, f"{path}.{id_text(files_id)}.tmp")
    wanted = [steps.write(new.temporary, pickle.dumps(metadata), durable=durable)]
    if durable:  # the parent holds the directory's own entry
        wanted.append(steps.sync(os.path.dirname(os.path.abspath(directory))))
    try:
        steps.take(wanted)
    except BaseException:
        discard(new)
        raise
    return new


def discard(new: ReadyCheckpoint) -> None:
    """Remove the temporary metadata of a checkpoint that will not be committed."""
    _remove([new.temporary])


def commit_metadata(new: ReadyCheckpoint, *, durable: bool) -> None:
    """Commit the checkpoint: give its metadata the final name.

    Raises:
        OSError: The directory holds what it held before. If only its sync failed, it holds the new
            checkpoint, which is then not known to be durable.
    """
    named = steps.rename(new.temporary, new.path)
    synced = steps.sync(os.path.dirname(new.path))
    # The first sync is for the data files' entries, those of all ranks.
    steps.take([synced, named, synced] if durable else [named])


def named_files(metadata: Metadata) -> set[str]:
    """Return the names of a checkpoint's data files, relative to its directory."""
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


def remove_unnamed(metadata: Metadata, directory: str, rank: int | None) -> None:
    """Remove data files that the checkpoint does not name; for a rank that saves alone, only its
    own. An extra file does no harm, so failures are only logged."""
    wanted = named_files(metadata)
    try:
        names = steps.names(directory)
    except OSError as error:
        log.warning("stillframe: what %s does not need was not removed: %s", directory, error)
        return
    _remove(
        os.path.join(directory, name) for name in names if name not in wanted and _is_of(name, rank)
    )


def _is_of(name: str, rank: int | None) -> bool:
    """Tell whether a file belongs to a checkpoint, or to `rank` if that rank saves alone."""
    data = _DATA.fullmatch(name)
    if rank is not None:
        return data is not None and int(data[1]) == rank
    return data is not None or _TEMPORARY.fullmatch(name) is not None


def remove_files(paths: Iterable[str], directory: str) -> None:
    """Remove the data files of a failed save, except those that the directory's checkpoint names:
    the save may have failed after its rename."""
    try:
        with open(metadata_path(directory, None), "rb") as file:
            wanted = named_files(pickle.load(file))
    except FileNotFoundError:
        wanted = set()
    except Exception as error:  # without the metadata it is unknown which files are needed
        log.warning("stillframe: files of a failed save stay in %s: %s", directory, error)
        return
    _remove(path for path in paths if os.path.basename(path) not in wanted)


def remove_if_empty(directory: str) -> None:
    """Remove the directory of a failed save unless it has files."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _remove(paths: Iterable[str]) -> None:
    for error in steps.take_each([steps.unlink(path) for path in paths]):
        log.warning(
            "stillframe: %s is not needed and could not be removed: %s", error.filename, error
        )
