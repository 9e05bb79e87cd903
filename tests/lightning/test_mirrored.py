"""`AsyncCheckpointIO(mirror=...)`: what is uploaded, and when files are removed."""

import os
import pickle
import threading

import pytest
import stillframe
import torch
import torch.distributed as dist
from fix_lightning import loader, trainer
from fix_mirror import Child, options_used, store
from stillframe._base.file_kinds import MARKER
from stillframe._base.paths import CheckpointPath
from stillframe._lightning.sharded import CheckpointContents, submit
from stillframe._lightning.writers import PluginOptions
from stillframe._remote import sending

mirror_store = store


def objects(tmp_path):
    return sorted(os.listdir(tmp_path / "store/run"))


def test_checkpoints_are_removed_only_after_their_upload(pkg, tmp_path):
    plugin = pkg.AsyncCheckpointIO(mirror=f"file://{tmp_path}/store/run")
    keep_two = pkg.ModelCheckpoint(
        dirpath=tmp_path / "ckpt",
        every_n_train_steps=2,
        save_top_k=2,
        monitor="clock",
        filename="{step}",
    )
    trainer(pkg, tmp_path, plugin=plugin, callbacks=[keep_two]).fit(pkg.Model(), loader())
    stillframe.wait_all(timeout=60, mirrors=True)
    names = [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    assert objects(tmp_path) == names and sorted(os.listdir(tmp_path / "ckpt")) == names[2:]
    for name in names[2:]:
        assert (tmp_path / "store/run" / name).read_bytes() == (
            tmp_path / "ckpt" / name
        ).read_bytes()


def test_checkpoint_of_another_writer_is_removed_only_after_its_upload(lit, tmp_path, monkeypatch):
    def send(*args, send=sending.send):
        assert goes_on.wait(60)
        return send(*args)

    goes_on = threading.Event()
    monkeypatch.setattr(sending, "send", send)
    plugin = lit.AsyncCheckpointIO(lit.TorchCheckpointIO(), mirror=f"file://{tmp_path}/store/run/")
    plugin.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    plugin.teardown()
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    stillframe.wait_all()
    assert (tmp_path / "a.ckpt").exists()
    goes_on.set()
    stillframe.wait_all(timeout=60, mirrors=True)
    assert objects(tmp_path) == ["a.ckpt"] and not (tmp_path / "a.ckpt").exists()


def test_first_checkpoint_of_another_writer_in_a_new_directory_is_uploaded(lit, tmp_path):
    """The writer makes the directory after the call, and the journal is in it."""
    plugin = lit.AsyncCheckpointIO(lit.TorchCheckpointIO(), mirror=f"file://{tmp_path}/store/run/")
    plugin.save_checkpoint({"n": 1}, tmp_path / "new/er/a.ckpt")
    plugin.teardown()
    stillframe.wait_all(timeout=60, mirrors=True)
    assert objects(tmp_path) == ["a.ckpt"]


def test_checkpoint_that_another_writer_fails_to_write_is_not_uploaded(lit, tmp_path):
    class Failing(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            raise OSError("no")

    (tmp_path / "a.ckpt").touch()
    plugin = lit.AsyncCheckpointIO(Failing(), mirror=f"file://{tmp_path}/store/run/")
    plugin.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    with pytest.raises(OSError, match="no"):
        plugin.teardown()
    stillframe.wait_all(timeout=60, mirrors=True)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_sharded_checkpoint_is_uploaded_with_its_metadata_and_marker_last(tmp_path, engine):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = PluginOptions(mirror=f"file://{tmp_path}/store/run/")
        path = CheckpointPath.of(tmp_path / "last.ckpt")
        contents = CheckpointContents({"w": torch.ones(5)}, {"step": 1}, 0)
        save = submit(contents, path, options.save_options(path.name, overlap=True), engine=engine)
        save.result()
    finally:
        dist.destroy_process_group()
    stillframe.wait_all(timeout=60, mirrors=True)
    files = {each.name for each in (tmp_path / "last.ckpt").iterdir()}
    assert {".metadata", "meta.pt"} < files
    there = tmp_path / "store/run/last.ckpt"
    assert {each.name for each in there.iterdir()} == files | {MARKER}
    written = sorted(there.iterdir(), key=lambda each: each.stat().st_mtime_ns)
    assert [each.name for each in written[-2:]] == [".metadata", MARKER]


@pytest.mark.parametrize("known", ["in the callback", "when the fit starts", "as it is resumed"])
def test_uploads_of_a_killed_process_go_on_before_the_first_save(
    pkg, mirror_store, tmp_path, known
):
    ckpt = tmp_path / "ckpt"

    def work():
        plugin = pkg.AsyncCheckpointIO(mirror=mirror_store.url)
        plugin.save_checkpoint({"n": 1}, ckpt / "a.ckpt")
        plugin.teardown()
        threading.Event().wait()

    if known == "as it is resumed":
        first = pkg.ModelCheckpoint(dirpath=tmp_path / "other", save_last=True)
        run = trainer(pkg, tmp_path, callbacks=[first], max_steps=1)
        run.fit(pkg.Model(), loader())
        ckpt.mkdir()
        os.rename(tmp_path / "other/last.ckpt", ckpt / "last.ckpt")
    with mirror_store.held():
        child = Child(work, tmp_path / "printed")
        mirror_store.wait_for("begin", "a.ckpt")
        child.kill()
        assert mirror_store.names() == set()
    plugin = pkg.AsyncCheckpointIO(mirror=mirror_store.url)
    options = {"plugin": plugin, "max_steps": 2}
    if known == "in the callback":
        trainer(pkg, tmp_path, callbacks=[pkg.ModelCheckpoint(dirpath=ckpt)], **options)
    elif known == "when the fit starts":
        os.rename(ckpt, tmp_path / "checkpoints")  # the directory without a logger
        never = pkg.ModelCheckpoint(every_n_train_steps=100)
        run = trainer(pkg, tmp_path, callbacks=[never], **options)
        run.fit(pkg.Model(), loader())
    else:
        run = trainer(pkg, tmp_path, **options)
        run.fit(pkg.Model(), loader(), ckpt_path=ckpt / "last.ckpt")
    stillframe.wait_all(timeout=60, mirrors=True)
    assert mirror_store.names() == {"a.ckpt"}


def test_mirror_that_is_no_url_is_refused_by_the_plugin(lit, tmp_path):
    with pytest.raises(ValueError, match="mirror has to be a URL"):
        lit.AsyncCheckpointIO(mirror="backup/run")


def test_plugin_with_a_mirror_can_be_pickled(lit, tmp_path, monkeypatch):
    options, used = {"auto_mkdir": True}, options_used(monkeypatch)
    plugin = lit.AsyncCheckpointIO(mirror=f"file://{tmp_path}/store/run/", storage_options=options)
    again = pickle.loads(pickle.dumps(plugin))
    again.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    again.teardown()
    stillframe.wait_all(timeout=60, mirrors=True)
    assert objects(tmp_path) == ["a.ckpt"] and used == [options]
