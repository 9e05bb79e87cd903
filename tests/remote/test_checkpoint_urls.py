"""Several objects that become one checkpoint at a URL."""

import io
import json
import os
import threading

import pytest
import stillframe
import torch
from fix_store import submit_after_cancel
from fix_waits import eventually
from stillframe._remote import sending
from stillframe._save.core_save import CoreSave
from stillframe.testing import held

BIG = {"a": torch.arange(6_000_000.0)}  # more than one part


def loaded(data):
    return torch.load(io.BytesIO(data))


def write(url, n, *names, options=None):
    with stillframe.checkpoint(url, storage_options=options) as files:
        for name in names:
            files.save({"n": n, **BIG}, name)
        with open(os.path.join(files.path, "config.json"), "w") as file:
            json.dump({"n": n}, file)
    return files.handle


def test_objects_and_marker_are_there_when_the_handle_says_so(server):
    report = write(server.url("run/step-1"), 1, "model.pt", "sub/optimizer.pt").result(60)
    objects = server.objects()
    marker = json.loads(objects.pop("run/step-1/.stillframe.json"))
    assert {name: len(data) for name, data in objects.items()} == {
        f"run/step-1/{name}": nbytes for name, nbytes in marker["files"].items()
    }
    assert sorted(marker["files"]) == ["config.json", "model.pt", "sub/optimizer.pt"]
    assert loaded(objects["run/step-1/sub/optimizer.pt"])["n"] == 1
    assert report.io_mode == "obstore" and report.nbytes == sum(marker["files"].values())
    assert stillframe.exists(server.url("run/step-1"))
    puts = server.lines("^(PUT|POST)")
    assert ".stillframe.json" in puts[-1]


def test_safetensors_shards_and_their_index_are_objects(server):
    with stillframe.checkpoint(server.url("m")) as files:
        files.save_safetensors(
            {f"t{i}": torch.full((1000,), float(i)) for i in range(4)},
            "model.safetensors",
            max_shard_size=8000,
        )
    files.handle.result(60)
    names = sorted(name.removeprefix("m/") for name in server.objects())
    assert "model.safetensors.index.json" in names
    assert "model-00001-of-00002.safetensors" in names


def test_new_checkpoint_replaces_the_old_one_only_when_all_of_it_is_sent(server):
    write(server.url("c"), 1, "model.pt", "gone.pt").result(60)
    server.requests.clear()
    with server.held("DELETE|delete") as hold:
        handle = write(server.url("c"), 2, "model.pt")
        hold.wait_for()  # the old marker is removed: all new bytes were sent
        assert loaded(server.objects()["c/model.pt"])["n"] == 1
        assert server.lines("partNumber=1&")
    handle.result(60)
    objects = server.objects()
    assert sorted(objects) == ["c/.stillframe.json", "c/config.json", "c/model.pt"]
    assert loaded(objects["c/model.pt"])["n"] == 2


def test_failed_object_fails_the_whole_checkpoint_and_leaves_no_marker(server):
    server.fail(403, match="b.pt")
    handle = write(server.url("c"), 1, "a.pt", "b.pt")
    with pytest.raises(stillframe.SaveError, match=r"c/b\.pt"):
        handle.result(60)
    assert not stillframe.exists(server.url("c"))
    assert "c/.stillframe.json" not in server.objects()
    assert not server.unfinished_uploads()


def test_failed_replacement_leaves_the_old_checkpoint(server):
    write(server.url("c"), 1, "a.pt").result(60)
    server.fail(403, match="a.pt")
    with pytest.raises(stillframe.SaveError):
        write(server.url("c"), 2, "a.pt").result(60)
    assert loaded(server.objects()["c/a.pt"])["n"] == 1
    assert "c/.stillframe.json" in server.objects()


def test_object_that_fails_before_its_save_is_submitted_fails_the_checkpoint(server, monkeypatch):
    """The thread that sends an object runs before the save of its bytes has a slot."""
    submit_after_cancel(monkeypatch)
    server.fail(403, match="b.pt")
    handle = write(server.url("c"), 1, "b.pt")
    with pytest.raises(stillframe.SaveError, match=r"c/b\.pt"):
        handle.result(60)


