"""What do the CUDA driver's calls and copies cost by themselves? Measured without stillframe.

    small spans    4,096 x 64 B: one batch, rows in one batch, rows one by one, spans one by one
    tensors        1,200 and 20,000 x 4 KiB: batches and single copies
    large          16 MiB copies in batches of 1, 4 and 16: GB/s
    queue          how many operations wait for a sleeping kernel before a call takes 1 ms
    register       16 MiB, 128 MiB and 1 GiB during a loop of launches: the loop's longest gap

If a figure cannot be measured, its error takes its place, and the others are still measured. The
script needs torch with a CUDA device, for the context, memory and kernels. `--rehearse` runs it
without one, over the tests' fake driver.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
FAKE_DEVICE = 1 << 54  # the fake driver takes an address with this bit for device memory


# The driver's structures: CUmemLocation, CUmemcpyAttributes, CUmemcpy3DOperand (of a pointer),
# CUDA_MEMCPY3D_BATCH_OP and CUDA_MEMCPY2D, with shorter names of their fields.
class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_int),
        ("src_hint", Location),
        ("dst_hint", Location),
        ("flags", ctypes.c_uint),
    ]


class Operand(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("ptr", ctypes.c_uint64),
        ("row_len", ctypes.c_size_t),
        ("layer_height", ctypes.c_size_t),
        ("hint", Location),
    ]


class Copy3D(ctypes.Structure):
    _fields_ = [
        ("src", Operand),
        ("dst", Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


class Copy2D(ctypes.Structure):
    _fields_ = [
        *[(f"src_{name}", ctypes.c_size_t) for name in ("x", "y")],
        ("src_type", ctypes.c_int),
        *[(f"src_{name}", ctypes.c_uint64) for name in ("host", "device", "array", "pitch")],
        *[(f"dst_{name}", ctypes.c_size_t) for name in ("x", "y")],
        ("dst_type", ctypes.c_int),
        *[(f"dst_{name}", ctypes.c_uint64) for name in ("host", "device", "array", "pitch")],
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class Driver:
    """The CUDA driver, with a stream, pinned host memory and device memory to copy between."""

    def __init__(self, rehearse: bool) -> None:
        import torch

        self.torch, self.rehearse = torch, rehearse
        name = str(ROOT / "build" / "libfake_cuda.so") if rehearse else "libcuda.so.1"
        self.cuda = ctypes.CDLL(name)
        if rehearse:
            context = ctypes.c_void_p()
            self.call("cuInit", 0)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
            self.call("cuCtxPushCurrent_v2", context)
        else:
            torch.zeros(1, device="cuda")  # creates the context
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)  # CU_STREAM_NON_BLOCKING
        self.stream = stream
        self.host_bytes = (1 if rehearse else 1024) * MIB
        host = ctypes.c_void_p()
        nbytes, portable = ctypes.c_size_t(self.host_bytes), 1  # CU_MEMHOSTALLOC_PORTABLE
        self.call("cuMemHostAlloc", ctypes.byref(host), nbytes, portable)
        self.host = host.value or 0
        device = "cpu" if rehearse else "cuda"
        # In a rehearsal a bit of the address makes host memory the fake driver's device memory.
        self.memory = torch.zeros(self.host_bytes, dtype=torch.uint8, device=device)
        self.device = self.memory.data_ptr() | (FAKE_DEVICE if rehearse else 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; raise RuntimeError if it fails."""
        code = getattr(self.cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: {code}")

    def finish(self) -> None:
        """Wait for the stream."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 2)  # CU_EVENT_DISABLE_TIMING
        self.call("cuEventRecord", event, self.stream)
        while self.cuda.cuEventQuery(event) == 600:  # CUDA_ERROR_NOT_READY
            pass
        self.call("cuEventDestroy_v2", event)

    def sleep(self, seconds: float) -> None:
        """Keep the stream busy with a kernel that does nothing; later work waits for it."""
        if self.rehearse:
            return
        torch = self.torch
        stream = torch.cuda.ExternalStream(self.stream.value)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * 1.5e9))  # in cycles, of a clock of 1.5 GHz

    # ---- ways to copy ----

    def batch(self, spans: list[tuple[int, int, int]]) -> None:
        """Copy spans of (to, from, length) with one cuMemcpyBatchAsync."""
        nr = len(spans)
        # Three arrays of `nr` numbers: targets, sources and lengths.
        arrays = [(ctypes.c_uint64 * nr)(*column) for column in zip(*spans, strict=True)]
        # 1: in stream order; 1: preferably at the same time as kernels.
        attributes = Attributes(order=1, flags=1)
        first_copy = ctypes.c_size_t(0)  # the attributes hold from this copy on
        self.call(
            "cuMemcpyBatchAsync_v2",
            *arrays,
            ctypes.c_size_t(nr),
            ctypes.byref(attributes),
            ctypes.byref(first_copy),
            ctypes.c_size_t(1),  # the number of attributes
            self.stream,
        )

    def single(self, spans: list[tuple[int, int, int]]) -> None:
        """Copy spans of (to, from, length) with one call each."""
        copy, stream = self.cuda.cuMemcpyDtoHAsync_v2, self.stream
        for to, source, length in spans:
            copy(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(length), stream)

    def rows_batch(self, nr: int, rows: int) -> None:
        """Make `nr` copies of `rows` rows of 64 bytes with one call.

        The rows begin 128 bytes from each other on the device, and 80 bytes on the host.
        """
        copies = (Copy3D * nr)()
        for i, copy in enumerate(copies):
            # Type 1: a pointer.
            copy.src = Operand(type=1, ptr=self.device + i * rows * 128, row_len=128)
            copy.dst = Operand(type=1, ptr=self.host + i * rows * 80, row_len=80)
            copy.width, copy.height, copy.depth = 64, rows, 1
            copy.order, copy.flags = 1, 1  # in stream order; if possible during kernels
        self.call(
            "cuMemcpy3DBatchAsync_v2", ctypes.c_size_t(nr), copies, ctypes.c_uint64(0), self.stream
        )

    def rows_single(self, nr: int, rows: int) -> None:
        """Make the copies of `rows_batch` with one call each."""
        # Memory type 1 is host memory, 2 is device memory.
        copy = Copy2D(src_type=2, src_pitch=128, dst_type=1, dst_pitch=80, width=64, height=rows)
        for i in range(nr):
            copy.src_device = self.device + i * rows * 128
            copy.dst_host = self.host + i * rows * 80
            self.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self.stream)


def timed(driver: Driver, work: Callable[[], None]) -> dict[str, float]:
    """Return the least of five times: of the calls alone, and until the device has finished."""
    best = {"calls_s": float("inf"), "all_s": float("inf")}
    for _ in range(5):
        driver.finish()
        start = time.perf_counter()
        work()
        called = time.perf_counter()
        driver.finish()
        best["calls_s"] = min(best["calls_s"], called - start)
        best["all_s"] = min(best["all_s"], time.perf_counter() - start)
    return best


def spans(driver: Driver, nr: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """Return at most `nr` copies (to, from, length), whose sources begin at multiples of `stride`.

    A rehearsal has less memory, and so fewer copies.
    """
    nr = min(nr, driver.host_bytes // stride)
    return [(driver.host + i * length, driver.device + i * stride, length) for i in range(nr)]


def small_spans(driver: Driver) -> dict[str, Any]:
    """Copy about 4,000 spans of 64 bytes in five ways; "1,200 x 3" is 1,200 copies of 3 rows."""
    copies = spans(driver, 4096, 64, 128)
    return {
        "batch": timed(driver, lambda: driver.batch(copies)),
        "rows, 1,200 x 3, one batch": timed(driver, lambda: driver.rows_batch(1200, 3)),
        "rows, 1,200 x 3, one by one": timed(driver, lambda: driver.rows_single(1200, 3)),
        "rows, 1 x 4,096": timed(driver, lambda: driver.rows_single(1, 4096)),
        "one by one": timed(driver, lambda: driver.single(copies)),
    }


def tensors(driver: Driver) -> dict[str, Any]:
    """Time copies of 4 KiB, 512 with each call and one with each call."""
    found: dict[str, Any] = {}
    for nr in (1200, 20_000):
        copies = spans(driver, nr, 4096, 4096)

        # The default binds the copies of this iteration.
        def in_batches(copies: list[tuple[int, int, int]] = copies) -> None:
            for at in range(0, len(copies), 512):
                driver.batch(copies[at : at + 512])

        found[f"{nr} x 4 KiB, batches of 512"] = timed(driver, in_batches)
        found[f"{nr} x 4 KiB, one by one"] = timed(driver, lambda c=copies: driver.single(c))
    return found


def large(driver: Driver) -> dict[str, Any]:
    """Time copies of 16 MiB, of which each call makes 1, 4 or 16."""
    found: dict[str, Any] = {}
    length = min(16 * MIB, driver.host_bytes // 4)
    copies = spans(driver, 64, length, length)
    total = length * len(copies)
    for size in (1, 4, 16):
        copy = driver.batch if size > 1 else driver.single

        # The defaults bind the values of this iteration.
        def in_batches(size: int = size, copy: Callable[..., None] = copy) -> None:
            for at in range(0, len(copies), size):
                copy(copies[at : at + size])

        took = timed(driver, in_batches)
        found[f"batches of {size}"] = {**took, "bytes_per_s": total / took["all_s"]}
    return found


def queue(driver: Driver) -> dict[str, Any]:
    """Queue copies after a kernel of half a second until one call takes a millisecond.

    It stops after 5,000 copies.
    """
    driver.finish()
    driver.sleep(0.5)
    slowest, taken = 0.0, 0
    while taken < 5000:
        start = time.perf_counter()
        driver.single([(driver.host, driver.device, 64)])
        took = time.perf_counter() - start
        slowest = max(slowest, took)
        taken += 1
        if took > 1e-3:
            break
    driver.finish()
    return {"operations": taken, "slowest_call_s": slowest}


def register(driver: Driver) -> dict[str, Any]:
    """Measure the longest gap of a thread that launches kernels while another registers memory."""
    import mmap

    torch = driver.torch
    found: dict[str, Any] = {}
    sizes_mib = (16, 128) if driver.rehearse else (16, 128, 1024)
    for size in sizes_mib:
        nbytes = MIB if driver.rehearse else size * MIB
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 1, nbytes)
        gaps, stop = [], threading.Event()  # seconds between two launches
        value = torch.zeros(16, device="cpu" if driver.rehearse else "cuda")

        # The defaults bind this iteration's values; the thread runs until `stop` is set.
        def launch(
            gaps: list[float] = gaps, stop: threading.Event = stop, value: Any = value
        ) -> None:
            last = time.perf_counter()
            while not stop.is_set():
                value.add_(1)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        thread = threading.Thread(target=launch)
        thread.start()
        time.sleep(0.05)
        before = max(gaps, default=0.0)
        start = time.perf_counter()
        flags = ctypes.c_uint(1)  # CU_MEMHOSTREGISTER_PORTABLE
        driver.call(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags
        )
        took = time.perf_counter() - start
        stop.set()
        thread.join()
        driver.call("cuMemHostUnregister", ctypes.c_void_p(address))
        found[f"{size} MiB"] = {
            "register_s": took,
            "longest_gap_s": max(gaps),
            "longest_gap_before_s": before,
        }
    return found


MEASURES = {
    "small spans": small_spans,
    "tensors": tensors,
    "large": large,
    "queue": queue,
    "register": register,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu_driver.json")
    parser.add_argument("--rehearse", action="store_true", help="over the tests' driver")
    options = parser.parse_args()
    if not options.rehearse:
        import torch

        if torch.version.cuda is None or not torch.cuda.is_available():
            print("benchmarks/gpu_driver.py skips: torch finds no CUDA device")
            return 0
    driver = Driver(options.rehearse)
    found: dict[str, Any] = {}
    failed = 0
    for name, measure in MEASURES.items():
        try:
            found[name] = measure(driver)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            failed += 1
        print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
        options.json.write_text(json.dumps(found, indent=1))
    os.sync()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
