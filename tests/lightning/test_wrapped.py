"""`AsyncCheckpointIO(checkpoint_io=other)`: another CheckpointIO saves, in the order of the log."""

import gc
import os
import pickle
import threading
import weakref

import fsspec
import numpy as np
import pytest
import stillframe
import torch
from fix_lightning import assert_same, at, copied, every_steps, load, loader, trainer
from fix_processes import LIGHTNING, run_python
from stillframe._base.calls import inside_call
from stillframe._save import completion
from stillframe._save.ordered import wait_for_saves_of_path
from stillframe._snapshot.save import SnapshotSave

SIZE = 300 * 300


class Gate:
    """A gate at which saves wait until the test opens it."""

    def __init__(self, opened=True):
        self.event = threading.Event()
        if opened:
            self.event.set()


def other(pkg, gate=None, calls=None):
    """Return a CheckpointIO that records its calls as (method, name, thread)."""
    calls = [] if calls is None else calls

    class Other(pkg.TorchCheckpointIO):
        def note(self, what, path=None):
            name = None if path is None else os.path.basename(path)
            calls.append((what, name, threading.current_thread().name))

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if gate is not None:
                assert gate.event.wait(60)
            if "fail" in str(path):
                raise OSError(28, "full", str(path))
            super().save_checkpoint(checkpoint, path)
            self.note("save", path)
            self.options = storage_options

        def load_checkpoint(self, path, *args, **kwargs):
            self.note("load", path)
            return super().load_checkpoint(path, *args, **kwargs)

        def remove_checkpoint(self, path):
            super().remove_checkpoint(path)
            self.note("remove", path)

        def teardown(self):
            self.note("teardown")

    io = Other()
    io.calls = calls
    return io


def state(value=1.0):
    return {"x": torch.full((SIZE,), value), "y": {"n": 3}}


def test_save_waits_for_the_memory_of_a_wrapped_save(pkg, tmp_path):
    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=1 << 20) as engine:
        gate = Gate(opened=False)
        plugin = pkg.AsyncCheckpointIO(other(pkg, gate), engine=engine)
        plugin.save_checkpoint(state(), tmp_path / "a.ckpt")  # it occupies the only block
        opener = threading.Timer(0.2, gate.event.set)
        opener.start()
        stillframe.async_save(state(2.0), tmp_path / "b.pt", engine=engine).result()
        opener.join()
        plugin.teardown()
    assert torch.equal(load(tmp_path / "b.pt")["x"], torch.full((SIZE,), 2.0))


def test_snapshot_inside_a_wrapped_save_does_not_wait_forever_for_its_own_memory(
    pkg, tmp_path, monkeypatch
):
    monkeypatch.setattr("stillframe._snapshot.snapshot._EXTERNAL_WORK_WAIT_S", 0.05)

    class Snapping(pkg.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            stillframe.snapshot(checkpoint, engine=engine)

    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=1 << 20) as engine:
        plugin = pkg.AsyncCheckpointIO(Snapping(), engine=engine)
        plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
        with pytest.raises(stillframe.PoolExhaustedError, match="snapshots hold 1 MiB of it"):
            plugin.teardown()


def test_wrapped_checkpoint_io_saves_a_snapshot_on_another_thread(pkg, tmp_path):
    gate = Gate(opened=False)
    io = other(pkg, gate)
    plugin = pkg.AsyncCheckpointIO(io)
    saved = state()
    saved["array"], saved["object"] = np.ones(5), Counter(1)
    plugin.save_checkpoint(saved, tmp_path / "a.ckpt")
    saved["x"].zero_()
    saved["y"]["n"] = 4
    saved["array"][:] = 0
    saved["object"].count = 2
    assert not (tmp_path / "a.ckpt").exists()
    gate.event.set()
    plugin.teardown()
    loaded = load(tmp_path / "a.ckpt")
    assert torch.equal(loaded["x"], torch.ones(SIZE))
    assert loaded["y"]["n"] == 3
    assert (loaded["array"] == 1).all()
    assert loaded["object"].count == 1
    assert io.calls == [("save", "a.ckpt", "sf-ordered"), ("teardown", None, "MainThread")]


