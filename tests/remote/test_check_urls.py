"""`verify`, `inspect` and `latest` of URLs say what they say of files, with few requests."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter

import fix_kinds
import pytest
import stillframe
import torch
from _stillframe_command import main as command
from fix_buckets import fetchers
from fix_checkpoints import (
    WRITERS,
    by_path,
    flip,
    legacy,
    offset_of_storage,
    pack,
    small_state,
)
from fix_flat import flattened
from fix_kinds import KINDS
from fix_waits import eventually
from safetensors.torch import save_file
from stillframe._remote import file as remote_file
from stillframe._remote.store import Store


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert eventually(lambda: not fetchers())


def run(capsys, *arguments):
    """Run a command; return its status, and what it printed to stdout and stderr."""
    status = command([*map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def verified(capsys, *paths):
    status, out, _ = run(capsys, "verify", "--json", *paths)
    return status, json.loads(out)


def big(path):
    """Write a checkpoint of many chunks."""
    torch.save({f"w{i}": torch.full((300_000,), float(i)) for i in range(8)}, path)
    return path


# ---- verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
def test_verify_accepts_whole_objects_of_every_writer(write, bucket, tmp_path, capsys):
    url = bucket.made_by(write, small_state(), tmp_path)
    status, (found,) = verified(capsys, url)
    assert (status, found["ok"], found["path"]) == (0, True, url)
    assert found["nbytes"] == (tmp_path / "made.pt").stat().st_size


def test_verify_reads_each_byte_once(memory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", 64 << 10)
    url = memory.upload(big(tmp_path / "x.pt"))
    starts = Counter()
    get = Store.get

    def counted(self, key, start, end, version=""):
        starts[start] += 1
        return get(self, key, start, end, version)

    monkeypatch.setattr(Store, "get", counted)
    assert run(capsys, "verify", url)[0] == 0
    chunks = -(-(tmp_path / "x.pt").stat().st_size // (64 << 10))
    assert len(starts) == chunks
    # The chunk with the pickle is read again, to check that the records that it names are there.
    assert all(start < 1 << 20 for start, times in starts.items() if times > 1)
    assert max(starts.values()) <= 2


@pytest.mark.parametrize("damage", ["flipped", "truncated", "record"])
def test_verify_of_a_damaged_object_says_what_it_says_of_a_file(damage, bucket, tmp_path, capsys):
    path = tmp_path / "x.pt"
    by_path(small_state(), path)
    if damage == "flipped":
        flip(path, offset_of_storage(path))
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path = pack(path, tmp_path / "packed.pt", without=("data/0",))
    url = bucket.upload(path)
    of_file, of_url = verified(capsys, path), verified(capsys, url)
    assert of_file[0] == of_url[0] == 1
    assert {**of_file[1][0], "path": url} == of_url[1][0]


def test_verify_of_foreign_or_missing_objects_ends_with_status_2(bucket, capsys):
    text = bucket.put("x.txt", b"some words")
    status, (found,) = verified(capsys, text)
    assert (status, found["ok"]) == (2, False)
    assert found["error"] == "it is not a PyTorch checkpoint; it looks like text"
    status, (found,) = verified(capsys, bucket.url("none.pt"))
    assert (status, found["error"]) == (2, "there is no such file")


def test_verify_searches_a_directory_of_objects(bucket, tmp_path, capsys):
    fix_kinds.torch_file(tmp_path / "a.pt")
    for name in ("run/a.pt", "run/b/c.pt", "run/.hidden.pt", "runner/d.pt"):
        bucket.upload(tmp_path / "a.pt", name)
    bucket.put("run/notes.txt", b"some words")
    bucket.put("run/broken.pt", b"PK\3\4 and no more")
    for directory in (bucket.url("run"), bucket.url("run/")):
        status, found = verified(capsys, directory)
        names = [each["path"].replace("//", "/").rpartition("run/")[2] for each in found]
        assert (status, names) == (1, ["a.pt", "broken.pt", "b/c.pt"])
    bucket.put("empty/notes.txt", b"some words")
    status, (found,) = verified(capsys, bucket.url("empty"))
    assert (status, found["error"]) == (2, "there is no checkpoint in this directory")


@pytest.mark.parametrize("kind", KINDS)
def test_verify_accepts_checkpoint_directories_of_every_kind(kind, memory, tmp_path, capsys):
    write, name, _ = KINDS[kind]
    write(tmp_path / name)
    status, found = verified(capsys, memory.upload(tmp_path / name, f"run/{name}"))
    assert status == 0, found


def test_verify_does_not_report_a_store_that_is_down_as_damage(server, tmp_path, capsys):
    fix_kinds.sharded(tmp_path / "dcp")
    for file in (tmp_path / "dcp").iterdir():
        server.put(f"dcp/{file.name}", file.read_bytes())
    by_path(small_state(), tmp_path / "x.pt")
    server.put("x.pt", (tmp_path / "x.pt").read_bytes())
    server.fail(500, match="GET /bkt/(x.pt|dcp/__0)")
    for url in (server.url("x.pt"), server.url("dcp")):
        status, (found,) = verified(capsys, url)
        assert status == 2
        assert "reading bytes 0 to" in found["error"] and "500" in found["error"]


def test_missing_client_and_bad_urls_end_with_status_2(capsys):
    for url in ("nowhere://x/y.pt", "s3:///x.pt"):
        status, out, _ = run(capsys, "verify", url)
        assert status == 2 and out.startswith(url)


# ---- inspect ---------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [*WRITERS, legacy])
def test_inspect_of_a_url_shows_what_it_shows_of_the_file(write, bucket, tmp_path, capsys):
    url = bucket.made_by(write, small_state(), tmp_path)
    of_file = json.loads(run(capsys, "inspect", "--json", tmp_path / "made.pt")[1])
    status, out, _ = run(capsys, "inspect", "--json", url)
    assert (status, json.loads(out)) == (0, {**of_file, "path": url})


def test_inspect_fetches_only_the_archives_directory_and_the_pickle(server, tmp_path, capsys):
    path = big(tmp_path / "x.pt")
    server.put("x.pt", path.read_bytes())
    status, out, _ = run(capsys, "inspect", server.url("x.pt"))
    assert status == 0 and "8 tensors" in out
    asked = [each for each in server.requests if each.line.startswith("GET")]
    ranges = [
        {name.lower(): value for name, value in each.headers.items()}["range"] for each in asked
    ]
    chunk, nbytes = remote_file.PEEK_BYTES, path.stat().st_size
    assert ranges == [f"bytes=0-{chunk - 1}", f"bytes={nbytes // chunk * chunk}-{nbytes - 1}"]
    assert len(server.requests) == 3


def test_inspect_shows_safetensors_and_an_index(bucket, tmp_path, capsys):
    state = flattened({"a": torch.arange(5), "b": torch.zeros(2, 3)})
    save_file(state, tmp_path / "m.safetensors")
    url = bucket.upload(tmp_path / "m.safetensors", "hf/model-1.safetensors")
    shown = json.loads(run(capsys, "inspect", "--json", url)[1])
    assert [each["path"] for each in shown["tensors"]] == [*state]
    text = json.dumps({"weight_map": dict.fromkeys(state, "model-1.safetensors")})
    url = bucket.put("hf/model.safetensors.index.json", text.encode())
    shown = json.loads(run(capsys, "inspect", "--json", url)[1])
    assert [each["path"] for each in shown["tensors"]] == [*state]


def test_inspect_says_why_it_cannot_show_an_object_or_directory(server, tmp_path, capsys):
    status, out, _ = run(capsys, "inspect", server.url("none.pt"))
    assert (status, out) == (2, f"{server.url('none.pt')}: no such object\n")
    server.put("run/x.pt", b"PK\3\4")
    status, out, _ = run(capsys, "inspect", server.url("run"))
    assert (status, out) == (2, f"{server.url('run')}: it is a directory: name a file in it\n")
    server.fail(500, match="GET /bkt/run/x.pt")
    status, out, _ = run(capsys, "inspect", server.url("run/x.pt"))
    assert status == 2 and "reading bytes 0 to 4 failed" in out


# ---- latest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_latest_finds_the_newest_checkpoint_of_every_kind(kind, memory, tmp_path):
    write, *names = KINDS[kind]
    for name in names:
        write(tmp_path / name)
        memory.upload(tmp_path / name, f"run/{name}")
    assert stillframe.latest(memory.url("run")) == memory.url(f"run/{names[1]}")
    assert stillframe.latest(memory.url("run/"), check="bytes") == memory.url(f"run/{names[1]}")


def test_latest_passes_over_damaged_and_unfinished_checkpoints(bucket, tmp_path, caplog):
    for step in (1, 2, 3):
        fix_kinds.trainer(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    model = tmp_path / "checkpoint-2" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    for step in (1, 2, 3):
        bucket.upload(tmp_path / f"checkpoint-{step}", f"run/checkpoint-{step}")
    with caplog.at_level(logging.WARNING, "stillframe"):
        assert stillframe.latest(bucket.url("run")) == bucket.url("run/checkpoint-1")
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "checkpoint-3 is passed over: it has no trainer_state.json" in said
    assert "checkpoint-2 is passed over: model.safetensors: it is truncated" in said


@pytest.fixture
def two_of_several(bucket):
    """Save two checkpoints of several objects; return the bucket."""
    for step in (4, 5):
        with stillframe.checkpoint(bucket.url(f"run/step{step}")) as files:
            files.save({"a": torch.ones(3)}, "model.pt")
            files.save({"a": torch.ones(3)}, "sub/optimizer.pt")
        files.handle.result(60)
    stillframe.wait_all(60)  # so that `exists` asks the store
    return bucket


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("sub/optimizer.pt", None, "no sub/optimizer.pt, which .stillframe.json names"),
        ("model.pt", b"short", "model.pt has 5 bytes, and .stillframe.json says"),
        ("model.pt", bytes(99_999), "model.pt has 99999 bytes, and .stillframe.json says"),
        (".stillframe.json", b'{"files": ', ".stillframe.json is truncated or damaged"),
        (".stillframe.json", b'{"files": [1]}', ".stillframe.json is truncated or damaged"),
    ],
)
def test_latest_passes_over_objects_that_differ_from_their_marker(
    name, data, reason, two_of_several, caplog, capsys
):
    run_dir = two_of_several.url("run")
    assert stillframe.latest(run_dir) == f"{run_dir}/step5"
    if data is None:
        two_of_several.delete(f"run/step5/{name}")
    else:
        two_of_several.put(f"run/step5/{name}", data)
    with caplog.at_level(logging.WARNING, "stillframe"):
        assert stillframe.latest(run_dir) == f"{run_dir}/step4"
    assert reason in caplog.text
    status, out, err = run(capsys, "verify", f"{run_dir}/step5")
    assert status != 0 and reason in out + err


def test_latest_finds_no_checkpoint_in_objects_without_a_marker(two_of_several, caplog):
    run_dir = two_of_several.url("run")
    two_of_several.delete("run/step5/.stillframe.json")
    with caplog.at_level(logging.WARNING, "stillframe"):
        assert stillframe.latest(run_dir) == f"{run_dir}/step4"
    assert "it has no .stillframe.json, which is written last" in caplog.text
    assert not stillframe.exists(f"{run_dir}/step5")


def test_latest_takes_the_series_whose_checkpoint_was_uploaded_last(memory, tmp_path):
    fix_kinds.torch_file(tmp_path / "x.pt")
    memory.upload(tmp_path / "x.pt", "run/epoch=1-step=200.ckpt")
    memory.upload(tmp_path / "x.pt", "run/last.ckpt")
    assert stillframe.latest(memory.url("run")) == memory.url("run/last.ckpt")
    memory.upload(tmp_path / "x.pt", "run/epoch=2-step=300.ckpt")
    assert stillframe.latest(memory.url("run")) == memory.url("run/epoch=2-step=300.ckpt")


def test_latest_lists_once_and_opens_the_newest_alone(server, tmp_path, capsys):
    fix_kinds.torch_file(tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for step in range(20):
        server.put(f"run/step={step}.ckpt", data)
    server.put("run/notes/readme.txt", b"some words")
    status, out, _ = run(capsys, "latest", server.url("run"))
    assert (status, out) == (0, server.url("run/step=19.ckpt") + "\n")
    assert [line.partition("?")[0] for line in server.lines()] == [
        "GET /bkt",
        "GET /bkt/run/step%3D19.ckpt",
    ]


def test_latest_of_an_empty_url_is_none(bucket, capsys):
    assert stillframe.latest(bucket.url("run")) is None
    status, out, err = run(capsys, "latest", bucket.url("run"))
    assert (status, out) == (2, "") and "no whole checkpoint is in it" in err


@pytest.mark.parametrize("match", [r"GET /bkt\?", "step%3D3", "trainer_state"])
def test_latest_raises_if_the_store_is_down_and_gives_no_older_checkpoint(match, server, tmp_path):
    fix_kinds.torch_file(tmp_path / "x.pt")
    fix_kinds.trainer(tmp_path / "checkpoint-5", 5)
    for step in (1, 2, 3):
        server.put(f"run/step={step}.ckpt", (tmp_path / "x.pt").read_bytes())
    for file in (tmp_path / "checkpoint-5").iterdir():
        server.put(f"trainer/checkpoint-5/{file.name}", file.read_bytes())
    server.fail(500, match=match)
    with pytest.raises(OSError, match="500"):
        stillframe.latest(server.url("trainer" if match == "trainer_state" else "run"))


def test_checkpoint_replaced_while_latest_checks_it_is_checked_again(server, tmp_path, monkeypatch):
    fix_kinds.torch_file(tmp_path / "x.pt")
    big(tmp_path / "y.pt")
    data = (tmp_path / "y.pt").read_bytes()
    server.put("run/last.ckpt", (tmp_path / "x.pt").read_bytes())
    get = Store.get

    def replacing(self, *arguments):
        monkeypatch.setattr(Store, "get", get)
        self.put("run/last.ckpt", [data], len(data))
        return get(self, *arguments)

    monkeypatch.setattr(Store, "get", replacing)
    assert stillframe.latest(server.url("run")) == server.url("run/last.ckpt")


def test_storage_options_of_latest_reach_the_store(server, tmp_path, monkeypatch):
    fix_kinds.torch_file(tmp_path / "x.pt")
    server.put("run/x1.pt", (tmp_path / "x.pt").read_bytes())
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    found = stillframe.latest(server.url("run"), storage_options=server.options)
    assert found == server.url("run/x1.pt")


def test_file_url_is_a_local_directory(tmp_path, capsys):
    fix_kinds.torch_file(tmp_path / "x1.pt")
    assert stillframe.latest(f"file://{tmp_path}") == tmp_path / "x1.pt"
    assert run(capsys, "latest", f"file://{tmp_path}")[:2] == (0, f"{tmp_path / 'x1.pt'}\n")
    assert run(capsys, "verify", f"file://{tmp_path}/x1.pt")[0] == 0
    shutil.rmtree(tmp_path)
    assert run(capsys, "verify", f"file://{tmp_path}/x1.pt")[0] == 2
