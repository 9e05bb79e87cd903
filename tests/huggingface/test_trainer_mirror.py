"""`Trainer.mirror`: checkpoints are uploaded, and removed only then."""

import os
import threading
from pathlib import Path

import pytest
import stillframe
from fix_mirror import Child, options_used, store
from fix_trainer import OurTrainer, checkpoints, differences, trainer

mirror_store = store


def test_checkpoints_are_uploaded_with_a_marker_and_removed_only_afterwards(tmp_path):
    run = trainer(save_total_limit=1, max_steps=4)
    run.mirror = f"file://{tmp_path}/store/run"
    run.train()
    stillframe.wait_all(timeout=60, mirrors=True)
    there = Path("store/run")
    assert sorted(os.listdir(there)) == ["checkpoint-2", "checkpoint-4"]
    for each in there.iterdir():
        (each / ".stillframe.json").unlink()
    assert checkpoints() == ["checkpoint-4"]
    assert differences("out/checkpoint-4", there / "checkpoint-4") == []
    assert ".stillframe-mirror" not in os.listdir("out")


@pytest.mark.parametrize("given", ["class", "trainer"])
def test_uploads_of_a_killed_process_go_on_before_the_first_save(tmp_path, mirror_store, given):
    class Mirrored(OurTrainer):
        mirror = mirror_store.url if given == "class" else None

    def work():
        with stillframe.checkpoint("out/checkpoint-2", mirror=mirror_store.url) as files:
            files.save({"n": 2}, "model.pt")
        threading.Event().wait()

    os.mkdir("out")
    with mirror_store.held():
        child = Child(work, tmp_path / "printed")
        mirror_store.wait_for("begin", "model.pt")
        child.kill()
    run = trainer(Mirrored, max_steps=1, save_strategy="no")
    if given == "trainer":
        run.mirror = mirror_store.url
        run.train()
    stillframe.wait_all(timeout=60, mirrors=True)
    assert "checkpoint-2/.stillframe.json" in mirror_store.names()


def test_mirror_and_its_options_may_be_attributes_of_the_class(tmp_path, monkeypatch):
    used = options_used(monkeypatch)

    class Mirrored(OurTrainer):
        mirror = f"file://{tmp_path}/store/"
        storage_options = {"auto_mkdir": True}  # noqa: RUF012

    trainer(Mirrored, max_steps=2).train()
    stillframe.wait_all(timeout=60, mirrors=True)
    assert os.listdir("store") == ["checkpoint-2"] and used == [Mirrored.storage_options]