class Counter:
    def __init__(self, count):
        self.count = count


@pytest.mark.parametrize("tree", [{}, {"n": 3}, {"x": torch.empty(0)}])
def test_checkpoint_without_tensor_bytes_is_saved(lit, tmp_path, tree):
    plugin = lit.AsyncCheckpointIO(other(lit))
    plugin.save_checkpoint(tree, tmp_path / "a.ckpt")
    plugin.teardown()
    assert list(load(tmp_path / "a.ckpt")) == list(tree)


def test_memory_is_returned_when_the_wrapped_save_returns(lit, tmp_path):
    gate = Gate(opened=False)
    with stillframe.Engine(pool_bytes=8 << 20, block_bytes=1 << 20) as engine:
        plugin = lit.AsyncCheckpointIO(other(lit, gate), engine=engine)
        plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
        assert engine.stats()["leased_bytes"] > 0
        gate.event.set()
        plugin.teardown()
        assert engine.stats()["leased_bytes"] == 0


def under_way(path):
    """Return the handle of a save that has not ended, or None."""
    found = [save for save in completion.in_flight.values() if save.path == str(path)]
    return found[0] if found else None


def test_handle_waits_for_the_wrapped_save_and_then_drops_it(lit, tmp_path):
    gate, heard = Gate(opened=False), threading.Event()
    plugin = lit.AsyncCheckpointIO(
        other(lit, gate), pool_bytes=64 << 20, on_durable=lambda path, report: heard.set()
    )
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    handle = under_way(tmp_path / "a.ckpt")
    taken = weakref.ref(handle.snapshot())
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.05)
    assert handle.state == "writing"
    gate.event.set()
    assert heard.wait(60)  # although no thread waits for the save
    handle.result()
    assert under_way(tmp_path / "a.ckpt") is None
    gc.collect()
    assert taken() is None
    plugin.teardown()


