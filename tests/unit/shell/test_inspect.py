"""`stillframe inspect` shows what is in a file without loading it or running its code."""

import io
import json
import os
import resource
import sys
import zipfile
from collections import OrderedDict

import pytest
import stillframe
import torch
from _stillframe_command import main as command
from fix_checkpoints import (
    WRITERS,
    by_path,
    by_stillframe,
    flip,
    legacy,
    offset_of_storage,
    small_state,
)
from stillframe._check import pickles


class Dangerous:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def inspect(*arguments):
    return command(["inspect", *map(str, arguments)])


def inspect_json(capsys, path):
    status = inspect("--json", path)
    return status, json.loads(capsys.readouterr().out)


def by_name(shown):
    return {each["path"]: each for each in shown["tensors"]}


@pytest.mark.parametrize("write", [*WRITERS, legacy])
def test_names_shapes_types_and_bytes_are_shown_for_every_writer(write, tmp_path, capsys):
    write(small_state(), tmp_path / "x.pt")
    status, shown = inspect_json(capsys, tmp_path / "x.pt")
    assert (status, shown["error"]) == (0, None)
    tensors = by_name(shown)
    assert tensors["weight"]["shape"] == [20, 30]
    assert (tensors["weight"]["dtype"], tensors["weight"]["nbytes"]) == ("float32", 2400)
    assert tensors["view"]["shape"] == [4, 15]
    assert tensors["view"]["storage"] == tensors["weight"]["storage"]
    assert tensors["step"]["dtype"] == "int64"
    assert all(each["device"] == "cpu" for each in tensors.values())
    assert shown["others"] == {"str": 1}


def test_every_kind_of_tensor_is_shown_as_in_torch(tmp_path, capsys):
    tree = {
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "storage": torch.ones(4).untyped_storage(),
        "deep": [{"a": (torch.ones(1, 1, 7),)}],
        "ordered": OrderedDict(b=torch.zeros(2)),
    }
    by_path(tree, tmp_path / "x.pt")
    shown = by_name(inspect_json(capsys, tmp_path / "x.pt")[1])
    found = {name: (each["kind"], each["dtype"], each["shape"]) for name, each in shown.items()}
    assert found == {
        "parameter": ("parameter", "float32", [2, 3]),
        "float8": ("tensor", "float8_e4m3fn", [5]),
        "half": ("tensor", "bfloat16", [3]),
        "complex": ("tensor", "complex64", [2]),
        "storage": ("storage", "uint8", [16]),
        "deep.0.a.0": ("tensor", "float32", [1, 1, 7]),
        "ordered.b": ("tensor", "float32", [2]),
    }


def test_every_dtype_has_torchs_name_and_width():
    types = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    assert len(types) > 20
    for each in types:
        assert pickles.dtype(str(each)) == (str(each).removeprefix("torch."), each.itemsize)
    for each, storage in torch.storage._dtype_to_storage_type_map().items():
        assert pickles.dtype(f"torch.{storage}") == (
            str(each).removeprefix("torch."),
            each.itemsize,
        )
    for name in ("torch.float", "os.system", "torch.int", "Storage"):
        with pytest.raises(ValueError, match="no type"):
            pickles.dtype(name)


def test_totals_count_a_shared_storage_once(tmp_path, capsys):
    weight = torch.ones(100)
    by_stillframe({"a": {"x": weight, "y": weight[3:]}, "b": weight.double()}, tmp_path / "x.pt")
    assert inspect_json(capsys, tmp_path / "x.pt")[1]["totals"] == {"a": 400, "b": 800}


def test_nothing_in_a_pickle_is_executed_and_its_types_are_named(tmp_path, capsys):
    torch.save({"x": Dangerous(str(tmp_path / "made")), "w": torch.ones(3)}, tmp_path / "x.pt")
    status, shown = inspect_json(capsys, tmp_path / "x.pt")
    assert status == 0
    assert not (tmp_path / "made").exists()
    assert shown["others"]["posix.mkdir"] == 1
    assert "w" in by_name(shown)


@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_pickle_of_a_truncated_file_is_shown(write, tmp_path, capsys):
    state = {"weight": torch.ones(100_000), "bias": torch.ones(3)}
    write(state, tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", 100_000)
    status, shown = inspect_json(capsys, tmp_path / "x.pt")
    assert status == 1
    assert "truncated" in shown["error"]
    assert by_name(shown)["weight"]["shape"] == [100_000]
    assert inspect(tmp_path / "x.pt") == 1
    assert "damaged: it is truncated" in capsys.readouterr().out


def test_every_cut_and_every_flip_ends_with_a_status_and_no_traceback(tmp_path, capsys):
    path = tmp_path / "x.pt"
    by_path(small_state(), path)
    good = path.read_bytes()
    statuses = set()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at])
        statuses.add(inspect("--json", path))
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        statuses.add(inspect("--json", path))
    capsys.readouterr()
    assert statuses == {0, 1, 2}


