"""Files made of parts: archives of tensors and bytes, written in place."""

from __future__ import annotations

import errno
import gc
import io
import pickletools
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_graphs import SubTensor
from stillframe import _core
from stillframe._save.engine import is_used
from stillframe._save.parts import Parts, description_of, submit_parts
from stillframe._save.remote import Upload
from stillframe.testing import fault, held, slow
from torch import Tensor

MIB = 1 << 20
BLOCK = MIB


@pytest.fixture
def engine() -> Iterator[stillframe.Engine]:
    with stillframe.Engine(pool_bytes=8 * BLOCK, block_bytes=BLOCK) as engine:
        yield engine


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    made = [
        torch.randn(1000),
        torch.randn(()),
        torch.empty(0, 3),
        torch.randn(2, 3).t(),
        torch.arange(300_000).reshape(1, 1, 2, 3, 50_000),
        torch.tensor([True, False]),
        torch.randn(513, 1025, dtype=torch.float64),
        torch.randn(3, 70_000).bfloat16(),
        torch.randn(255, 256, dtype=torch.complex64),
        torch.randn(1, 65536, 1),
        torch.ones(1, 1, 5).expand(1, 1, 5),
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.zeros(BLOCK, dtype=torch.uint8),
        torch.randn(3 * BLOCK // 4 + 5),
        torch.randint(-9, 9, (7,), dtype=torch.int8),
        *(torch.randn(n) for n in range(1, 40)),
    ]
    # with page-aligned memory and without
    large = torch.arange(2 * BLOCK, dtype=torch.int32)
    made += [
        large.clone(),
        large[1:].clone(),
        torch.frombuffer(bytearray(BLOCK + 4099), dtype=torch.uint8),
    ]
    return made


def written(engine: stillframe.Engine, items: list[Any], path: Path) -> list[bytes]:
    """Write a file made of the items, and return each item's bytes in it."""
    parts = Parts()
    ranges = parts.append([description_of(i) if isinstance(i, Tensor) else i for i in items])
    length = parts.nbytes
    assert parts.nbytes == sum(nbytes for _, nbytes in ranges)
    report = submit_parts(engine, parts, path, owners=items).result()
    assert report is not None
    data = path.read_bytes()
    assert report.nbytes == len(data) == length
    return [data[offset : offset + nbytes] for offset, nbytes in ranges]


def test_each_tensor_is_an_archive_as_torch_saves_it(engine, tmp_path):
    made = tensors()
    for tensor, archive in zip(made, written(engine, made, tmp_path / "a"), strict=True):
        loaded = torch.load(io.BytesIO(archive), weights_only=True)
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert loaded.equal(tensor)
        buffer = io.BytesIO()
        torch.save(tensor.clone(), buffer)
        ours, theirs = (zipfile.ZipFile(io.BytesIO(each)) for each in (archive, buffer.getvalue()))
        assert ours.testzip() is None
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name), name


@pytest.mark.parametrize("bits", [7, 8, 15, 16, 31, 32, 39, 40, 55, 56, 62])
def test_an_integer_of_any_length_is_pickled_as_python_does(bits, engine, tmp_path):
    numbers = (2**bits - 1, 2**bits, 2**bits + 1)
    memory = torch.zeros(1, dtype=torch.uint8)
    parts = Parts()
    row = ("ByteStorage", numbers[1], numbers, numbers[::-1], memory.data_ptr(), 1)
    parts.append([row])  # larger than any machine's memory, with a single byte after it
    submit_parts(engine, parts, tmp_path / "a", owners=[memory]).result()
    pickled = zipfile.ZipFile(tmp_path / "a").read("archive/data.pkl")
    found = [value for _, value, _ in pickletools.genops(pickled) if isinstance(value, int)]
    large = [value for value in found if value >= 2**bits - 1]
    assert large == [numbers[1], *numbers, *numbers[::-1]]


def test_large_source_is_written_correctly(engine, tmp_path):
    memory = torch.arange(BLOCK)
    large = [memory[1000:], memory[3:], memory[2000:]]
    archives = written(engine, [*large, b"x"], tmp_path / "a")
    begin = 0
    for tensor, archive in zip(large, archives, strict=False):
        at = begin + archive.index(tensor[:999].numpy().tobytes())
        assert (at - tensor.data_ptr()) % 4096 == 0
        begin += len(archive)


def test_a_type_with_a_name_longer_than_any_is_refused():
    for length in (64, 200):
        with pytest.raises(ValueError):
            Parts().append([("F" * length, 1, (1,), (1,), 0, 0)])