def test_wrapped_checkpoint_io_that_waits_for_its_own_save_gets_an_error(lit, tmp_path):
    errors, begun = [], threading.Event()

    class Waiting(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            assert begun.wait(60)
            try:
                under_way(path).result(timeout=5)
            except stillframe.StillframeError as error:
                errors.append(str(error))

    plugin = lit.AsyncCheckpointIO(Waiting(), pool_bytes=64 << 20)
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    begun.set()
    plugin.teardown()
    assert len(errors) == 1 and "wait for its own end" in errors[0]


def test_memory_is_returned_before_the_save_reports_its_end(lit, tmp_path, monkeypatch):
    leased, real = [], SnapshotSave.end

    def end(self, *args):
        leased.append(engine.stats()["leased_bytes"])
        real(self, *args)

    monkeypatch.setattr(SnapshotSave, "end", end)
    with stillframe.Engine(pool_bytes=8 << 20, block_bytes=1 << 20) as engine:
        plugin = lit.AsyncCheckpointIO(other(lit), engine=engine)
        plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
        plugin.teardown()
    assert leased == [0]


def test_error_references_no_frames_of_the_wrapped_checkpoint_io(lit, tmp_path):
    gate = Gate(opened=False)
    plugin = lit.AsyncCheckpointIO(other(lit, gate), pool_bytes=64 << 20)
    plugin.save_checkpoint(state(), tmp_path / "fail.ckpt")
    handle = under_way(tmp_path / "fail.ckpt")
    gate.event.set()
    error = handle.exception()
    assert isinstance(error, OSError) and error.__traceback__ is None
    plugin.teardown()


def test_save_that_cannot_be_submitted_is_not_under_way(lit, tmp_path, monkeypatch):
    def submit(*args):
        raise MemoryError("no room in the log")

    plugin = lit.AsyncCheckpointIO(other(lit), pool_bytes=64 << 20)
    with monkeypatch.context() as patch:
        patch.setattr("stillframe._save.ordered.submit", submit)
        with pytest.raises(MemoryError, match="no room"):
            plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    assert under_way(tmp_path / "a.ckpt") is None
    plugin.teardown()


def test_wrapped_saves_removes_and_loads_take_effect_in_order(lit, tmp_path):
    gate = Gate(opened=False)
    io = other(lit, gate)
    plugin = lit.AsyncCheckpointIO(checkpoint_io=io)
    plugin.save_checkpoint(state(1.0), tmp_path / "a.ckpt")
    plugin.save_checkpoint(state(2.0), tmp_path / "b.ckpt")
    run_later = threading.Timer(0.1, gate.event.set)
    assert stillframe.exists(tmp_path / "a.ckpt") and stillframe.exists(tmp_path / "b.ckpt")
    assert os.listdir(tmp_path) == []
    run_later.start()
    assert plugin.load_checkpoint(tmp_path / "b.ckpt")["x"][0] == 2.0
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert not stillframe.exists(tmp_path / "a.ckpt")
    plugin.teardown()
    assert [call[:2] for call in io.calls] == [
        ("save", "a.ckpt"),
        ("save", "b.ckpt"),
        ("load", "b.ckpt"),
        ("remove", "a.ckpt"),
        ("teardown", None),
    ]
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_order_holds_between_wrapped_and_our_own_saves_and_removes(lit, tmp_path):
    gate = Gate(opened=False)
    wrapped, plain = lit.AsyncCheckpointIO(other(lit, gate)), lit.AsyncCheckpointIO()
    stillframe.save({"x": 1}, tmp_path / "old.ckpt")
    wrapped.save_checkpoint(state(), tmp_path / "a.ckpt")
    plain.save_checkpoint(state(2.0), tmp_path / "a.ckpt")
    stillframe.remove(tmp_path / "old.ckpt")
    assert (tmp_path / "old.ckpt").exists()
    gate.event.set()
    stillframe.wait_all()
    assert not (tmp_path / "old.ckpt").exists()
    assert load(tmp_path / "a.ckpt")["x"][0] == 2.0


def test_wrapped_error_is_raised_once_and_keeps_the_old_file(lit, tmp_path, caplog):
    io = other(lit)
    plugin = lit.AsyncCheckpointIO(io)
    plugin.save_checkpoint(state(), tmp_path / "good.ckpt")
    plugin.save_checkpoint(state(), tmp_path / "fail.ckpt")
    plugin.remove_checkpoint(tmp_path / "good.ckpt")
    wait_for_saves_of_path(tmp_path / "good.ckpt")
    with pytest.raises(OSError, match="full"):
        plugin.save_checkpoint(state(), tmp_path / "more.ckpt")
    plugin.teardown()
    plugin.teardown()
    stillframe.wait_all()
    assert sorted(os.listdir(tmp_path)) == ["good.ckpt", "more.ckpt"]
    assert "was not removed" in caplog.text


def test_wait_all_waits_for_wrapped_saves_and_raises_uncollected_errors(lit, tmp_path):
    gate = Gate(opened=False)
    plugin = lit.AsyncCheckpointIO(other(lit, gate), pool_bytes=64 << 20)
    plugin.save_checkpoint(state(), tmp_path / "fail.ckpt")
    with pytest.raises(TimeoutError):
        stillframe.wait_all(timeout=0.05)
    gate.event.set()
    with pytest.raises(OSError, match="full"):
        stillframe.wait_all()
    plugin.teardown()


def test_at_most_max_in_flight_wrapped_saves_wait(lit, tmp_path):
    gate = Gate(opened=False)
    plugin = lit.AsyncCheckpointIO(other(lit, gate), when_busy="raise", pool_bytes=64 << 20)
    for name in "ab":
        plugin.save_checkpoint(state(), tmp_path / f"{name}.ckpt")
    with pytest.raises(stillframe.BusyError):
        plugin.save_checkpoint(state(), tmp_path / "c.ckpt")
    with inside_call():  # as in a signal handler that interrupts a call of ours
        plugin.save_checkpoint(state(), tmp_path / "d.ckpt")
    gate.event.set()
    plugin.teardown()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt", "d.ckpt"]


def test_third_wrapped_save_waits_for_the_first(lit, tmp_path):
    gate = Gate(opened=False)
    plugin = lit.AsyncCheckpointIO(other(lit, gate), pool_bytes=64 << 20)
    for name in "ab":
        plugin.save_checkpoint(state(), tmp_path / f"{name}.ckpt")
    threading.Timer(0.1, gate.event.set).start()
    plugin.save_checkpoint(state(), tmp_path / "c.ckpt")
    assert (tmp_path / "a.ckpt").exists()
    plugin.teardown()
    assert len(os.listdir(tmp_path)) == 3


def test_checkpoint_larger_than_the_pool_is_saved_in_the_call(lit, tmp_path, caplog):
    plugin = lit.AsyncCheckpointIO(other(lit), pool_bytes=16 << 20)
    big = {"x": torch.ones(8 << 20)}
    plugin.save_checkpoint(big, tmp_path / "a.ckpt")
    big["x"].zero_()
    plugin.teardown()
    assert torch.equal(load(tmp_path / "a.ckpt")["x"], torch.ones(8 << 20))
    assert "does not fit into the pool" in caplog.text


def test_two_snapshots_take_turns_in_a_pool_with_room_for_one(lit, tmp_path, caplog):
    plugin = lit.AsyncCheckpointIO(other(lit), pool_bytes=48 << 20, max_in_flight=4)
    for nr in range(4):
        plugin.save_checkpoint({"x": torch.full((8 << 20,), float(nr))}, tmp_path / f"{nr}.ckpt")
    plugin.teardown()
    for nr in range(4):
        assert load(tmp_path / f"{nr}.ckpt")["x"][-1] == nr
    assert "does not fit into the pool" not in caplog.text


def test_wrapped_checkpoint_io_may_take_a_snapshot_while_a_save_waits(lit, tmp_path):
    gate = Gate(opened=False)
    taken = []
    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=1 << 20) as engine:

        class Snapping(lit.TorchCheckpointIO):
            def save_checkpoint(self, checkpoint, path, storage_options=None):
                assert gate.event.wait(60)
                own = stillframe.snapshot({"x": torch.ones(10)}, engine=engine)
                taken.append(float(own.tree["x"].sum()))
                own.release()
                super().save_checkpoint(checkpoint, path)

        plugin = lit.AsyncCheckpointIO(Snapping())
        plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
        later = stillframe.async_save(state(2.0), tmp_path / "b.pt", engine=engine)
        later.wait_staged()
        gate.event.set()
        try:
            later.result(timeout=120)
        finally:
            later.cancel()  # if the snapshot waited for it, neither would ever end
        plugin.teardown()
    assert taken == [10.0]
    assert load(tmp_path / "a.ckpt")["x"][0] == 1


