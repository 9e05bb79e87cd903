"""A save that another CheckpointIO makes: its waits, errors and report."""

import contextlib
import os
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import stillframe
import torch
from fix_lightning import load, loader, trainer
from fix_waits import eventually
from stillframe._lightning import wrapped
from stillframe._save import completion, ordered
from stillframe._save.handle import report_of
from stillframe._snapshot.save import SnapshotSave
from stillframe.testing import held

STATE = {"x": torch.ones(90_000)}


def save_of(taken=None):
    save = SnapshotSave("a", "a", None, entered=0.0)
    if taken is not None:
        save.set_snapshot(taken)
    return save


def end_well(save, nbytes):
    save.end(save.report(nbytes, "wrapped"), None)


class Memory:
    """A fake snapshot that is still being copied."""

    nbytes, num_tensors, deferred_nbytes = 12, 1, 0

    def wait(self, timeout):
        raise TimeoutError


@pytest.fixture
def first_of(monkeypatch):
    """Return two saves under way, and the list of those waited for; a wait ends a save."""
    saves = [SimpleNamespace(path=name, ended=False) for name in "ab"]
    for save in saves:
        save.done = lambda save=save: save.ended
    waited = []

    def wait_for_end(save):
        waited.append(save.path)
        save.ended = True

    monkeypatch.setattr(wrapped, "wait_for_end", wait_for_end)
    return saves, waited


def held_saves(lit):
    """Return a CheckpointIO whose saves wait for `go`."""

    class Held(lit.TorchCheckpointIO):
        go = threading.Event()

        def save_checkpoint(self, *args, **kwargs):
            assert self.go.wait(60)
            super().save_checkpoint(*args, **kwargs)

    return Held()


def test_wrapped_saves_count_towards_max_in_flight(lit, tmp_path):
    inner = held_saves(lit)
    engine = stillframe.Engine(max_in_flight=1, when_busy="raise")
    plugin = lit.AsyncCheckpointIO(inner, engine=engine)
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    assert engine.stats()["saves_in_flight"] == 1
    with pytest.raises(stillframe.BusyError, match=r"a\.ckpt"):
        stillframe.async_save(STATE, tmp_path / "b.pt", engine=engine)
    with pytest.raises(stillframe.BusyError, match=r"a\.ckpt"):
        plugin.save_checkpoint(STATE, tmp_path / "b.ckpt")
    inner.go.set()
    plugin.teardown()
    assert engine.stats()["saves_in_flight"] == 0
    stillframe.async_save(STATE, tmp_path / "b.pt", engine=engine).result()
    engine.close()


def test_wrapped_saves_wait_for_a_slot_of_the_engine(lit, tmp_path):
    with stillframe.Engine(max_in_flight=1) as engine:
        plugin = lit.AsyncCheckpointIO(lit.TorchCheckpointIO(), engine=engine)
        with held("fdatasync"):
            first = stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
            saving = threading.Thread(
                target=plugin.save_checkpoint, args=(STATE, tmp_path / "b.ckpt")
            )
            saving.start()
            saving.join(0.2)
            assert saving.is_alive() and not first.done()
        saving.join(60)
        assert not saving.is_alive() and first.done()
        plugin.teardown()


