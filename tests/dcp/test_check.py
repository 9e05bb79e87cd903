"""Damage in a checkpoint's items that `stillframe verify` and `Reader` report."""

import errno
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fix_checkpoints import saving
from fix_dcp import equal, loaded
from stillframe import _core
from stillframe._dcp import check
from stillframe._dcp.check import damage_of_item
from stillframe._shell import contents
from stillframe.dcp import Reader
from stillframe.errors import CorruptCheckpointError
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

VALUES = list(range(5))


pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


@pytest.fixture
def wrong(tmp_path: Path) -> Iterator[Callable[[bytes], str | None]]:
    """Return the damage that is reported for an item between two others."""
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)

    def check_item(item: bytes) -> str | None:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"before" + item + b"behind", 0)
        return damage_of_item(fd, len(b"before"), len(item))

    yield check_item
    os.close(fd)


def archive(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def packed(*records: tuple[str, bytes], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as file:
        for name, data in records:
            file.writestr(name, data)
    return buffer.getvalue()


def test_item_that_passes_the_check_loads_as_it_was_saved(wrong):
    whole = archive(torch.tensor(VALUES))
    assert wrong(whole) is None
    refused = 0
    for offset, bit in ((offset, bit) for offset in range(len(whole)) for bit in (0, 4, 7)):
        item = bytearray(whole)
        item[offset] ^= 1 << bit
        if wrong(bytes(item)) is None:
            assert torch.load(io.BytesIO(item), weights_only=True).tolist() == VALUES, offset
        else:
            refused += 1
    assert refused > len(whole)


def test_item_without_crcs_passes_the_check(wrong):
    with saving(compute_crc32=False):
        assert wrong(archive(torch.tensor(VALUES))) is None


def test_compressed_record_is_not_reported_as_whole(wrong):
    records = ("a/data.pkl", bytes(1000)), ("a/version", b"3")
    deflated = packed(*records, compression=zipfile.ZIP_DEFLATED)
    assert wrong(deflated) == "it has compressed records, whose bytes cannot be checked"


def test_record_that_is_longer_than_its_item_is_named(wrong):
    stored = bytearray(packed(("a/data.pkl", bytes(1000))))
    directory = stored.index(b"PK\1\2")
    stored[directory + 16 : directory + 28] = b"\0\0\0\0" + 2 * (2000).to_bytes(4, "little")
    assert wrong(bytes(stored)) == "a/data.pkl: it reaches beyond the data of the file"


def test_bytes_after_the_end_of_an_item_are_damage(wrong):
    assert wrong(archive(torch.tensor(VALUES)) + b"12345") == "5 bytes follow its end"


def test_item_in_the_legacy_format_is_reported_to_have_no_checksums(wrong):
    buffer = io.BytesIO()
    torch.save(torch.tensor(VALUES), buffer, _use_new_zipfile_serialization=False)
    assert wrong(buffer.getvalue()) == "it is in torch's legacy format, which has no checksums"


def test_item_of_negative_length_is_refused(tmp_path):
    with open(tmp_path / "data", "w+b") as file:
        why = "it cannot have -9 bytes from byte 3 on"
        assert damage_of_item(file.fileno(), 3, -9) == why
        assert damage_of_item(file.fileno(), -3, 9) == "it cannot have 9 bytes from byte -3 on"


def test_every_byte_of_a_record_is_compared_with_and_without_threads(wrong):
    item = bytearray(archive(torch.arange(3000)))
    for threads in (False, True):
        _core._set_limits(reader_chunk_bytes=4096, ahead_bytes=1 if threads else 1 << 40)
        try:
            assert wrong(bytes(item)) is None
            for number in (0, 1500, 2999):
                offset = item.index(torch.arange(3000).numpy().tobytes()) + number * 8
                item[offset] ^= 1
                assert wrong(bytes(item)) == "archive/data/0: its bytes do not match their CRC"
                item[offset] ^= 1
        finally:
            _core._set_limits()


class Turned(StreamTransformExtension):
    """An extension of DCP that inverts every bit of an item."""

    @staticmethod
    def registry_name() -> str:
        return "stream.turned"

    @staticmethod
    def from_descriptor(version: str) -> "Turned":
        return Turned()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def write(self, data: Any) -> int:
                return output.write(bytes(each ^ 255 for each in bytes(data)))

        return Writer()

    def transform_from(self, data: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(each ^ 255 for each in data.read()))


def test_items_of_an_extension_are_counted_as_unchecked(tmp_path):
    state = {"a": torch.tensor(VALUES), "b": torch.zeros(3)}
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Turned()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = check.check(os.fspath(tmp_path), contents.read)
    assert (found.nr_items, found.nr_unchecked, found.bad) == (2, 2, [])
    reader = Reader(tmp_path)
    reader.transforms.extension_registry.register(Turned)
    assert equal(loaded(state, tmp_path, storage_reader=reader), state)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save({"a": torch.tensor(VALUES), "b": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def bad(directory: Path) -> list[tuple[str, str]]:
    found = check.check(os.fspath(directory), contents.read)
    assert (found.nr_items, found.nr_unchecked) == (2, 0)
    return found.bad


def test_unreadable_file_is_reported_with_its_items(saved, monkeypatch):
    def failing(*_: Any, **__: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(_core, "check", failing)
        assert bad(saved) == [
            ("__0_0.distcp", "Input/output error: it holds a from (0,) and 1 more")
        ]
    (saved / "__0_0.distcp").unlink()
    (saved / "__0_0.distcp").symlink_to("__0_0.distcp")
    says = f"{os.strerror(errno.ELOOP)}: it holds a from (0,) and 1 more"
    assert bad(saved) == [("__0_0.distcp", says)]


DAMAGES = [
    "no records",
    "an entry without an offset",
    "an offset of nothing",
    "nothing",
    "a number",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_nonsensical_metadata_counts_as_damaged(saved, damage):
    metadata = Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo("__0_0.distcp", 0, 9)})
    if damage == "no records":
        del metadata.storage_data
    elif damage == "an entry without an offset":
        metadata.storage_data[MetadataIndex("a")].offset = "here"
    elif damage == "an offset of nothing":
        (index,) = metadata.storage_data
        object.__setattr__(index, "offset", ValueError())  # constructed without arguments
    data = {"nothing": b".", "a number": pickle.dumps(3)}.get(damage) or pickle.dumps(metadata)
    (saved / ".metadata").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="metadata cannot be read"):
        check.check(os.fspath(saved), contents.read)


def test_shard_of_a_tensor_is_named_with_its_offset(saved):
    index = MetadataIndex("w", torch.Size([4, 0]), 1)
    metadata = Metadata({}, storage_data={index: _StorageInfo("gone.distcp", 0, 9)})
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    found = check.check(os.fspath(saved), contents.read)
    assert found.bad == [("gone.distcp", "the file is missing: it holds w from (4, 0)")]


def test_a_reader_that_finds_damage_leaves_no_file_open(saved):
    (data,) = saved.glob("*.distcp")
    data.write_bytes(data.read_bytes().replace(b"PK\3\4", b"PK\3\5"))
    with pytest.raises(CheckpointException, match=r"a is damaged: it is not a torch\.save file"):
        loaded({"a": torch.tensor(VALUES)}, saved, storage_reader=Reader(saved))