def test_inspect_does_not_check_the_bytes_of_tensors(tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    flip(tmp_path / "x.pt", offset_of_storage(tmp_path / "x.pt") + 8)
    assert inspect(tmp_path / "x.pt") == 0


def test_damaged_pickle_is_reported_and_shown(tmp_path, capsys):
    by_path({"weight": torch.ones(3)}, tmp_path / "x.pt")
    raw = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(raw.replace(b"weight", b"weighs", 1))
    status, shown = inspect_json(capsys, tmp_path / "x.pt")
    assert status == 1
    assert shown["error"].startswith("record data.pkl: ") and "CRC" in shown["error"]
    assert by_name(shown)["weighs"]["shape"] == [3]


def archive_of(pickled, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/version", b"3\n")
        archive.writestr("x/data/0", bytes(16))
    return path


def test_pickle_that_needs_endless_memory_is_bounded(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    # None, stored as memo entry 100 million: 1.6 GB.
    path = archive_of(b"\x80\x02Nr" + (100_000_000).to_bytes(4, "little") + b".", tmp_path / "x.pt")
    status, shown = inspect_json(capsys, path)
    assert (status, shown["error"]) == (2, "not enough memory to read its pickle")
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


STORAGE = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu%stQ"


def nested(opening, nr, closing):
    """Return a pickle of so many nested objects around a storage of four elements."""
    storage = STORAGE % b"K\x04"
    return b"\x80\x02" + opening * nr + storage + closing * nr + b"."


TUPLES = b"\x85"
NUMBER = b"\x8b" + (5_000).to_bytes(4, "little") + b"\x7f" * 5_000
DEEP = {
    "lists": (nested(b"]", 20_000, b"a"), 0),
    "dictionaries": (nested(b"}K\x01", 20_000, b"s"), 0),
    "calls": (nested(b"cos\nf\n", 20_000, b"\x85R"), 0),
    "tuples in a call": (b"\x80\x02cos\nf\n" + nested(b"", 20_000, TUPLES)[2:-1] + b"R.", 0),
    "tuples as a key": (b"\x80\x02}" + nested(b"", 5_000, TUPLES)[2:-1] + b"Ns.", 1),
    "a long number as a key": (b"\x80\x02}" + NUMBER + b"Ns.", 1),
    "a storage of no memory": (b"\x80\x02" + STORAGE % (b"\x8a\xff" + b"\x7f" * 255) + b".", 1),
    "a length of 12,000 digits": (b"\x80\x02" + STORAGE % NUMBER + b".", 1),
}


@pytest.mark.parametrize(("pickled", "status"), DEEP.values(), ids=DEEP)
def test_no_pickle_however_deep_ends_in_a_traceback(pickled, status, tmp_path, capsys):
    path = archive_of(pickled, tmp_path / "x.pt")
    assert [inspect(how, path) for how in ("--json", "--tree")] == [status] * 2
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("how", [(), ("--tree",)])
def test_lines_fit_the_terminal_and_names_stay_whole(how, tmp_path, monkeypatch):
    names = [f"encoder.block.{i}.self_attention.query_projection.weight" for i in range(3)]
    by_path({name: torch.ones(4, 5) for name in names} | {"x" * 300: 1}, tmp_path / "x.pt")
    monkeypatch.chdir(tmp_path)
    shown = {}
    for width in (40, 200):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("COLUMNS", str(width))
        assert inspect(*how, "x.pt") == 0
        shown[width] = terminal.getvalue()
        assert max(map(len, shown[width].splitlines())) <= width
        assert "\x1b" not in shown[width]
    assert "self_attention" in shown[40] and "query_projection" in shown[40]
    if not how:
        assert shown[200].splitlines()[0].split() == [
            *["tensor", "shape", "dtype", "device", "bytes", "kind"]
        ]
        assert f"{names[0]}  4x5    float32  cpu      80 B  tensor" in shown[200]
        assert "    4x5  float32  cpu  80 B  tensor\n" in shown[40]


def test_missing_and_foreign_files_end_with_status_2(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("hello")
    assert inspect(tmp_path / "x.txt") == 2
    assert "looks like text" in capsys.readouterr().out
    assert inspect(tmp_path / "missing") == 2


def test_inspect_refuses_a_directory_by_its_kind(tmp_path, capsys):
    assert inspect(tmp_path) == 2
    assert "a directory: name a file in it" in " ".join(capsys.readouterr().out.split())
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_bytes(b"")
    assert inspect(tmp_path) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "a torch.distributed.checkpoint directory: `stillframe verify` checks it" in shown


def test_inspect_tree_shows_the_bytes_of_each_branch(tmp_path, capsys):
    stillframe.save({"model": {"a": torch.ones(250), "b": torch.ones(250)}}, tmp_path / "x.pt")
    assert inspect("--tree", tmp_path / "x.pt") == 0
    printed = capsys.readouterr().out
    assert "\n  model  2 kB\n    a  250 float32 cpu\n    b  250 float32 cpu\n" in printed


def test_tree_groups_tensors_of_a_branch_in_any_order(tmp_path, capsys):
    x, y, b = (torch.ones(1) for _ in range(3))
    by_path({"a.x": x, "b": b, "a": {"y": y}}, tmp_path / "x.pt")
    assert inspect("--tree", tmp_path / "x.pt") == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:5]] == ["a", "x", "y", "b"]