def test_training_is_the_same_as_with_the_wrapped_checkpoint_io_alone(pkg, tmp_path):
    expected = {}

    class Keep(pkg.Callback):
        def on_save_checkpoint(self, run, module, checkpoint):
            expected[run.global_step] = copied(
                {key: checkpoint[key] for key in ("state_dict", "optimizer_states")}
            )

    reports = []
    plugin = pkg.AsyncCheckpointIO(
        other(pkg), on_durable=lambda path, report: reports.append(report)
    )
    callbacks = [Keep(), every_steps(pkg, tmp_path / "c", 1, save_top_k=-1, save_last="link")]
    run = trainer(pkg, tmp_path, plugin=plugin, callbacks=callbacks, max_steps=10)
    run.fit(pkg.Model(), loader())
    assert sorted(expected) == list(range(1, 11))
    for step, tree in expected.items():
        saved = load(tmp_path / "c" / f"step={step}.ckpt")
        assert_same({key: saved[key] for key in tree}, tree)
    assert os.readlink(tmp_path / "c" / "last.ckpt") == "step=10.ckpt"
    assert {report.io_mode for report in reports} == {"wrapped"}
    assert reports[0].nbytes == (tmp_path / "c" / "step=1.ckpt").stat().st_size


def test_rotation_over_a_slow_checkpoint_io_keeps_exactly_one_file(lit, tmp_path):
    gate = Gate()
    gate.event.wait = lambda timeout: not threading.Event().wait(0.1)  # each save takes 0.1 s
    io = other(lit, gate)
    callbacks = [every_steps(lit, tmp_path / "c", 1)]
    trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(io), callbacks=callbacks, max_steps=6).fit(
        lit.Model(), loader()
    )
    assert os.listdir(tmp_path / "c") == ["step=6.ckpt"]
    whats = [call[0] for call in io.calls]
    assert whats.count("teardown") == 1
    assert whats.index("remove") > whats.index("save") + 1


