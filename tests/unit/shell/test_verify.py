"""`stillframe verify`: its checks, its output and its exit status."""

import errno
import gzip
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tarfile
import threading
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import stillframe
import torch
import torch.distributed.checkpoint
from _stillframe_command import main as command
from fix_checkpoints import (
    WRITERS,
    by_path,
    by_stillframe,
    flip,
    legacy,
    offset_of_storage,
    small_state,
    sparse,
    unprivileged,
    without_crc,
)
from fix_processes import run_python
from hypothesis import given
from hypothesis import strategies as st
from stillframe import _core, testing
from stillframe._shell import verify as checks

DAMAGES = ["truncated", "empty", "zeros", "flipped"]


pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


def damaged(kind, path):
    by_path(small_state(), path)
    if kind == "truncated":
        os.truncate(path, os.path.getsize(path) // 2)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "zeros":
        path.write_bytes(bytes(os.path.getsize(path)))
    else:
        flip(path, offset_of_storage(path) + 100)


def verify(*arguments):
    return command(["verify", *map(str, arguments)])


def verify_json(capsys, *arguments):
    status = verify("--json", *arguments)
    output = capsys.readouterr()
    assert output.err == ""
    return status, json.loads(output.out)


# ---- status ----------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
def test_checkpoint_of_any_writer_is_good(write, tmp_path, capsys):
    write(small_state(), tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt") == 0
    output = capsys.readouterr()
    assert "x.ckpt" in output.out
    assert "ok" in output.out
    assert output.err == ""


def test_legacy_file_is_reported_to_have_no_checksums(tmp_path, capsys):
    legacy(small_state(), tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt") == 0
    assert "torch's legacy format, which has no checksums" in capsys.readouterr().out


def test_lines_are_coloured_on_terminals_that_want_it(tmp_path, monkeypatch, capsys):
    by_path(small_state(), tmp_path / "x.ckpt")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = []
    for variable, value in (("TERM", "xterm"), ("TERM", "dumb"), ("NO_COLOR", "1")):
        with monkeypatch.context() as asked:
            asked.setenv("TERM", "xterm")
            asked.setenv(variable, value)
            assert verify(tmp_path / "x.ckpt") == 0
        coloured.append("\x1b[" in capsys.readouterr().out)
    assert coloured == [True, False, False]


@pytest.mark.parametrize("kind", DAMAGES)
def test_verify_of_a_damaged_file_ends_with_status_1(kind, tmp_path, capsys):
    damaged(kind, tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt") == 1
    assert "damaged" in capsys.readouterr().out


def test_a_missing_file_ends_with_status_2(tmp_path, capsys):
    assert verify(tmp_path / "x.ckpt") == 2
    assert "no such file" in capsys.readouterr().out


def test_a_directory_without_checkpoints_ends_with_status_2(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("PK")
    assert verify(tmp_path) == 2
    assert "no checkpoint" in capsys.readouterr().out


def test_a_file_that_may_not_be_read_ends_with_status_2(tmp_path):
    by_path(small_state(), tmp_path / "x.ckpt")
    os.chmod(tmp_path / "x.ckpt", 0)
    with unprivileged():
        found = checks.verify_file(str(tmp_path / "x.ckpt"))
    assert found.status == 2
    assert "permission" in found.error


def test_a_directory_that_may_not_be_listed_ends_with_status_2(tmp_path, capsys):
    closed = tmp_path / "a" / "closed"
    closed.mkdir(parents=True)
    by_path(small_state(), tmp_path / "a" / "x.ckpt")
    failures = []
    os.chmod(closed, 0)
    for parent in (tmp_path / "a", tmp_path, *list(tmp_path.parents)[:2]):
        os.chmod(parent, 0o755)
    with unprivileged():
        found = list(checks.checkpoints_in(str(tmp_path / "a"), failures))
    os.chmod(closed, 0o755)
    assert found == [str(tmp_path / "a" / "x.ckpt")]
    assert [error.filename for error in failures] == [str(closed)]


@pytest.mark.parametrize("arguments", [[], ["verify"], ["verify", "--no-such"], ["nonsense"]])
def test_verify_with_bad_arguments_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        command(arguments)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_pipe_is_named_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt") == 2
    assert "looks like a named pipe" in capsys.readouterr().out


def zipped(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", "<x/>")


def tarred(path):
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("a"))


def numpy_array(path):
    with path.open("wb") as file:
        np.save(file, np.ones(3))


@pytest.mark.parametrize("make", [np.savez, np.savez_compressed])
def test_an_archive_of_records_outside_any_directory_is_not_called_damaged(make, tmp_path, capsys):
    make(tmp_path / "x.npz", weights=np.ones(1000))
    assert verify(tmp_path / "x.npz") == 2
    assert "looks like a zip archive of something else" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(stillframe.CorruptCheckpointError):
        stillframe.load(tmp_path / "x.npz")


OTHER_FILES = {
    "gzip": lambda path: path.write_bytes(gzip.compress(b"x" * 100)),
    "text": lambda path: path.write_text("epoch,loss\n1,0.5\n" * 1000 + "é" * 5000),
    "a Python pickle": lambda path: path.write_bytes(pickle.dumps({"w": 1})),
    "an array of numpy.save": numpy_array,
    "tar": tarred,
    "a zip archive of something else": zipped,
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_file_of_another_kind_is_named_and_ends_with_status_2(name, tmp_path, capsys):
    path = tmp_path / "x.pt"
    OTHER_FILES[name](path)
    assert verify(path) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert f"not a PyTorch checkpoint; it looks like {name}" in output
    with pytest.raises(stillframe.CorruptCheckpointError):
        stillframe.load(path)


def test_unrecognised_bytes_are_not_a_checkpoint(tmp_path, capsys):
    (tmp_path / "x.pt").write_bytes(bytes(range(128, 256)) * 9)
    assert verify(tmp_path / "x.pt") == 2
    assert "not a PyTorch checkpoint" in capsys.readouterr().out


@pytest.fixture
def sharded(tmp_path):
    state = {f"layer.{i}": torch.ones(10, i + 1) for i in range(5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_intact_shard_is_recognised_and_its_directory_checked(sharded, capsys):
    (shard,) = sharded.glob("*.distcp")
    status, (entry,) = verify_json(capsys, shard)
    assert status == 2
    assert "a shard of a torch.distributed.checkpoint directory" in entry["error"]
    for path in (sharded, sharded.parent):
        status, (entry,) = verify_json(capsys, path)
        assert status == 0
        assert (entry["num_records"], entry["nbytes"]) == (5, shard.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        ("bit", "layer.3", "do not match their CRC"),
        ("cut", "layer.4", "the file ends at"),
        ("shifted", "layer.3", "it is not a torch.save file"),
        ("gone", "__0_0.distcp", "the file is missing"),
        ("metadata", None, "cannot be read"),
    ],
)
def test_damage_in_a_sharded_checkpoint_is_located_and_ends_with_status_1(
    sharded, capsys, damage, name, says
):
    (shard,) = sharded.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    if damage == "bit":
        metadata = torch.distributed.checkpoint.FileSystemReader(sharded).read_metadata()
        (info,) = (v for k, v in metadata.storage_data.items() if k.fqn == "layer.3")
        offset = data.index(torch.ones(10, 4).numpy().tobytes(), info.offset)
        data[offset + 1] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[:-100])
    elif damage == "shifted":
        shard.write_bytes(data[100:] + bytes(100))
    elif damage == "gone":
        shard.unlink()
    else:
        (sharded / ".metadata").write_bytes((sharded / ".metadata").read_bytes()[:-50])
    assert verify(sharded) == 1
    out = capsys.readouterr().out
    assert says in out and (name is None or name in out)


def test_nothing_in_sharded_metadata_is_executed(sharded, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(sharded / "evil"),)

    (sharded / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert verify(sharded) == 1
    assert not (sharded / "evil").exists()


def test_a_disk_that_cannot_read_the_bytes_ends_with_status_1(tmp_path, capsys):
    by_path(small_state(), tmp_path / "x.ckpt")
    with testing.fault("pread", sticky=True, err=errno.EIO):
        status, (entry,) = verify_json(capsys, tmp_path / "x.ckpt")
    assert status == 1
    assert entry["error"] == os.strerror(errno.EIO)
    assert entry["nbytes"] == os.path.getsize(tmp_path / "x.ckpt")


@pytest.mark.parametrize("call", ["malloc", "pread"])
def test_a_machine_without_memory_ends_with_status_2(tmp_path, capsys, call):
    by_path(small_state(), tmp_path / "x.ckpt")
    with testing.fault(call, sticky=True, err=errno.ENOMEM):
        status, (entry,) = verify_json(capsys, tmp_path / "x.ckpt")
    assert status == 2
    assert "memory" in entry["error"]


def test_worst_status_of_several_paths_counts(tmp_path, capsys):
    good, bad, missing = tmp_path / "good.pt", tmp_path / "bad.pt", tmp_path / "missing.pt"
    by_path(small_state(), good)
    damaged("truncated", bad)
    assert verify(good, good) == 0
    assert verify(good, bad) == 1
    assert verify(bad, good) == 1
    assert verify(missing, bad, good) == 2
    output = capsys.readouterr().out
    assert output.count("missing.pt") == 1


# ---- directories -------------------------------------------------------------------------


def test_directory_without_checkpoints_is_reported_together_with_good_ones(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    by_path(small_state(), tmp_path / "good.pt")
    assert verify(tmp_path / "good.pt", tmp_path / "empty") == 2
    assert f"{tmp_path / 'empty'}: there is no checkpoint" in capsys.readouterr().out


def test_every_checkpoint_under_a_directory_is_checked_and_nothing_else(tmp_path, capsys):
    (tmp_path / "logs" / "version_0").mkdir(parents=True)
    names = ["a.ckpt", "b.pt", "c.pth", "logs/d.bin", "logs/version_0/e.ckpt", "f"]
    for name in names:
        by_stillframe(small_state(), tmp_path / name)
    legacy(small_state(), tmp_path / "old")
    (tmp_path / "notes.txt").write_text("step 3")
    (tmp_path / "hparams.zip").write_bytes(b"PK\3\4" + bytes(26) + b"x")
    by_path(small_state(), tmp_path / "__0_0.distcp")
    # A save in flight: half a file with a temporary's name.
    half = (tmp_path / "a.ckpt").read_bytes()[:1000]
    (tmp_path / ".stillframe-noboot-1-1.tmp").write_bytes(half)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.ckpt").write_bytes(half)
    os.mkfifo(tmp_path / "pipe")
    status, entries = verify_json(capsys, tmp_path)
    assert status == 0
    found = [os.path.relpath(entry["path"], tmp_path) for entry in entries]
    assert sorted(found) == sorted([*names, "old"])


def test_a_directory_with_one_bad_checkpoint_ends_with_status_1(tmp_path, capsys):
    for name in ("a.ckpt", "b.ckpt", "c.ckpt"):
        by_path(small_state(), tmp_path / name)
    damaged("flipped", tmp_path / "b.ckpt")
    status, entries = verify_json(capsys, tmp_path)
    assert status == 1
    assert [entry["ok"] for entry in entries] == [True, False, True]


def test_a_dangling_link_ends_with_status_2(tmp_path, capsys):
    by_path(small_state(), tmp_path / "a.ckpt")
    os.symlink("gone.ckpt", tmp_path / "last.ckpt")
    assert verify(tmp_path) == 2


# ---- output --------------------------------------------------------------------------------


def test_verify_json_has_exactly_the_promised_keys(tmp_path, capsys):
    good, bad = tmp_path / "good.ckpt", tmp_path / "bad.ckpt"
    by_stillframe(small_state(), good)
    by_stillframe(small_state(), bad)
    flip(bad, offset_of_storage(bad) + 5)
    status, entries = verify_json(capsys, good, bad, tmp_path / "missing")
    assert status == 2
    assert entries[0] == {
        "path": str(good),
        "ok": True,
        "error": None,
        "nbytes": os.path.getsize(good),
        "num_records": 9,
        "bad_records": [],
    }
    assert entries[1]["bad_records"] == ["archive/data/0"]
    assert entries[1]["error"] == "record archive/data/0: its bytes do not match their CRC"
    assert (entries[1]["ok"], entries[1]["num_records"]) == (False, 9)
    assert entries[2] == {
        "path": str(tmp_path / "missing"),
        "ok": False,
        "error": "there is no such file",
        "nbytes": None,
        "num_records": 0,
        "bad_records": [],
    }


def test_every_bad_record_is_named_in_json_and_the_first_ones_in_the_table(tmp_path, capsys):
    path = tmp_path / "x.ckpt"
    torch.save([torch.full((64,), i) for i in range(1, 21)], path)
    data = bytearray(path.read_bytes())
    for i in range(20):
        data[data.index(b"x/data/%d" % i) + 200] ^= 1
    path.write_bytes(data)
    status, (entry,) = verify_json(capsys, path)
    assert status == 1
    assert sorted(entry["bad_records"]) == sorted(f"x/data/{i}" for i in range(20))
    assert verify(path) == 1
    output = capsys.readouterr().out
    assert "damaged: 20 records" in output
    assert "x/data/0: its bytes do not match their CRC" in output
    assert "and 12 more" in output
    assert "x/data/19" not in output


def test_records_without_a_checksum_are_reported_as_such(tmp_path, capsys):
    without_crc(small_state(), tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt") == 0
    assert "records without a checksum" in capsys.readouterr().out


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path, capsys):
    path = tmp_path / "[red]\x1b[31mx\n.ckpt"
    by_path(small_state(), path)
    assert verify(path) == 0
    output = capsys.readouterr().out
    assert "[red]?[31mx?.ckpt" in output
    assert "\x1b" not in output
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.ckpt")
    by_path(small_state(), pathlib.Path(odd))
    assert verify(odd) == 0
    assert "?.ckpt" in capsys.readouterr().out


def test_long_paths_are_not_cut_without_a_terminal(tmp_path, capsys):
    directory = tmp_path / ("d" * 200) / ("e" * 200)
    directory.mkdir(parents=True)
    by_path(small_state(), directory / "x.ckpt")
    assert verify(directory) == 0
    assert str(directory / "x.ckpt") in capsys.readouterr().out


class Terminal:
    """A stderr that reports that it is a terminal."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


def test_progress_is_shown_only_on_a_terminal(tmp_path, capsys, monkeypatch):
    sparse(tmp_path / "[b]x.ckpt", 1 << 30)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert verify(tmp_path) == 0
    assert "[b]x.ckpt" in terminal.text
    assert "GB" in terminal.text
    monkeypatch.setattr(checks, "_LONG_NBYTES", 2 << 30)
    terminal.text = ""
    assert verify(tmp_path) == 0
    assert terminal.text == ""
    assert "1.07 GB" in capsys.readouterr().out


def test_ctrl_c_ends_verify_with_status_130_and_no_error_text(tmp_path, monkeypatch, capsys):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    by_path(small_state(), tmp_path / "x.ckpt")
    monkeypatch.setattr(_core, "check", interrupted)
    assert verify(tmp_path / "x.ckpt") == 130
    assert capsys.readouterr().err == ""


# ---- the program -------------------------------------------------------------------------


def program(*arguments, **options):
    return run_python("-m", "stillframe", *arguments, **options)


def test_python_m_stillframe_runs_the_command(tmp_path):
    by_path(small_state(), tmp_path / "x.ckpt")
    done = program("verify", "x.ckpt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "x.ckpt" in done.stdout
    done = program("verify", "y.ckpt", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)[0]["ok"] is False
    assert program("verify").returncode == 2


def test_closed_output_gives_no_traceback(tmp_path):
    for i in range(300):
        by_path(small_state(), tmp_path / f"{i}.ckpt")
    with subprocess.Popen(
        [sys.executable, "-m", "stillframe", "verify", "--json", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(120) == 141


# ---- crc32 -----------------------------------------------------------------------------------


@given(st.binary(max_size=2000), st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_crc32_equals_zlibs(data, value, times):
    data *= times
    assert _core.crc32(data, value) == zlib.crc32(data, value)
    view = memoryview(data)[len(data) // 3 :]
    assert _core.crc32(view) == zlib.crc32(view)


def test_crc32_refuses_other_objects_than_buffers():
    with pytest.raises(TypeError):
        _core.crc32("text")


def test_verify_works_on_several_threads_at_the_same_time(tmp_path):
    by_stillframe({"x": torch.ones(1 << 20)}, tmp_path / "x.ckpt")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(checks.verify_file(str(tmp_path / "x.ckpt"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [finding.status for finding in found] == [0] * 8
