"""Saves of other libraries that go to an open checkpoint, and those that do not."""

import os
import threading

import pytest
import safetensors.torch
import stillframe
import torch
import transformers.modeling_utils
from stillframe._huggingface.redirect import redirect_saves_to


class Files:
    """Notes what arrives in place of writing it."""

    def __init__(self, path):
        self.path = str(path)
        self.got = []
        os.makedirs(path)

    def save(self, obj, name):
        self.got.append((name, obj))

    def save_safetensors(self, tensors, name, metadata=None):
        self.got.append((name, tensors, metadata))


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path / "open")


def test_saves_into_the_checkpoints_directory_go_to_the_checkpoint(files, tmp_path):
    os.mkdir(tmp_path / "open/sub")
    os.symlink("open", tmp_path / "link")
    tensors = {"a": torch.ones(2)}
    with redirect_saves_to(files):
        torch.save(1, tmp_path / "open/one.pt")
        torch.save(2, str(tmp_path / "link/sub/two.pt"))
        safetensors.torch.save_file(tensors, tmp_path / "open/three.safetensors")
        transformers.modeling_utils.safe_save_file(
            tensors, tmp_path / "open/four.safetensors", metadata={"format": "pt"}
        )
    assert files.got == [
        ("one.pt", 1),
        ("sub/two.pt", 2),
        ("three.safetensors", tensors, None),
        ("four.safetensors", tensors, {"format": "pt"}),
    ]
    assert sorted(os.listdir(tmp_path / "open")) == ["sub"]


def test_saves_outside_the_directory_are_written_by_their_library(files, tmp_path):
    with redirect_saves_to(files), open(tmp_path / "open/file.pt", "wb") as file:
        torch.save(1, tmp_path / "one.pt")
        torch.save(2, file)
        torch.save(3, tmp_path / "open/old.pt", _use_new_zipfile_serialization=False)
        safetensors.torch.save_file({}, tmp_path / "one.safetensors")
        safetensors.torch.save_file({}, tmp_path / "open/other.bin")
    assert files.got == []
    for name in ("one.pt", "open/file.pt", "open/old.pt"):
        assert torch.load(tmp_path / name) in (1, 2, 3)
    assert safetensors.torch.load_file(tmp_path / "open/other.bin") == {}


def test_save_functions_are_the_libraries_own_outside_a_block(files):
    before = torch.save, safetensors.torch.save_file, transformers.modeling_utils.safe_save_file
    with pytest.raises(RuntimeError, match="boom"), redirect_saves_to(files):
        assert torch.save is not before[0]
        raise RuntimeError("boom")
    after = torch.save, safetensors.torch.save_file, transformers.modeling_utils.safe_save_file
    assert before == after


def test_two_threads_may_have_a_checkpoint_open_at_the_same_time(tmp_path):
    first, second = Files(tmp_path / "first"), Files(tmp_path / "second")
    entered, leave = threading.Event(), threading.Event()

    def other():
        with redirect_saves_to(second):
            entered.set()
            leave.wait(60)
            torch.save(2, tmp_path / "second/two.pt")

    thread = threading.Thread(target=other)
    before = torch.save
    with redirect_saves_to(first):
        thread.start()
        entered.wait(60)
        torch.save(1, tmp_path / "first/one.pt")
    leave.set()
    thread.join()
    assert (first.got, second.got) == ([("one.pt", 1)], [("two.pt", 2)])
    assert torch.save is before


def test_foreign_wrapper_around_torch_save_is_left_in_place(files, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", torch.save)  # restores it after the test
    calls = []
    with redirect_saves_to(files):
        ours = torch.save

        def theirs(*args, **kwargs):
            calls.append(args)
            return ours(*args, **kwargs)

        torch.save = theirs
    torch.save(1, tmp_path / "one.pt")
    assert torch.save is theirs
    assert len(calls) == 1
    assert torch.load(tmp_path / "one.pt") == 1


def test_forked_child_writes_its_own_files(files, tmp_path):
    with redirect_saves_to(files):
        child = os.fork()
        if child == 0:
            try:
                torch.save(1, tmp_path / "open/child.pt")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert files.got == []
    assert torch.load(tmp_path / "open/child.pt") == 1


def test_error_of_an_object_that_cannot_be_saved_is_that_of_torch(tmp_path):
    with (
        pytest.raises(Exception, match=r"(?i)pickle"),
        stillframe.checkpoint(tmp_path / "made") as made,
        redirect_saves_to(made),
    ):
        torch.save(lambda: None, os.path.join(made.path, "one.pt"))
    assert os.listdir(tmp_path) == []
