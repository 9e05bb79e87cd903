"""`_core.File`, the file object that `load` gives to torch.load."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stillframe
import torch
from stillframe import _core
from stillframe.testing import Injected, fault, held, slow

NBYTES = 700_001  # several windows of 128 KiB, and an odd length


@contextmanager
def opened(path: Path, nbytes: int = NBYTES) -> Iterator[tuple[_core.File, bytes]]:
    data = random.Random(1).randbytes(nbytes)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield _core.File(fd, nbytes), data
    finally:
        os.close(fd)


def test_any_order_of_calls_behaves_like_a_bytesio(tmp_path):
    random_ = random.Random(2)
    with opened(tmp_path / "f") as (file, data):
        twin = io.BytesIO(data)
        for _ in range(3000):
            size = random_.choice([0, 1, 30, 4096, 32 << 10, 33 << 10, 200_000])
            match random_.randrange(5):
                case 0:
                    whence = random_.randrange(3)
                    at = random_.randrange(NBYTES + 50) - (0, twin.tell(), NBYTES)[whence]
                    assert file.seek(at, whence) == twin.seek(at, whence)
                case 1:
                    assert file.tell() == twin.tell()
                case 2:
                    assert file.read(size) == twin.read(size)
                case _:
                    ours, theirs = bytearray(size), bytearray(size)
                    assert file.readinto(ours) == twin.readinto(theirs)
                    assert ours == theirs
        file.seek(5)
        assert file.read() == data[5:] and file.read() == b"" and file.read(None) == b""


def test_invalid_seek_positions_are_refused(tmp_path):
    with opened(tmp_path / "f", 100) as (file, _):
        for off, whence in [(-1, 0), (-101, 2), (0, 3), (0, -1), ((1 << 63) - 1, 2)]:
            with pytest.raises(ValueError, match="offset"):
                file.seek(off, whence)
        with pytest.raises((TypeError, BufferError)):
            file.readinto(b"read-only")
        with pytest.raises(OverflowError):
            file.seek(1 << 70)
        assert file.tell() == 0


@pytest.mark.parametrize("size", [10, 300_000])
def test_file_truncated_during_a_read_is_damaged(tmp_path, size):
    with opened(tmp_path / "f") as (file, _):
        os.truncate(tmp_path / "f", NBYTES - 5)
        file.seek(-size, 2)
        with pytest.raises(stillframe.CorruptCheckpointError, match="shorter"):
            file.read(size)


@pytest.mark.parametrize("size", [10, 300_000])
def test_an_error_of_the_disk_is_an_oserror(tmp_path, size):
    with opened(tmp_path / "f") as (file, data):
        with fault("pread", err=errno.EIO), pytest.raises(OSError, match="Input/output") as caught:
            file.read(size)
        assert caught.value.errno == errno.EIO
        with fault("pread", err=errno.EINTR), fault("madvise", err=errno.EINVAL, sticky=True):
            assert file.read(size) == data[:size]
        with fault("pread", limit=3, sticky=True) if size < 100 else fault("pread", limit="half"):
            assert file.read(size) == data[size : 2 * size]


def test_a_storage_longer_than_a_slice_is_read_whole(tmp_path):
    big = torch.arange(70 << 18, dtype=torch.int32)  # 70 MiB
    torch.save({"big": big, "small": torch.ones(3)}, tmp_path / "a.pt")
    loaded = stillframe.load(tmp_path / "a.pt")
    assert torch.equal(loaded["big"], big) and torch.equal(loaded["small"], torch.ones(3))


def test_other_threads_run_while_a_window_is_read(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    order: list[object] = []
    started = threading.Event()

    def other() -> None:
        assert started.wait(60)
        order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with open(tmp_path / "a", "rb") as opened, slow("pread", 0.3):
        file = _core.File(opened.fileno(), 1000)
        started.set()
        # a call from C, so that no line of Python runs after the read
        order.extend(map(file.read, [10]))
    thread.join()
    assert order == ["other", bytes(10)]


def test_reads_past_the_end_return_nothing_and_free_their_buffers(tmp_path):
    path = tmp_path / "ten"
    path.write_bytes(b"0123456789")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        file = _core.File(descriptor, 10)
        assert file.seek(20) == 20
        assert (file.read(5), file.read(), file.tell()) == (b"", b"", 20)
        file.seek(6)
        buffer = bytearray(8)
        assert file.readinto(buffer) == 4
        buffer.append(0)  # raises BufferError if something still refers to its bytes
        assert buffer == b"6789\0\0\0\0\0"
    finally:
        os.close(descriptor)


def test_partly_read_window_is_discarded_after_an_error(tmp_path):
    with opened(tmp_path / "f") as (file, data):
        assert file.read(10) == data[:10]
        file.seek(300_000)
        with (
            fault("pread", limit=1000),
            fault("pread", nth=2, err=errno.EIO),
            pytest.raises(OSError, match="Input/output"),
        ):
            file.read(10)  # by now the window has a thousand bytes from there
        file.seek(0)
        assert file.read(10) == data[:10]


class Interrupted(Exception):
    pass


def test_ctrl_c_ends_a_long_read_at_its_next_slice(tmp_path):
    nbytes = (64 << 20) + (1 << 20)  # one slice, and part of the next
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", nbytes)
    to = torch.empty(nbytes, dtype=torch.uint8).numpy()

    def raises(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, raises)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    old_fd = signal.set_wakeup_fd(wakes)
    main = threading.get_ident()

    def interrupt(under: contextlib.ExitStack, injected: Injected) -> None:
        while injected.calls("pread") == 0:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR2)
        os.read(woken, 1)  # returns when Python has seen the signal
        under.close()

    try:
        with open(tmp_path / "f", "rb") as opened_file, contextlib.ExitStack() as under:
            file = _core.File(opened_file.fileno(), nbytes)
            injected = under.enter_context(held("pread", sticky=False))
            thread = threading.Thread(target=interrupt, args=(under, injected))
            thread.start()
            with pytest.raises(Interrupted):
                file.readinto(to)
            thread.join()
            assert file.tell() == 64 << 20
    finally:
        signal.set_wakeup_fd(old_fd)
        signal.signal(signal.SIGUSR2, before)
        os.close(woken)
        os.close(wakes)
