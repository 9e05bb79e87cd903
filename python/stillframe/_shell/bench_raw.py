"""Measurements without stillframe: what memory and a disk can do at best.

The scripts in benchmarks/ use this module in processes without torch, so it imports nothing of the
package.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CALL_BYTES = 4 << 20  # bytes of one write or read call; larger calls gain nothing
PAGE_BYTES = mmap.PAGESIZE

# Types of file systems with files in memory, and with files on other machines.
MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK_NAMES = (
    "9p afs beegfs ceph cifs coda glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs pvfs2 smb3 smbfs"
    " virtiofs weka wekafs"
)
NETWORK = frozenset(_NETWORK_NAMES.split())


def is_network(file_system: str) -> bool:
    """Return whether a file system of this type may have its files on another machine."""
    return file_system in NETWORK or file_system.split(".")[0] in ("fuse", "fuseblk")


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds `path`, such as "ext4"."""
    return mount_of(path)[0]


def mount_of(path: Path) -> tuple[str, str, str]:
    """Return (type, source, options) of the mount that holds `path`. Type and source are "unknown"
    if /proc cannot be read."""
    mount = ("unknown", "unknown", "")
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return mount
    real = str(path.resolve())
    best = (False, -1)  # (has the device of the path, length of the mount point)
    for line in lines:
        # id, parent, device, root, mount point, options, ... - type, source, ...
        before, _, after = line.partition(" - ")
        fields, fields_after = before.split(), after.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        score = (fields[2] == f"{os.major(device)}:{os.minor(device)}", len(point))
        if inside and score >= best:  # a later mount hides an earlier one on the same point
            best, mount = score, (fields_after[0], fields_after[1], fields[5])
    return mount