def test_save_interrupted_before_its_submission_ends_its_upload(server, monkeypatch):
    def interrupted(save):
        raise KeyboardInterrupt

    monkeypatch.setattr(CoreSave, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt), stillframe.checkpoint(server.url("c")) as files:
        files.save(BIG, "a.pt")
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "sf-upload"])
    assert server.objects() == {} and not server.unfinished_uploads()


def test_checkpoint_block_that_raises_leaves_no_object(server):
    with pytest.raises(KeyError), stillframe.checkpoint(server.url("c")) as files:
        files.save(BIG, "a.pt")
        directory = files.path
        raise KeyError
    stillframe.wait_all()
    assert not os.path.exists(directory)
    assert "c/.stillframe.json" not in server.objects()


def test_checkpoint_may_be_larger_than_the_pool(memory_files):
    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=1 << 18) as engine:
        for n in (1, 2):
            with stillframe.checkpoint("memory://run/c", engine=engine) as files:
                for name in ("a.pt", "b.pt", "c.pt"):
                    files.save({"n": n, "a": torch.arange(1_000_000.0)}, name)
            files.handle.result(60)
    assert loaded(memory_files.cat("run/c/c.pt"))["n"] == 2


def test_exists_knows_the_names_below_a_checkpoint_under_way(memory_files, tmp_path):
    with held("fdatasync"):
        first = stillframe.async_save({}, tmp_path / "a.pt")
        handle = write("memory://run/c", 1, "a.pt")
        assert stillframe.exists("memory://run/c")
        assert stillframe.exists("memory://run/c/a.pt")
        assert not stillframe.exists("memory://run/c/b.pt")
        assert not handle.done()
    handle.result(60)
    first.result(60)
    stillframe.remove("memory://run/c")
    assert not stillframe.exists("memory://run/c")
    stillframe.wait_all()
    assert memory_files.find("run") == []


def test_cancelled_checkpoint_leaves_no_marker(server, tmp_path):
    with held("fdatasync"):
        first = stillframe.async_save({}, tmp_path / "a.pt")
        handle = write(server.url("c"), 1, "a.pt")
        assert handle.cancel()
    first.result(60)
    stillframe.wait_all()
    assert handle.state == "cancelled"
    assert "c/.stillframe.json" not in server.objects()


def test_cancel_ends_the_upload_of_a_file_that_others_wrote(server, small_parts):
    with server.held("partNumber=1&") as hold:
        with stillframe.checkpoint(server.url("c")) as files:
            files.save({}, "a.pt")
            with open(os.path.join(files.path, "x.bin"), "wb") as file:
                file.truncate(20 * sending._PIECE)  # in 80 parts
        hold.wait_for()
        assert files.handle.cancel()
    stillframe.wait_all()
    assert files.handle.state == "cancelled"
    assert len(server.lines("partNumber")) < 40
    assert server.objects() == {} and not server.unfinished_uploads()


def test_files_that_others_wrote_change_only_without_a_marker(server):
    write(server.url("c"), 1, "model.pt").result(60)
    server.fail(403, times=1, match="PUT .*config.json")
    with pytest.raises(stillframe.SaveError, match="403"):
        write(server.url("c"), 2, "model.pt").result(60)
    assert sorted(server.objects()) == ["c/config.json", "c/model.pt"]
    with server.held("PUT .*config.json") as hold:
        handle = write(server.url("c"), 3, "model.pt")
        hold.wait_for()
        assert "c/.stillframe.json" not in server.objects()
    handle.result(60)
    assert json.loads(server.objects()["c/config.json"]) == {"n": 3}


def test_link_is_sent_as_the_file_that_it_names(memory_files, tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    with stillframe.checkpoint("memory://run/c") as files:
        os.symlink(tmp_path / "x", os.path.join(files.path, "link"))
    files.handle.result(60)
    assert memory_files.cat("run/c/link") == b"content"


def test_local_file_that_cannot_be_read_fails_the_save(memory_files):
    with stillframe.checkpoint("memory://run/c") as files:
        os.symlink("nowhere", os.path.join(files.path, "link"))
    with pytest.raises(stillframe.SaveError, match=r"\[Errno 2\].*memory://run/c") as raised:
        files.handle.result(60)
    assert raised.value.phase == "upload"
    assert memory_files.find("run") == []
