"""`stillframe bench DIR`: its figures, its advice, and what it leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import stillframe
from _stillframe_command import INTERRUPTED
from _stillframe_command import main as command
from fix_checkpoints import open_descriptors, unprivileged
from stillframe._shell import bench, bench_raw, bench_result
from stillframe.testing import fault, slow

MIB = 1 << 20
GOOD = bench_result.BenchResult(
    directory="/ckpt",
    file_system="ext4",
    nbytes=100 * MIB,
    rounds=3,
    raw_direct=True,
    memcpy_s=0.01,
    write_s=0.05,
    read_s=0.05,
    call_s=0.001,
    staged_s=0.012,
    durable_s=0.06,
    first_durable_s=0.1,
    load_s=0.06,
    io_mode="direct",
    pool_bytes=1000 * MIB,
)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path):
    """Check that no file, descriptor or save in flight is left, whatever has happened."""
    before = open_descriptors()
    term = signal.getsignal(signal.SIGTERM)
    yield
    stillframe.wait_all(timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == ".") == []
    assert not {*open_descriptors()} - {*before}  # connections of earlier tests may close
    assert signal.getsignal(signal.SIGTERM) is term


def run(*arguments: object) -> int:
    return command(["bench", *map(str, arguments)])


def test_json_has_every_figure_the_shares_and_advice(disk_path, capsys):
    assert run(disk_path, "--size", "2MiB", "--json") == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert output.err == ""
    assert set(found) == {f.name for f in dataclasses.fields(bench_result.BenchResult)} | {
        "shares",
        "advice",
    }
    assert found["nbytes"] == 2 * MIB
    assert 1 <= found["rounds"] <= 5
    for name, value in found.items():
        assert not name.endswith("_s") or value > 0, name
    assert found["call_s"] <= found["staged_s"] <= found["durable_s"]
    assert found["shares"] == {
        "copy": pytest.approx(found["memcpy_s"] / found["staged_s"]),
        "save": pytest.approx(found["write_s"] / found["durable_s"]),
        "load": pytest.approx(found["read_s"] / found["load_s"]),
    }
    assert found["file_system"] == bench_raw.file_system_of(disk_path)
    assert found["advice"]


def test_the_table_ends_with_the_advice(disk_path, capsys):
    assert run(disk_path, "--size", "1MiB") == 0
    out = capsys.readouterr().out
    for row in ("raw memcpy", "raw write + sync", "durable after", "raw read", "load"):
        assert row in out
    assert out.rstrip().endswith(".")


def test_bench_state_is_deferred_as_in_a_training(disk_path, monkeypatch):
    reports = []
    save = bench._Bench._save

    def keep(self):
        reports.append(save(self))
        return reports[-1]

    monkeypatch.setattr(bench._Bench, "_save", keep)
    assert run(disk_path, "--size", "8MiB", "--json") == 0
    assert all(report.deferred_nbytes >= 0.99 * 8 * MIB for report in reports)
    assert len(reports) >= 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file_system": "tmpfs", "io_mode": "buffered"}, ["memory", "reboot"]),
        ({"file_system": "nfs4"}, ["network file system", "server"]),
        ({"file_system": "fuse.sshfs"}, ["network file system"]),
        (
            {"io_mode": "buffered", "fallbacks": ["The file system refuses O_DIRECT (EINVAL)."]},
            ["page cache (the file system refuses O_DIRECT (EINVAL))"],
        ),
        ({"io_mode": "buffered"}, ["has no O_DIRECT"]),
        ({"pool_bytes": 50 * MIB}, ["pool (52.4 MB)", "STILLFRAME_POOL_BYTES"]),
        ({"durable_s": 0.2}, ["4.0 times", "stillframe.trace"]),
        ({"others": 0.4, "durable_s": 0.2}, ["took 40% of this machine", "quiet"]),
        ({}, ["Nothing to mend", "10 GB", "6 s"]),
    ],
)
def test_advice_names_the_obstacle(change, words):
    found = bench_result.advice(dataclasses.replace(GOOD, **change))
    assert len(found) == 1
    for word in words:
        assert word in found[0]


def test_advice_names_every_obstacle():
    found = bench_result.advice(
        dataclasses.replace(GOOD, file_system="nfs", io_mode="buffered", pool_bytes=MIB)
    )
    assert len(found) == 3
    assert not any("Nothing to mend" in sentence for sentence in found)


def test_busy_processes_are_reported():
    spin = "import os\nwhile os.getppid() > 1: pass"
    others = bench_raw.Others()
    with subprocess.Popen([sys.executable, "-c", spin]) as process:
        try:
            while others.share() == 0:
                time.sleep(0.01)  # the kernel counts time in ticks
        finally:
            process.kill()


def test_small_pool_set_by_the_environment_is_reported(disk_path, monkeypatch, capsys):
    monkeypatch.setenv("STILLFRAME_POOL_BYTES", "16MiB")
    assert run(disk_path, "--size", "24MiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pool_bytes"] == 16 * MIB
    assert any("STILLFRAME_POOL_BYTES" in sentence for sentence in found["advice"])


def test_a_disk_without_direct_writes_is_measured_through_the_page_cache(
    disk_path, monkeypatch, capsys
):
    opened = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert run(disk_path, "--size", "1MiB", "--json") == 0
    assert json.loads(capsys.readouterr().out)["raw_direct"] is False


def test_a_missing_directory_or_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "missing") == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert run(tmp_path / "file") == 2
    assert "is a file" in capsys.readouterr().err


def test_a_directory_that_may_not_be_written_to_is_refused(tmp_path, capsys):
    tmp_path.chmod(0o555)
    try:
        with unprivileged():
            assert run(tmp_path) == 2
    finally:
        tmp_path.chmod(0o755)
    assert "Permission denied" in capsys.readouterr().err


def test_lack_of_disk_or_memory_is_reported_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 10 * MIB))
        assert run(tmp_path, "--size", "5MiB") == 2
        assert "on the disk" in capsys.readouterr().err
        assert run(tmp_path) == 2
        assert "too little room" in capsys.readouterr().err
    monkeypatch.setattr(bench_raw, "available_memory_bytes", lambda: 10 * MIB)
    assert run(tmp_path, "--size", "5MiB") == 2
    assert "of memory" in capsys.readouterr().err
    assert run(tmp_path) == 2
    assert "too little memory" in capsys.readouterr().err


def test_failing_disk_ends_bench_with_its_error_and_leaves_no_file(disk_path, capsys):
    with fault("fdatasync", sticky=True):
        assert run(disk_path, "--size", "1MiB") == 2
    assert "Input/output error" in capsys.readouterr().err
    assert list(disk_path.iterdir()) == []


@pytest.mark.parametrize(
    "where", ["measure_copy_seconds", "measure_write_seconds", "measure_read_seconds", "forget"]
)
def test_ctrl_c_ends_bench_and_leaves_no_file(disk_path, monkeypatch, where):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_raw, where, interrupt)
    assert run(disk_path, "--size", "1MiB") == INTERRUPTED
    assert list(disk_path.iterdir()) == []


def test_ctrl_c_in_a_save_cancels_it(disk_path, monkeypatch):
    seen = []

    def interrupt(handle: stillframe.SaveHandle) -> None:
        seen.append(handle)
        raise KeyboardInterrupt

    monkeypatch.setattr(stillframe.SaveHandle, "wait_staged", interrupt)
    with slow("pwrite", 0.05):
        assert run(disk_path, "--size", "1MiB") == INTERRUPTED
    assert list(disk_path.iterdir()) == []
    assert [handle.state for handle in seen] == ["cancelled"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_bench_and_leaves_no_file(disk_path, number):
    code = """