def available_memory_bytes() -> int:
    """Return how many bytes of memory the system and the cgroup let this process still take."""
    free = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:  # the line of cgroup v2
                node = Path("/sys/fs/cgroup") / group.lstrip("/")
                limit = (node / "memory.max").read_text().strip()
                if limit != "max":
                    free = min(free, int(limit) - int((node / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no cgroup, or no limit
    return max(free, 0)


class Others:
    """The share of the machine that other processes take, from the object's creation on. Only user
    time and stolen time count, because the kernel's threads may work for this process."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before = self._seconds()

    def _seconds(self) -> float:
        """Return the CPU seconds that others have used since the system started; 0 if unknown."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
            everyone = sum(int(fields[i]) for i in (1, 2, 8))  # user, nice, steal
        except (OSError, ValueError, IndexError):
            return 0.0
        return everyone / os.sysconf("SC_CLK_TCK") - self._own_seconds()

    def _own_seconds(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime

    def share(self) -> float:
        """Return 0 for a quiet machine (or if /proc cannot be read), and 1 if others keep every
        core busy."""
        core_seconds = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        used = (self._seconds() - self._before) / max(core_seconds, 1e-9)  # never divides by 0
        return min(max(used, 0.0), 1.0)


@contextlib.contextmanager
def open_status_line(*, plain_lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text as the status line on stderr, if stderr is a terminal.

    Args:
        plain_lines: Print each text on a line of its own if stderr is no terminal.
    """
    stream = sys.stderr
    terminal = stream is not None and stream.isatty()

    def write_and_flush(text: str) -> None:
        stream.write(text)
        stream.flush()

    def show(text: str) -> None:
        if terminal:
            write_and_flush(f"\r\x1b[K{text}")
        elif plain_lines:
            write_and_flush(f"{text}\n")

    try:
        yield show
    finally:
        if terminal:
            write_and_flush("\r\x1b[K")


def _raise_keyboard_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def remove_directory_afterwards(directory: Path) -> Iterator[Path]:
    """Remove the directory at the end of the block, even if Ctrl-C or SIGTERM ends it."""
    on_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
    previous = signal.signal(signal.SIGTERM, _raise_keyboard_interrupt) if on_main else None
    try:
        yield directory
    finally:
        # Ignore Ctrl-C, which would leave gigabytes behind.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if on_main else None
        shutil.rmtree(directory, ignore_errors=True)
        if on_main:
            signal.signal(signal.SIGINT, handler)
            signal.signal(signal.SIGTERM, previous)


def make_buffer(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory whose bytes do not compress; `nbytes` is a multiple of a page.

    Make it as long as the file that is written from it. A shorter buffer would be in the CPU's
    cache.
    """
    buffer = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    pattern = os.urandom(min(nbytes, 8 << 20))
    for off in range(0, nbytes, len(pattern)):
        buffer[off : off + len(pattern)] = pattern[: nbytes - off]
    return buffer


def measure_copy_seconds(source: mmap.mmap, target: mmap.mmap, nr_threads: int = 1) -> float:
    """Return the seconds that a memcpy of `source` to `target` takes with `nr_threads` threads."""
    from_, to = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (source, target))
    part = (len(source) + nr_threads - 1) // nr_threads  # bytes for each thread, rounded up

    def copy(off: int) -> None:  # ctypes releases the interpreter lock
        ctypes.memmove(to + off, from_ + off, min(part, len(source) - off))

    helpers = [threading.Thread(target=copy, args=(n * part,)) for n in range(1, nr_threads)]
    start = time.perf_counter()
    for thread in helpers:
        thread.start()
    copy(0)  # the first part, on this thread
    for thread in helpers:
        thread.join()
    return time.perf_counter() - start


def measure_write_seconds(
    path: Path, source: mmap.mmap, *, direct: bool | None = None, nbytes: int | None = None
) -> tuple[float, bool]:
    """Write `source` to a new file and sync it. The file stays.

    Args:
        direct: Bypass the page cache (O_DIRECT). None does so if the file system has O_DIRECT.
        nbytes: The length of the file, by default that of `source`. A shorter source is repeated.

    Returns:
        The seconds without open and close, and whether the page cache was bypassed.

    Raises:
        OSError: The file cannot be written. EINVAL or EOPNOTSUPP: `direct` is True, and the file
            system has no O_DIRECT.
    """
    length = len(source) if nbytes is None else nbytes

    def write(direct_flag: int) -> float:
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | direct_flag
        with _opened(path, flags) as fd, memoryview(source) as view:
            start = time.perf_counter()
            if direct_flag:
                _reserve_disk_space(fd, length)
            done = 0
            while done < length:
                at = done % len(source)
                nbytes = min(CALL_BYTES, length - done)
                done += os.pwrite(fd, view[at : at + nbytes], done)
            if direct_flag:
                os.fdatasync(fd)
            else:
                os.fsync(fd)
            return time.perf_counter() - start

    if direct is None:
        return _measure_direct_if_possible(write)
    return write(os.O_DIRECT if direct else 0), direct


def measure_read_seconds(path: Path, target: mmap.mmap) -> tuple[float, bool]:
    """Read a file into `target`, which has the same length.

    Returns:
        The seconds, and whether the page cache was bypassed.
    """

    def read(direct_flag: int) -> float:
        with _opened(path, os.O_RDONLY | direct_flag) as fd, memoryview(target) as view:
            if not direct_flag:  # drop the file from the page cache
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            done = 0
            while done < len(target):
                got = os.preadv(fd, [view[done : done + CALL_BYTES]], done)
                if got == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written", str(path))
                done += got
            return time.perf_counter() - start

    return _measure_direct_if_possible(read)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _measure_direct_if_possible(measure: Callable[[int], float]) -> tuple[float, bool]:
    """Return `measure(O_DIRECT)` and True, or `measure(0)` and False if the file system has no
    O_DIRECT."""
    try:
        return measure(os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
            raise
    return measure(0), False


def forget(path: Path) -> None:
    """Ask the kernel to drop a file from the page cache, so that it is read from the disk."""
    with _opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)  # pages that are not on the disk yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _reserve_disk_space(fd: int, nbytes: int) -> None:
    """Reserve disk space with fallocate(2), as a save does. Ignore errors."""
    # posix_fallocate would write zeros if the file system has no fallocate.
    libc = ctypes.CDLL(None)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.fallocate(fd, 0, 0, nbytes)
