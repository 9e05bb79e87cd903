"""A checkpoint's directory: its data files, what they are called, and the one rename that makes it.

    __0_0.3fa9c2d1.distcp   data of rank 0, of the save 3fa9c2d1
    __1_0.77b0e41a.distcp   each rank names its own
    .metadata               names the data files of the checkpoint that the directory holds

A data file is items one after the other, each a whole archive of torch.save. The core makes a
tensor's archive around bytes that it writes from where they are. What it cannot describe (quantized
and sparse tensors, types without a storage class, Python objects) torch.save has put into memory.
Files are laid out first, so that it is known where everything will stand, and written when all
ranks have agreed.

No data file ever takes the place of another, so none is missing while the old .metadata stands, and
all are there, and synced, before the new one takes its place. Its rename is the only commit. What
it does not name goes afterwards: the old checkpoint's files, and those of saves that died.
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
    """Of the files of one rank's part of a save."""
    return uuid.uuid4().int >> 96


def id_text(files_id: int) -> str:
    return f"{files_id:08x}"


def data_name(prefix: str, number: int, files_id: int) -> str:
    return f"{prefix}{number}.{id_text(files_id)}{SUFFIX}"


def renamed(name: str, ids: dict[str, str]) -> str:
    """A data file's name, in a save that has other ids."""
    prefix, old, suffix = name.split(".")
    return f"{prefix}.{ids[old]}.{suffix}"


def metadata_path(directory: str, rank: int | None) -> str:
    """Of the checkpoint, or of what one rank has saved for itself."""
    return os.path.join(directory, ".metadata" if rank is None else f"__{rank}.metadata")


# ---- data files ----


class Item:
    """One archive: what the core needs, and who has the bytes.

    Args:
        wait: Called before the bytes themselves are looked at, which most tensors are spared.

    Raises:
        ValueError: `data` is a meta tensor; it says its `name`.
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
    """A tensor on the CPU whose bytes are all there is of it, and stand together, if it can be."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if row_of(tensor) is not None else tensor.contiguous()


class DataFile:
    """A file that is laid out, and then written.

    Args:
        path: Where it goes; what stands there is replaced once the file is complete.
        items: Their bytes may not change before the end.

    Attributes:
        places: Offset and length of each item.
    """

    def __init__(self, path: str, items: Sequence[Item]) -> None:
        self.path = path
        self._parts = Parts()
        self.places = self._parts.append([item.row for item in items])
        self._owners = [item.owner for item in items if item.owner is not None]
        self._save: SaveHandle | None = None

    def start(self, *, durable: bool, engine: Engine | None) -> None:
        """
        Args:
            durable: Sync the file and its directory.
            engine: Whose threads write it.
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
        """Waits for the end; what went wrong."""
        return None if self._save is None else self._save.exception()

    def report(self) -> SaveReport:
        assert self._save is not None
        report = self._save.result()
        assert report is not None
        return report

    def discard(self) -> None:
        """Removes it, if it has come into being."""
        if self._save is not None and self.failure() is None and os.path.exists(self.path):
            os.unlink(self.path)


class RankFiles:
    """
    Args:
        buckets: The items of each file.
        resolve: Gives the tensor or the bytes of an item.
        name: Gives the name of a file by its number.
        wait: Returns when the tensors' bytes are there; called where they are looked at.
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
        with torch.no_grad():  # a DTensor's local tensor is to be had for nothing then
            for number, bucket in enumerate(buckets):
                items = [Item(resolve(item), item.index.fqn, wait) for item in bucket]
                self._files.append(DataFile(os.path.join(directory, name(number)), items))
        self.places = [file.places for file in self._files]

    def start(self, *, durable: bool, engine: Engine | None) -> None:
        """
        Raises:
            SaveError: A file cannot be begun. None is left.
        """
        try:
            for file in self._files:
                file.start(durable=durable, engine=engine)
        except BaseException:
            self._discard()
            raise

    def wait(self) -> None:
        """Waits until all files are written, and durable where they are to be.

        Raises:
            SaveError: The operating system refused a step. No file is left.
        """
        failure = self.settle()
        if failure is not None:
            self._discard()
            raise failure

    def settle(self) -> BaseException | None:
        """Waits for the end of all files; the first error."""
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
            for item, (at, length) in zip(bucket, file.places, strict=True)
        ]


def buckets(
    items: Sequence[WriteItem], nr_files: int, *, one_item_a_file: bool
) -> list[list[WriteItem]]:
    """The items of each file."""
    # Objects first, as PyTorch's writer has them.
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
    """About what it takes in a file."""
    if item.tensor_data is None:
        return 1024
    size = item.tensor_data.chunk.sizes
    return size.numel() * item.tensor_data.properties.dtype.itemsize + 1024


# ---- the commit ----


@dataclasses.dataclass
class New:
    """A checkpoint that is to be committed; its metadata stands beside the name it is to have."""

    metadata: Metadata
    path: str
    temporary: str


def write(
    metadata: Metadata, directory: str, rank: int | None, files_id: int, *, durable: bool
) -> New:
    """All of a commit that the data files need not be there for.

    Args:
        files_id: Of the data files of who commits.

    Raises:
        OSError: Nothing of it stays.
    """
    path = metadata_path(directory, rank)
    new = New(metadata, path, f"{path}.{id_text(files_id)}.tmp")
    wanted = [steps.write(new.temporary, pickle.dumps(metadata), durable=durable)]
    if durable:
        wanted.append(steps.sync(os.path.dirname(os.path.abspath(directory))))  # its entry there
    try:
        steps.take(wanted)
    except BaseException:
        discard(new)
        raise
    return new


def discard(new: New) -> None:
    """It will not be committed."""
    _remove([new.temporary])


def put_in_place(new: New, *, durable: bool) -> None:
    """The commit.

    Raises:
        OSError: The directory holds what it held before; or, where only syncing it failed, the new
            checkpoint, not known to be durable.
    """
    named = steps.rename(new.temporary, new.path)
    synced = steps.sync(os.path.dirname(new.path))
    # First the entries of the data files of all ranks.
    steps.take([synced, named, synced] if durable else [named])


def named_files(metadata: Metadata) -> set[str]:
    """The data files of a checkpoint, relative to its directory."""
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


def remove_unnamed(metadata: Metadata, directory: str, rank: int | None) -> None:
    """Removes data files that the checkpoint does not name; of one rank only where it has saved for
    itself. An extra file does no harm: what cannot be removed is logged."""
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
    """Whether a file is one of a checkpoint's, or of one rank's that has saved for itself."""
    data = _DATA.fullmatch(name)
    if rank is not None:
        return data is not None and int(data[1]) == rank
    return data is not None or _TEMPORARY.fullmatch(name) is not None


def remove_files(paths: Iterable[str], directory: str) -> None:
    """Removes data files of a save that failed, but for those that the directory's checkpoint
    names: the last step of a commit may have been what failed."""
    try:
        with open(metadata_path(directory, None), "rb") as file:
            wanted = named_files(pickle.load(file))
    except FileNotFoundError:
        wanted = set()
    except Exception as error:  # nothing may go while nobody knows what is needed
        log.warning("stillframe: files of a failed save stay in %s: %s", directory, error)
        return
    _remove(path for path in paths if os.path.basename(path) not in wanted)


def remove_if_empty(directory: str) -> None:
    """What a save that failed has made, or other ranks of it."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _remove(paths: Iterable[str]) -> None:
    for error in steps.take_each([steps.unlink(path) for path in paths]):
        log.warning(
            "stillframe: %s is not needed and could not be removed: %s", error.filename, error
        )
