"""Archives that torch.load reads although torch.save does not write such: with a comment, with
bytes after the end, with compressed records. The tests compare with torch.load."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_checkpoints import by_path, by_stillframe
from stillframe import CorruptCheckpointError
from stillframe._shell import inspect, verify

WRITERS = [by_path, by_stillframe]
MOST_TRAILING = 69_562  # bytes; see SFR__UNZIP_END_REACH


def state() -> dict[str, Any]:
    return {"a": torch.arange(30_000.0), "b": [torch.arange(7)], "epoch": 3}


def assert_whole(path: Path) -> None:
    """Check that every way of loading returns the state."""
    for loaded in (stillframe.load(path), stillframe.load(path, verify=False)):
        assert torch.equal(loaded["a"], state()["a"]) and loaded["epoch"] == 3
    into = {"a": torch.zeros(30_000), "b": [torch.zeros(7, dtype=torch.int64)], "epoch": 0}
    stillframe.load(path, into=into)
    assert torch.equal(into["a"], state()["a"]) and torch.equal(into["b"][0], torch.arange(7))
    assert into["epoch"] == 3


def torch_reads(content: bytes) -> bool:
    try:
        return bool(torch.equal(torch.load(io.BytesIO(content))["a"], state()["a"]))
    except RuntimeError:
        return False


def printed(path: Path) -> str:
    return "\n".join(verify._format_finding_lines(verify.verify_file(str(path))))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("nr_trailing", [1, 22, 4096, 65_535, MOST_TRAILING])
def test_bytes_after_the_archive_are_reported_by_verify(write, nr_trailing, tmp_path):
    path = tmp_path / "x.pt"
    write(state(), path)
    content = path.read_bytes()
    for filling in (b"\0", b"x"):
        path.write_bytes(content + filling * nr_trailing)
        assert torch_reads(path.read_bytes())
        assert_whole(path)
        assert torch.equal(stillframe.load(path, mmap=True)["a"], state()["a"])
        assert verify.verify_file(str(path)).status == verify.GOOD
        assert f"{nr_trailing} bytes after the archive, not checked" in printed(path)
        assert inspect.examine(str(path)).status == inspect.GOOD


@pytest.mark.parametrize("write", WRITERS)
def test_too_many_bytes_after_the_archive_are_refused(write, tmp_path):
    path = tmp_path / "x.pt"
    write(state(), path)
    path.write_bytes(path.read_bytes() + b"\0" * (MOST_TRAILING + 1))
    assert not torch_reads(path.read_bytes())
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        stillframe.load(path)
    assert verify.verify_file(str(path)).status == verify.DAMAGED


@pytest.mark.parametrize("write", WRITERS)
def test_archive_with_a_comment_is_loaded(write, tmp_path):
    path = tmp_path / "x.pt"
    write(state(), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"made on a Monday"
    assert torch_reads(path.read_bytes())
    assert_whole(path)
    assert "16 bytes after the archive, not checked" in printed(path)
    for cut in range(1, 17):  # a truncated file, although torch does not notice
        path.write_bytes(path.read_bytes()[:-1])
        assert verify.verify_file(str(path)).status == verify.DAMAGED, cut
        with pytest.raises(CorruptCheckpointError, match="end record is damaged"):
            stillframe.load(path)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("all_of_it", [True, False])
def test_compressed_archive_is_loaded_and_verify_says_what_it_did_not_check(
    write, all_of_it, tmp_path
):
    write(state(), tmp_path / "a.pt")
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(path, "w") as new:
        names = old.namelist()
        for name in names:
            deflated = all_of_it or name.endswith("data/0")
            kind = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
            new.writestr(name, old.read(name), kind)
    assert torch_reads(path.read_bytes())
    assert_whole(path)
    with pytest.raises(ValueError, match="another program packed it"):
        stillframe.load(path, mmap=True)
    number = f"{len(names)} records" if all_of_it else "1 record"
    assert f"{number} compressed, bytes not checked" in printed(path)
    assert "without a checksum" not in printed(path)
    found = inspect.examine(str(path))
    assert (found.status, len(found.tensors)) == (inspect.GOOD, 2)


@pytest.mark.parametrize("kind", ["comment", "padding", "compressed"])
def test_truncated_file_is_damaged_whatever_its_shape(kind, tmp_path):
    path = tmp_path / "x.pt"
    by_path(state(), path)
    if kind == "padding":
        path.write_bytes(path.read_bytes() + bytes(500))
    elif kind == "comment":
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = b"c" * 500
    else:
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.pt", "w", 8) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        path = tmp_path / "y.pt"
    content = path.read_bytes()
    least = 501 if kind == "padding" else 1
    for cut in (least, least + 21, least + 100, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:-cut])
        assert verify.verify_file(str(path)).status == verify.DAMAGED, cut
        assert inspect.examine(str(path)).status != inspect.GOOD, cut
        with pytest.raises(CorruptCheckpointError):
            stillframe.load(path)


def without_a_record(path: Path, new: Path) -> None:
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(new, "w") as archive:
        for name in old.namelist():
            if not name.endswith("/data/1"):
                archive.writestr(name, old.read(name))


def with_a_shorter_record(path: Path, new: Path) -> None:
    """Write a record that is too short, with torch's layout and the right CRC."""
    writer = torch._C.PyTorchFileWriter(str(new))
    with zipfile.ZipFile(path) as old:
        for name in old.namelist():
            record = name.partition("/")[2]
            data = old.read(name)[: 50 if record == "data/1" else None]
            if record not in ("version", ".data/serialization_id"):
                writer.write_record(record, data, len(data))
    writer.write_end_of_file()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_a_record, "data/1: it is missing"),
        (with_a_shorter_record, "data/1: it has 50 bytes of 56"),
    ],
)
def test_record_that_the_pickle_names_must_be_complete(change, reason, tmp_path):
    by_path(state(), tmp_path / "a.pt")
    path = tmp_path / "x.pt"
    change(tmp_path / "a.pt", path)
    found = verify.verify_file(str(path))
    assert (found.status, found.num_bad) == (verify.DAMAGED, 1)
    assert reason in printed(path)
    shown = inspect.examine(str(path))
    assert (shown.status, shown.error) == (inspect.DAMAGED, f"record {reason}")
    assert len(shown.tensors) == 2
    with pytest.raises((CorruptCheckpointError, RuntimeError)):
        stillframe.load(path)
