"""Loads to a device in which a file is damaged, a disk fails, memory is missing or Ctrl-C comes.
Each raises a clear error and leaks nothing, and the next load works."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import stillframe
import torch
from fix_loads import file as file
from fix_loads import living
from fix_loads import nothing_is_left as nothing_is_left
from fix_loads import stream as stream
from stillframe import _load, testing
from stillframe._load import fill, restore

NR, NUMEL = 6, 300_000
HALF_WRITTEN = "half written"
PRODUCT = os.path.join(os.path.dirname(stillframe.__file__), "")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((NUMEL,), float(i)) for i in range(NR)}


class Way:
    """One of the two ways to load to a device: into new tensors, and into given ones (`into=`).

    Args:
        runner, method: The method that loads after the file was checked.
        more: A text that every error during the load must contain too; "" for new tensors.
        lengths: Elements of each tensor.
    """

    def __init__(
        self,
        name: str,
        runner: type,
        method: str,
        more: str,
        lengths: tuple[int, ...] = (NUMEL,) * NR,
    ) -> None:
        self.name, self._lengths = name, lengths
        self.runner, self.method, self.more = runner, method, more

    def __call__(self, path: Path) -> Any:
        target = {f"w{i}": torch.zeros(n) for i, n in enumerate(self._lengths)}
        return stillframe.load(path, into=target if self.more else None)

    def after_check(self, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
        """Have `call` called after the file was checked and before its tensors are read."""
        real = getattr(self.runner, self.method)

        def run(*args: Any) -> Any:
            call()
            return real(*args)

        monkeypatch.setattr(self.runner, self.method, run)


WAYS = (
    Way("load", restore.Archive, "load", ""),
    Way("into=", fill.Fill, "run", HALF_WRITTEN),
)


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def assert_whole(way: Way, file: Path, state: dict[str, torch.Tensor]) -> None:
    found = way(file)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


def change(file: Path, at: int) -> None:
    with open(file, "r+b") as opened:
        byte = os.pread(opened.fileno(), 1, at)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ 1]), at)


def test_bytes_changed_during_a_load_are_reported_by_record_offset_and_tensor(
    way, file, state, monkeypatch
):
    start = file.read_bytes().index(state["w3"].numpy().tobytes())
    with monkeypatch.context() as patch, pytest.raises(stillframe.CorruptCheckpointError) as error:
        way.after_check(patch, lambda: change(file, start + 1000))
        way(file)
    text = str(error.value)
    assert "data/3" in text and f"at byte {start}: w3)" in text
    assert way.more in text
    change(file, start + 1000)
    assert_whole(way, file, state)


def test_file_truncated_during_a_load_is_corrupt(way, file, state, monkeypatch):
    whole = file.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(stillframe.CorruptCheckpointError) as error:
        way.after_check(patch, lambda: os.truncate(file, len(whole) // 2))
        way(file)
    assert str(file) in str(error.value) and "at byte " in str(error.value)
    assert way.more in str(error.value)
    file.write_bytes(whole)
    assert_whole(way, file, state)


@pytest.mark.parametrize("nth", [1, 3])
def test_disk_error_during_a_load_names_file_record_and_offset(nth, way, file, state, monkeypatch):
    bad = testing.fault("pread", nth=nth, sticky=True, err=errno.EIO)
    try:
        with monkeypatch.context() as patch, pytest.raises(OSError) as error:
            way.after_check(patch, bad.__enter__)
            way(file)
    finally:
        bad.__exit__(None, None, None)
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(file))
    assert "record " in str(error.value) and "at byte " in str(error.value)
    assert way.more in str(error.value)
    assert_whole(way, file, state)


@pytest.mark.parametrize("nth", [1, 2, 3, 8])
def test_load_without_pinned_memory_is_slower_or_raises(nth, way, file, state, fake):
    fake.fail("cuMemHostAlloc", nth=nth, code=2)
    try:
        assert_whole(way, file, state)
    except MemoryError:
        assert nth <= 2  # no thread has started
    assert fake.hits == 1
    fake.reset()
    assert_whole(way, file, state)


def test_device_failure_in_a_load_reports_partly_written_targets(file, state, fake):
    (into_way,) = [each for each in WAYS if each.more]
    fake.fail("cuMemcpyHtoDAsync_v2", nth=4, code=2)
    with pytest.raises(stillframe.StillframeError, match=f"device 0: cu.*{HALF_WRITTEN}"):
        into_way(file)
    fake.reset()
    assert_whole(into_way, file, state)


class Interrupt:
    """A context manager that raises KeyboardInterrupt at the nth line of the package that runs."""

    def __init__(self, nth: int) -> None:
        self._nth = nth
        self._nr = 0
        # For each line the count of lines at its first and its last run.
        self.first: dict[tuple[str, int], int] = {}
        self.last: dict[tuple[str, int], int] = {}

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if self._is_product(frame.f_code.co_filename) else None

    @staticmethod
    def _is_product(file: str) -> bool:
        return file.startswith(PRODUCT) and file != testing.__file__

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self._nr += 1
            where = (frame.f_code.co_filename, frame.f_lineno)
            self.first.setdefault(where, self._nr)
            self.last[where] = self._nr
            if self._nr == self._nth:
                raise KeyboardInterrupt
        return self._line


def test_ctrl_c_at_any_line_leaks_nothing(way, tmp_path, fake):
    file = tmp_path / "a.pt"
    torch.save({f"w{i}": torch.zeros(NUMEL)[: 9 + i].clone() for i in range(2)}, file)
    small = Way(way.name, way.runner, way.method, way.more, (9, 10))
    with Interrupt(0) as counted:
        small(file)
    before = living(fake)
    loading = [file for file, _ in counted.first if file.startswith(_load.__path__[0])]
    assert len(loading) > 100
    for nth in sorted({*counted.first.values(), *counted.last.values()}):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(nth):
            small(file)
        assert living(fake) == before, nth
        assert torch.is_grad_enabled(), nth
    assert len(small(file)) == 2