def test_wrapped_save_outside_training_is_complete_on_return(lit, tmp_path):
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(other(lit)))
    run.fit(lit.Model(), loader())
    run.save_checkpoint(tmp_path / "a.ckpt", storage_options={"a": 1})
    assert load(tmp_path / "a.ckpt")["global_step"] == 8
    assert run.strategy.checkpoint_io._checkpoints.writers.wrapped_io.io.options == {"a": 1}
    with pytest.raises(OSError, match="full"):
        run.save_checkpoint(tmp_path / "fail.ckpt")


def test_on_error_warn_covers_every_exception(lit, tmp_path):
    class Odd(lit.TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            raise KeyError("odd")

    plugin = lit.AsyncCheckpointIO(Odd(), on_error="warn")
    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[every_steps(lit, tmp_path / "c", 4)])
    with pytest.warns(UserWarning, match="odd"):
        run.fit(lit.Model(), loader())


def test_remote_paths_go_to_the_wrapped_checkpoint_io(lit):
    def is_there(path):
        return fsspec.filesystem("memory").exists("wrapped/a.ckpt")

    gate = Gate(opened=False)
    plugin = lit.AsyncCheckpointIO(other(lit, gate))
    path = "memory://wrapped/a.ckpt"
    plugin.save_checkpoint(state(), path)
    assert not is_there(path) and plugin._checkpoints.will_exist(path, is_there)
    gate.event.set()
    assert plugin.load_checkpoint(path)["y"]["n"] == 3
    plugin.remove_checkpoint(path)
    assert not plugin._checkpoints.will_exist(path, is_there)
    plugin.teardown()
    whats = [call[0] for call in plugin._checkpoints.writers.wrapped_io.io.calls]
    assert whats == ["save", "load", "remove", "teardown"]
    assert not is_there(path)


def test_wrapper_without_a_checkpoint_io_uses_lightnings(pkg, tmp_path):
    import importlib

    package = "lightning.pytorch" if pkg.name == "lightning" else "pytorch_lightning"
    stock = importlib.import_module(f"{package}.plugins.io").AsyncCheckpointIO()
    plugin = pkg.AsyncCheckpointIO(stock)
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    plugin.teardown()
    assert load(tmp_path / "a.ckpt")["y"]["n"] == 3


def test_our_own_plugin_cannot_be_wrapped(lit):
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    for io in (lit.AsyncCheckpointIO(), _WrappingCheckpointIO(lit.AsyncCheckpointIO())):
        with pytest.raises(ValueError, match="wait for itself"):
            lit.AsyncCheckpointIO(io)


