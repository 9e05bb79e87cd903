"""`stillframe verify` of directories as Hugging Face's libraries write them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from _stillframe_command import main as command


def safetensors(path: Path, lengths: tuple[int, ...] = (400, 40), metadata: bool = True) -> Path:
    """Write a safetensors file: the header's length, the header, the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    for number, length in enumerate(lengths):
        span = [end, end + length]
        header[f"w{number}"] = {"dtype": "F32", "shape": [length // 4], "data_offsets": span}
        end += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(256)) * 2)
    os.truncate(path, 8 + len(text) + end)
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_in_header(path: Path) -> None:
    os.truncate(path, 20)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def spoilt_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"data_offsets"', b'"data_offsetz"'))


def gap(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"[400, 440]", b"[401, 440]"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    safetensors(tmp_path / "model.safetensors")
    torch.save({"step": 1}, tmp_path / "optimizer.pt")
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_complete_directory_is_ok_and_names_files_without_checksums(checkpoint, capsys):
    assert command(["verify", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model.safetensors: ok" in lines[0] and "2 records without a checksum" in lines[0]
    assert lines[-1].startswith("3 paths") and "3 ok" in lines[-1]


@pytest.mark.parametrize("damage", [cut, cut_in_header, emptied, longer, spoilt_header, gap])
def test_damaged_safetensors_file_makes_the_directory_damaged(checkpoint, capsys, damage):
    damage(checkpoint / "model.safetensors")
    assert command(["verify", "--json", str(checkpoint)]) == 1
    bad = [each for each in json.loads(capsys.readouterr().out) if not each["ok"]]
    assert [Path(each["path"]).name for each in bad] == ["model.safetensors"]
    assert bad[0]["error"]


def test_shard_that_the_index_names_must_be_there(tmp_path, capsys):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"w0": names[0], "w1": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        safetensors(tmp_path / name, metadata=False)
    assert command(["verify", str(tmp_path)]) == 0
    (tmp_path / names[1]).unlink()
    assert command(["verify", str(tmp_path)]) == 1
    assert f"missing next to it: {names[1]}" in capsys.readouterr().out


def test_empty_weights_of_an_older_library_are_damaged(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    assert command(["verify", str(tmp_path)]) == 1


def test_bin_file_of_another_program_is_skipped(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\1\2\3")
    torch.save({"step": 1}, tmp_path / "ckpt.pt")
    assert command(["verify", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["model.safetensors", "step5.bin"])
def test_single_safetensors_file_is_checked_and_its_bytes_are_reported_unchecked(
    name, tmp_path, capsys
):
    path = safetensors(tmp_path / name)
    assert command(["verify", str(path)]) == 0
    line = " ".join(capsys.readouterr().out.split())
    assert f"{name}: ok" in line and "the structure is good, the bytes are unchecked" in line
    cut(path)
    assert command(["verify", "--json", str(path)]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["nbytes"]) == (False, path.stat().st_size)
    assert "it is truncated: it has " in told["error"]


def test_index_by_itself_is_checked_with_its_files(tmp_path, capsys):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w0": names[0], "w1": names[1]}}))
    for name in names:
        safetensors(tmp_path / name)
    assert command(["verify", str(index)]) == 0
    cut(tmp_path / names[1])
    assert command(["verify", str(index)]) == 1
    assert f"{names[1]}: it is truncated" in " ".join(capsys.readouterr().out.split())


def test_inspect_lists_tensors_and_metadata(tmp_path, capsys):
    path = safetensors(tmp_path / "model.safetensors")
    assert command(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:3] for line in shown.splitlines()[1:3]] == [
        ["w0", "100", "float32"],
        ["w1", "10", "float32"],
    ]
    assert "metadata: format: pt" in shown
    assert command(["inspect", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "safetensors" and told["metadata"] == {"format": "pt"}
    assert [each["nbytes"] for each in told["tensors"]] == [400, 40]
    cut(path)
    assert command(["inspect", str(path)]) == 1
    assert "truncated" in capsys.readouterr().out


def test_inspect_of_an_index_lists_the_tensors_of_all_files(tmp_path, capsys):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w0": names[0], "w1": names[1]}}))
    for name in names:
        safetensors(tmp_path / name)
    assert command(["inspect", "--json", str(index)]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 4
    (tmp_path / names[1]).unlink()
    assert command(["inspect", str(index)]) == 1
    assert f"missing next to it: {names[1]}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["info", "bench"])
def test_mistyped_pool_size_is_reported_in_one_line(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("STILLFRAME_POOL_BYTES", "12xyz")
    assert command([name, str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "STILLFRAME_POOL_BYTES='12xyz' is not a size" in output.err