def test_item_is_a_zip_file_of_its_own(engine, tmp_path):
    (archive,) = written(engine, [torch.randn(400_000)], tmp_path / "a")
    (tmp_path / "b.zip").write_bytes(archive)
    subprocess.run([sys.executable, "-m", "zipfile", "-t", tmp_path / "b.zip"], check=True)
    with pytest.raises(zipfile.BadZipFile):
        broken = bytearray(archive)
        broken[len(broken) // 2] ^= 1
        zipfile.ZipFile(io.BytesIO(broken)).read("archive/data/0")


@pytest.mark.parametrize("items", [[], [b""], [b"x"], [b"x" * 4096], [b"y" * (BLOCK + 1)]])
def test_a_file_is_as_long_as_its_parts(items, engine, tmp_path):
    assert written(engine, items, tmp_path / "a") == items


def test_link_is_replaced_and_its_target_left_alone(engine, tmp_path):
    other, link = tmp_path / "other", tmp_path / "a"
    other.write_bytes(b"of somebody else")
    link.symlink_to(other)
    assert written(engine, [b"ours"], link) == [b"ours"]
    assert not link.is_symlink() and other.read_bytes() == b"of somebody else"


def test_parts_are_in_the_order_given(engine, tmp_path):
    tensor = torch.randn(2 * BLOCK)
    items = [b"first", tensor, memoryview(b"second"), tensor, bytearray(b"third" * 5000)]
    got = written(engine, items, tmp_path / "a")
    assert got[0::2] == [bytes(each) for each in items[0::2]]
    assert all(torch.load(io.BytesIO(got[i])).equal(tensor) for i in (1, 3))


def test_parts_are_written_even_if_snapshots_fill_the_pool(engine, tmp_path):
    state = [torch.randn(BLOCK // 8) for _ in range(8)] + [torch.randn(BLOCK)]
    with stillframe.snapshot(state, engine=engine) as snap:
        while engine.stats()["leased_bytes"] < 8 * BLOCK:
            state.append(stillframe.snapshot([torch.zeros(10)], engine=engine).tree[0])
        got = written(engine, snap.tree, tmp_path / "a")
        assert all(torch.load(io.BytesIO(a)).equal(t) for a, t in zip(got, state, strict=False))
        del got


def test_large_source_is_written_without_a_copy(engine, tmp_path):
    state = [torch.randn(4 * BLOCK // 4 + i) for i in range(20)]
    engine.warm_up(2 * BLOCK)
    with slow("pwrite", 0.001):
        parts = Parts()
        parts.append([description_of(each) for each in state])
        report = submit_parts(engine, parts, tmp_path / "a", owners=state).result()
    assert report is not None
    assert report.peak_pool_bytes <= 4 * BLOCK  # two for the writers and two ahead
    assert (report.captured_nbytes, report.deferred_nbytes) == (0, 0)


def test_the_sources_live_until_the_save_has_ended(engine, tmp_path):
    tensor = torch.randn(BLOCK)
    wanted = tensor.clone()
    gone = weakref.ref(tensor)
    parts = Parts()
    parts.append([description_of(tensor)])
    with held("pwrite"):
        handle = submit_parts(engine, parts, tmp_path / "a", owners=[tensor])
        del tensor
        gc.collect()
        assert gone() is not None
    handle.result()
    assert torch.load(tmp_path / "a").equal(wanted)
    assert gone() is None


def test_staged_means_that_the_sources_are_written(engine, tmp_path):
    tensor = torch.randn(2 * BLOCK)
    wanted = tensor.clone()
    parts = Parts()
    parts.append([description_of(tensor)])
    with slow("fdatasync", 0.1):
        handle = submit_parts(engine, parts, tmp_path / "a", owners=[tensor])
        handle.wait_staged()
        tensor.zero_()
        handle.result()
    assert torch.load(tmp_path / "a").equal(wanted)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "ftruncate", "rename", "fallocate"])
def test_a_failure_keeps_the_old_file_and_the_engine_usable(call, engine, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    tensor = torch.randn(BLOCK + 1)
    for nth in (1, 4) if call == "pwrite" else (1,):
        parts = Parts()
        parts.append([description_of(tensor), b"x"])
        with fault(call, err=errno.ENOSPC, nth=nth):
            handle = submit_parts(engine, parts, path, owners=[tensor])
            with pytest.raises(stillframe.SaveError) as caught:
                handle.result()
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes() == b"old"
    assert written(engine, [tensor], path)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_cancelled_save_releases_its_sources(engine, tmp_path):
    state = [torch.randn(BLOCK) for _ in range(6)]
    parts = Parts()
    parts.append([description_of(each) for each in state])
    with held("pwrite"):
        handle = submit_parts(engine, parts, tmp_path / "a", owners=state)
        assert handle.cancel()
    with pytest.raises(CancelledError):
        handle.result()
    assert handle.state == "cancelled"
    assert not any(tmp_path.iterdir())


def test_a_field_holds_the_crc_of_an_earlier_source(engine, tmp_path):
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (5, 3 * BLOCK + 7, 0, 99)]
    parts = Parts()
    for source in sources:
        parts.source(source.data_ptr() if len(source) else 0, len(source))
    parts.append([b"."])
    for number in (1, 0, 3, 2, 1):
        parts.crc(number)
    submit_parts(engine, parts, tmp_path / "a", owners=sources).result()
    data = (tmp_path / "a").read_bytes()
    crcs = [zipfile.crc32(source.numpy().tobytes()) for source in sources]
    assert data == b"".join(source.numpy().tobytes() for source in sources) + b"." + b"".join(
        crcs[number].to_bytes(4, "little") for number in (1, 0, 3, 2, 1)
    )


# ---- parts that are sent to a store ----


def streamed(engine: stillframe.Engine, made: list[Tensor]) -> tuple[Any, int]:
    """Begin to send the tensors; return the save and its length."""
    parts = Parts()
    parts.append([description_of(each) for each in made])
    length = parts.nbytes
    upload: Any = Upload(None, "", "")  # the test takes the pieces in its place
    return submit_parts(engine, parts, "s3://bkt/a", owners=made, upload=upload), length


def test_parts_are_sent_in_the_order_of_the_file(engine, tmp_path):
    made = tensors()
    handle, length = streamed(engine, made)
    data = bytearray()
    while len(piece := handle._ticket.next_piece(60)):
        assert piece.offset == len(data)
        data += memoryview(piece)
    del piece
    report = handle.result()
    assert len(data) == report.nbytes == length
    written(engine, made, tmp_path / "a")
    assert data == (tmp_path / "a").read_bytes()


def test_client_never_has_more_pieces_than_it_sends_at_the_same_time(engine):
    """A client keeps parts of 16 MiB, and waits for more of them before it gives one back."""
    most, blocks = 96 << 20, 4 * BLOCK
    handle, length = streamed(engine, [torch.zeros(120 << 20, dtype=torch.uint8)])
    pieces = []
    while sum(map(len, pieces)) < most - blocks:
        pieces.append(handle._ticket.next_piece(60))
    while (piece := handle._ticket.next_piece(0.05)) is not None:
        pieces.append(piece)
    taken = sum(map(len, pieces))
    assert most - blocks <= taken <= most + blocks < length
    while len(pieces[-1]):
        del pieces[:2]  # the first one is short
        pieces.append(handle._ticket.next_piece(60))
        taken += len(pieces[-1])
    assert taken == length
    pieces.clear()
    handle.result()


def test_cancelled_upload_keeps_its_sources_until_every_piece_is_returned(engine):
    tensor = torch.randn(BLOCK)
    gone = weakref.ref(tensor)
    handle, _ = streamed(engine, [tensor])
    del tensor
    piece = handle._ticket.next_piece(60)
    assert handle.cancel()
    with pytest.raises(TimeoutError):
        handle.result(0.05)
    gc.collect()
    assert gone() is not None
    del piece
    with pytest.raises(CancelledError):
        handle.result()
    assert gone() is None


def test_field_of_a_missing_source_is_refused():
    parts = Parts()
    with pytest.raises(ValueError):
        parts.crc(0)
    with pytest.raises(ValueError):
        parts.append([b"x"])


def test_parts_can_be_submitted_once(engine, tmp_path):
    parts = Parts()
    parts.append([b"x"])
    assert not is_used(engine)
    submit_parts(engine, parts, tmp_path / "a", owners=[]).result()
    assert is_used(engine)  # then configure() comes too late
    with pytest.raises(ValueError):
        submit_parts(engine, parts, tmp_path / "b", owners=[])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6)[::2],
        torch.randn(3, 3).to_sparse(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.ones(1).expand(4),
        torch.empty(3, device="meta"),
        torch.randn(3).as_subclass(SubTensor),
    ],
    ids=["strided", "sparse", "conjugated", "float8", "expanded", "meta", "subclass"],
)
def test_tensor_that_needs_torch_save_is_reported(tensor):
    assert description_of(tensor) is None


def test_impossible_shapes_are_refused_and_buffers_released():
    parts = _core.Parts()
    for sizes, strides in (((2, 3), (1,)), ((1,) * 65, (1,) * 65)):
        with pytest.raises(ValueError, match=r"dimensions|strides"):
            parts.append([("FloatStorage", 6, sizes, strides, 64, 24)])
    buffer = bytearray(b"x")
    assert parts.append([buffer]) == [(0, 1)]
    buffer.append(0)  # raises BufferError if something still refers to its bytes
