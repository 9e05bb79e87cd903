"""Checkpoints at URLs: stillframe sends them to the store, in the order of the log."""

import os
import queue

import fsspec
import pytest
import torch
from fix_lightning import every_steps, loader, trainer

STATE = {"x": torch.arange(12.0), "n": 3}


@pytest.fixture
def memory():
    """Return fsspec's file system in memory, empty before and after the test."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def test_plugin_sends_checkpoints_to_a_store(lit, tmp_path, memory, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    heard = queue.SimpleQueue()
    plugin = lit.AsyncCheckpointIO(on_durable=lambda *each: heard.put(each))
    paths = ["memory://ours/a.ckpt", "memory://ours/b.ckpt"]
    for path in paths:
        plugin.save_checkpoint(STATE, path)
    plugin.remove_checkpoint(paths[1])
    assert plugin._checkpoints.will_exist(paths[0], memory.exists)
    assert not plugin._checkpoints.will_exist(paths[1], memory.exists)
    assert torch.equal(plugin.load_checkpoint(paths[0])["x"], STATE["x"])
    plugin.teardown()
    (path, report), (other, _) = heard.get(timeout=120), heard.get(timeout=120)
    assert [path, other] == paths
    assert [name.rsplit("/")[-1] for name in memory.ls("ours", detail=False)] == ["a.ckpt"]
    assert report.io_mode == "fsspec" and report.nbytes == memory.size("ours/a.ckpt")
    assert not report.fallbacks and not caplog.messages
    assert os.listdir() == []


def test_scheme_without_a_client_is_refused_by_the_save(lit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugin = lit.AsyncCheckpointIO()
    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        plugin.save_checkpoint(STATE, "nowhere://a.ckpt")
    plugin.teardown()
    assert os.listdir() == []


def test_options_of_a_store_reach_it_and_are_refused_for_local_paths(lit, tmp_path, memory):
    plugin = lit.AsyncCheckpointIO()
    plugin.save_checkpoint(STATE, "memory://ours/a.ckpt", storage_options={"use_listings_cache": 0})
    plugin.teardown()
    assert memory.exists("ours/a.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt", storage_options={"key": "a"})


def test_lightning_reads_remote_checkpoints(lit, memory):
    with fsspec.open("memory://a.ckpt", "wb") as file:
        torch.save(STATE, file)
    loaded = lit.AsyncCheckpointIO().load_checkpoint("memory://a.ckpt")
    assert torch.equal(loaded["x"], STATE["x"])


@pytest.mark.parametrize("top_k", [1, 2])
def test_run_rotates_remote_checkpoints_and_resumes_from_the_last(pkg, tmp_path, memory, top_k):
    def names(directory):
        return sorted(name.rsplit("/")[-1] for name in memory.ls(directory, detail=False))

    def fit(directory, plugin, steps, **options):
        callback = every_steps(pkg, directory, 2, save_top_k=top_k, save_last=True)
        run = trainer(pkg, tmp_path, plugin=plugin, callbacks=[callback], max_steps=steps)
        run.fit(pkg.Model(), loader(), **options)
        return run

    fit("memory://sync", None, 8)
    plugin = pkg.AsyncCheckpointIO()
    fit("memory://ours", plugin, 8)
    assert names("ours") == names("sync") and len(names("ours")) == top_k + 1
    run = fit("memory://ours", plugin, 12, ckpt_path="memory://ours/last.ckpt")
    assert run.global_step == 12
    ours = plugin.load_checkpoint("memory://ours/last.ckpt")
    assert ours["global_step"] == 12


def test_remote_version_numbers_count_saves_in_flight(lit, tmp_path, memory):
    callback = every_steps(
        lit, "memory://versions", 2, save_top_k=-1, filename="m", monitor="clock"
    )
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[callback])
    run.fit(lit.Model(), loader())
    names = sorted(name.rsplit("/")[-1] for name in memory.ls("versions", detail=False))
    assert names == ["m-v1.ckpt", "m-v2.ckpt", "m-v3.ckpt", "m.ckpt"]