def test_wrapped_checkpoint_io_that_saves_with_stillframe_gets_an_error(lit, tmp_path):
    class Nested(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            stillframe.save(checkpoint, path)

    plugin = lit.AsyncCheckpointIO(Nested())
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    with pytest.raises(stillframe.StillframeError, match="must not save or load with stillframe"):
        plugin.teardown()


@pytest.mark.parametrize("what", ["save", "remove"])
def test_wrapped_checkpoint_io_never_waits_for_itself(lit, tmp_path, what):
    begun, errors = threading.Event(), {}

    def call_everything():
        begun.wait(60)
        for name, call in {
            "result": outer[0].result,
            "exception": outer[0].exception,
            "upload": outer[0].upload_completion.result,
            "close": engine.close,
            "wait_all": stillframe.wait_all,
            "save": lambda: stillframe.save({}, tmp_path / "inner.pt", engine=engine),
            "load": lambda: stillframe.load(tmp_path / "outer.pt"),
        }.items():
            try:
                errors[name] = call()
            except stillframe.StillframeError as error:
                errors[name] = error
        # These calls do not wait for the log.
        outer[0].wait_staged()
        outer[0].staging_completion.result()
        stillframe.snapshot({"w": torch.ones(3)}, engine=engine).release()
        stillframe.remove(tmp_path / "nothing")
        errors["exists"] = stillframe.exists(tmp_path / "outer.pt")

    class Busy(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if what == "save":
                call_everything()
            super().save_checkpoint(checkpoint, path)

        def remove_checkpoint(self, path):
            if what == "remove":
                call_everything()
            super().remove_checkpoint(path)

    outer = []
    engine = stillframe.Engine(pool_bytes=4 << 24)
    plugin = lit.AsyncCheckpointIO(Busy())
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    outer.append(stillframe.async_save({"w": torch.ones(3)}, tmp_path / "outer.pt", engine=engine))
    stillframe.remove(tmp_path / "nothing")
    begun.set()
    plugin.teardown()
    assert errors.pop("exists") is True
    assert len(errors) == 7
    assert all("wait for its own end" in str(error) for error in errors.values()), errors
    outer[0].result()
    engine.close()
    assert os.listdir(tmp_path) == ["outer.pt"]


def test_plugin_is_pickled_with_the_wrapped_checkpoint_io(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO(lit.TorchCheckpointIO())
    again = pickle.loads(pickle.dumps(plugin))
    again.save_checkpoint(state(), tmp_path / "a.ckpt")
    again.teardown()
    assert load(tmp_path / "a.ckpt")["y"]["n"] == 3


def test_training_exception_is_not_replaced(lit, tmp_path, caplog):
    def fails(run):
        run.save_checkpoint(tmp_path / "fail.ckpt")

    def boom(run):
        raise ValueError("boom")

    plugin = lit.AsyncCheckpointIO(other(lit))
    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[at(lit, {2: fails, 3: boom})])
    with pytest.raises(ValueError, match="boom"):
        run.fit(lit.Model(), loader())
    assert "full" in caplog.text


def test_wrapped_teardown_error_does_not_replace_the_training_exception(lit, tmp_path, caplog):
    class Stuck(lit.TorchCheckpointIO):
        def teardown(self):
            raise OSError("stuck")

    def boom(run):
        raise ZeroDivisionError("boom")

    for actions, raised in (({}, OSError), ({3: boom}, ZeroDivisionError)):
        plugin = lit.AsyncCheckpointIO(Stuck())
        run = trainer(lit, tmp_path, plugin=plugin, callbacks=[at(lit, actions)])
        with pytest.raises(raised):
            run.fit(lit.Model(), loader())
    assert "stuck" in caplog.text


def test_wrapped_save_in_flight_at_exit_is_finished(tmp_path):
    code = (
        "import sys, time, torch\n"
        "from lightning.fabric.plugins import TorchCheckpointIO\n"
        "from stillframe.lightning import AsyncCheckpointIO\n"
        "import stillframe._save.exit as at_exit\n"
        "at_exit._QUIET_S = 0.1\n"
        "class Slow(TorchCheckpointIO):\n"
        "    def save_checkpoint(self, *args, **kwargs):\n"
        "        time.sleep(1)\n"
        "        super().save_checkpoint(*args, **kwargs)\n"
        "AsyncCheckpointIO(Slow()).save_checkpoint({'x': torch.ones(5)}, sys.argv[1])\n"
    )
    path = tmp_path / "a.ckpt"
    done = run_python("-W", "ignore", "-c", code, path, imported=LIGHTNING)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load(path)["x"], torch.ones(5))
    assert f"waiting for {path} " in done.stderr