def test_save_that_cannot_be_copied_keeps_no_slot(lit, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no copies")

    with stillframe.Engine(max_in_flight=1, when_busy="raise") as engine:
        plugin = lit.AsyncCheckpointIO(lit.TorchCheckpointIO(), engine=engine)
        with monkeypatch.context() as patch:
            patch.setattr(wrapped, "snapshot_for_pickling", refuse)
            with pytest.raises(RuntimeError, match="no copies") as kept:
                plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        assert engine.stats()["saves_in_flight"] == 0 and kept.tb is not None
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        plugin.teardown()


def test_snapshot_waits_for_the_oldest_saves_memory_first(first_of, monkeypatch):
    saves, waited = first_of

    def full(checkpoint, wait_for_room, **options):
        while not saves[0].ended:
            assert wait_for_room()
        return "taken"

    monkeypatch.setattr(wrapped, "snapshot_for_pickling", full)
    assert wrapped._take(STATE, True, None, saves) == "taken"
    assert waited == ["a"]


def test_state_that_cannot_fit_is_saved_without_a_copy(first_of, monkeypatch):
    saves, waited = first_of

    def full(checkpoint, wait_for_room, **options):
        while wait_for_room():
            pass
        raise stillframe.PoolExhaustedError("full")

    monkeypatch.setattr(wrapped, "snapshot_for_pickling", full)
    assert wrapped._take(STATE, True, None, saves) is None
    assert waited == ["a", "b"]


def test_any_exception_of_the_wrapped_checkpoint_io_fails_its_save(lit, tmp_path):
    """That includes SystemExit, which must not end our thread."""
    go = threading.Event()

    class Leaving(lit.TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            assert go.wait(60)
            raise SystemExit(3)

    plugin = lit.AsyncCheckpointIO(Leaving())
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    (handle,) = [each for each in completion.in_flight.values() if "a.ckpt" in each.path]
    go.set()
    ordered.wait_for_saves_of_path(tmp_path / "a.ckpt")
    assert isinstance(handle.exception(timeout=0), SystemExit)
    assert handle.state == "failed"
    plugin.teardown()
    stillframe.save({}, tmp_path / "good.pt")


def test_interrupted_call_makes_no_save_afterwards(lit, tmp_path, monkeypatch):
    """Ctrl-C comes after the thread has found the work ready, and before the work begins."""
    works = []

    def interrupted(key, kind, work):
        works.append(work)
        raise KeyboardInterrupt

    plugin = lit.AsyncCheckpointIO(lit.TorchCheckpointIO())
    with monkeypatch.context() as patch:
        patch.setattr("stillframe._save.ordered.submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    assert not works[0](True)
    assert os.listdir(tmp_path) == []
    plugin.teardown()


def test_wrapped_checkpoint_io_is_torn_down_after_a_failed_save(lit, tmp_path):
    torn = []

    class Full(lit.TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            raise OSError(28, "full")

        def teardown(self):
            torn.append(True)

    plugin = lit.AsyncCheckpointIO(Full())
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    with pytest.raises(OSError, match="full"):
        plugin.teardown()
    assert torn == [True]
    stillframe.save({}, tmp_path / "good.pt")


def test_fit_inside_an_except_block_raises_the_error_of_the_wrapped_teardown(lit, tmp_path):
    class Stuck(lit.TorchCheckpointIO):
        def teardown(self):
            raise OSError("stuck")

    class Boom(lit.Callback):
        def on_train_start(self, run, module):
            raise ZeroDivisionError

    plugin = lit.AsyncCheckpointIO(Stuck())
    broken = trainer(lit, tmp_path, plugin=plugin, callbacks=[Boom()])
    try:
        broken.fit(lit.Model(), loader())
    except ZeroDivisionError:
        with pytest.raises(OSError, match="stuck"):
            trainer(lit, tmp_path, plugin=plugin).fit(lit.Model(), loader())


def test_on_error_warn_covers_every_exception_outside_training(lit, tmp_path):
    class Odd(lit.TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            raise KeyError("odd")

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(Odd(), on_error="warn"))
    run.fit(lit.Model(), loader())
    with pytest.warns(UserWarning, match="odd"):
        run.save_checkpoint(tmp_path / "a.ckpt")
    stillframe.save({}, tmp_path / "good.pt")


def test_wrapped_checkpoint_io_that_saves_with_our_plugin_is_refused(lit, tmp_path):
    inner = lit.AsyncCheckpointIO(lit.TorchCheckpointIO())

    class Nested(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            inner.save_checkpoint(checkpoint, path)

    plugin = lit.AsyncCheckpointIO(Nested())
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    with pytest.raises(stillframe.StillframeError, match="must not save or load"):
        plugin.teardown()
    assert os.listdir(tmp_path) == []
    stillframe.save({}, tmp_path / "good.pt")


# ---- what the handle says ----


def test_wait_staged_times_out_with_a_message():
    with pytest.raises(TimeoutError, match="not staged yet"):
        save_of(Memory()).wait_staged(timeout=0)


def test_save_without_a_copy_is_never_staged(monkeypatch):
    save, heard = save_of(), []
    monkeypatch.setattr(type(save._outcome), "notify_staged", lambda each: heard.append(each))
    save.record_copied()
    assert not heard
    save.end(None, OSError("full"))
    assert save.state == "failed"
    with contextlib.suppress(OSError):
        save.result()


def test_blocked_s_ends_with_a_save_that_ends_within_its_call():
    save = save_of()
    entered = time.perf_counter()
    end_well(save, 12)
    assert report_of(save).blocked_s >= entered


def test_blocked_s_covers_a_save_made_in_its_call(lit, tmp_path, monkeypatch):
    """The wait does not end when the save is handed over to the thread."""
    begun, reports = threading.Event(), []

    class Waits(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            assert begun.wait(60)
            super().save_checkpoint(checkpoint, path)

    def wait_for_end(save):
        waited_from.append(time.perf_counter() - save._entered)
        begun.set()
        wait(save)

    waited_from, wait = [], wrapped.wait_for_end
    monkeypatch.setattr(wrapped, "wait_for_end", wait_for_end)
    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=1 << 20) as engine:
        plugin = lit.AsyncCheckpointIO(
            Waits(), engine=engine, on_durable=lambda path, report: reports.append(report)
        )
        plugin.save_checkpoint({"x": torch.ones(1 << 20)}, tmp_path / "a.ckpt")
        plugin.teardown()
    assert eventually(lambda: reports)  # callbacks run on a separate thread
    assert reports[0].blocked_s > waited_from[0]


def test_report_has_the_times_of_its_save(lit, tmp_path):
    reports, go = Future(), threading.Event()

    class Waits(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            assert go.wait(60)
            super().save_checkpoint(checkpoint, path)

    plugin = lit.AsyncCheckpointIO(
        Waits(), on_durable=lambda path, report: reports.set_result(report)
    )
    began = time.perf_counter()
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    took = time.perf_counter() - began
    go.set()
    plugin.teardown()
    report = reports.result(timeout=60)
    assert 0 < report.staged_after_s <= report.durable_after_s
    assert 0 < report.blocked_s <= took
    assert report.nbytes == (tmp_path / "a.ckpt").stat().st_size
    assert load(tmp_path / "a.ckpt")["x"].eq(1).all()


def test_report_includes_the_wait_for_a_slot():
    save = save_of()
    entered = time.perf_counter()
    save.record_slot_wait()
    end_well(save, 3)
    assert entered <= save.result().backpressure_s <= save.result().durable_after_s
    assert save.state == "durable"