import sys
from _stillframe_command import main
from stillframe._shell import bench_raw
write = bench_raw.measure_write_seconds
def print_and_write(*args, **named):
    print("writing", flush=True)
    return write(*args, **named)
bench_raw.measure_write_seconds = print_and_write
sys.exit(main(["bench", sys.argv[1], "--size", "8MiB"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(disk_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        process.stdout.read()
    # A very fast machine may finish before the signal comes.
    assert process.returncode in (INTERRUPTED, 0)
    assert list(disk_path.iterdir()) == []


def test_bench_chooses_a_size_that_takes_a_second_and_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_raw, "available_memory_bytes", lambda: 7 * 1000 * MIB)
    for seconds, expected in ((0.1, 320 * MIB), (100.0, 32 * MIB), (1e-6, 512 * MIB)):

        def write(path: Path, source: object, seconds: float = seconds) -> tuple[float, bool]:
            path.touch()
            return seconds, True

        monkeypatch.setattr(bench_raw, "measure_write_seconds", write)
        assert bench._choose_size(tmp_path, None, lambda _: None) == expected


@pytest.mark.parametrize("direct", [False, None])
def test_a_short_source_is_repeated_to_the_length_asked_for(disk_path, direct):
    source = bench_raw.make_buffer(3 * bench_raw.PAGE_BYTES)
    path = disk_path / "raw"
    seconds, _ = bench_raw.measure_write_seconds(
        path, source, direct=direct, nbytes=8 * bench_raw.PAGE_BYTES
    )
    assert seconds > 0
    assert path.read_bytes() == (bytes(source) * 3)[: 8 * bench_raw.PAGE_BYTES]
    path.unlink()


@pytest.mark.parametrize("nr_threads", [1, 2, 3])
def test_copy_by_several_threads_is_complete(nr_threads):
    source, target = (bench_raw.make_buffer(5 * bench_raw.PAGE_BYTES) for _ in range(2))
    assert bench_raw.measure_copy_seconds(source, target, nr_threads) > 0
    assert bytes(target) == bytes(source)
