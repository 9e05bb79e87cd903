"""The plugin by itself: its options, its calls, its paths."""

import inspect
import os
import pickle
import queue
import signal
import sys

import pytest
import stillframe
import torch
from fix_holds import held_until_awaited
from fix_lightning import VERSION, load
from lightning.fabric.plugins import TorchCheckpointIO
from stillframe import _core
from stillframe._lightning import work
from stillframe.testing import held, slow

STATE = {"x": torch.arange(12.0), "n": 3}


def test_plugin_has_the_documented_options(pkg):
    parameters = inspect.signature(pkg.AsyncCheckpointIO).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "checkpoint_io": None,
        "engine": None,
        "pool_bytes": None,
        "max_in_flight": 2,
        "when_busy": "wait",
        "durable": True,
        "overlap": True,
        "check_mutation": False,
        "on_durable": None,
        "on_error": "raise",
        "log_metrics": False,
        "deadline": None,
        "mirror": None,
        "storage_options": None,
    }
    positional = [each.name for each in parameters.values() if each.kind is not each.KEYWORD_ONLY]
    assert positional == ["checkpoint_io"]


def test_unknown_on_error_value_is_refused(lit):
    with pytest.raises(ValueError, match="on_error"):
        lit.AsyncCheckpointIO(on_error="ignore")
    for option in ("overlap", "log_metrics", "durable"):
        with pytest.raises(TypeError, match=f"{option} has to be True or False, not 'no'"):
            lit.AsyncCheckpointIO(**{option: "no"})


def test_skipping_saves_is_refused_with_the_reason(pkg):
    with pytest.raises(ValueError, match="ModelCheckpoint removes the previous file"):
        pkg.AsyncCheckpointIO(when_busy="skip")


def test_engine_that_skips_saves_is_refused_with_the_same_reason(lit, tmp_path, monkeypatch):
    import stillframe._lightning.writers

    with stillframe.Engine(when_busy="skip") as engine:
        with pytest.raises(ValueError, match="ModelCheckpoint removes the previous file"):
            lit.AsyncCheckpointIO(engine=engine)
        # As after stillframe.configure(when_busy="skip").
        monkeypatch.setattr(
            stillframe._lightning.writers, "engine_or_default", lambda given: engine
        )
        with pytest.raises(ValueError, match="ModelCheckpoint removes the previous file"):
            lit.AsyncCheckpointIO().save_checkpoint(STATE, tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"when_busy": "later"}, ValueError),
        ({"max_in_flight": 0}, ValueError),
        ({"max_in_flight": 1.5}, TypeError),
        ({"pool_bytes": 4096}, ValueError),
    ],
)
def test_invalid_engine_option_is_refused_at_once(lit, options, error):
    with pytest.raises(error, match=next(iter(options))):
        lit.AsyncCheckpointIO(**options)


def test_argument_error_names_the_public_class(lit):
    with pytest.raises(ValueError, match="when_busy has to be 'wait' or 'raise', not 'later'"):
        lit.AsyncCheckpointIO(when_busy="later")
    module = sys.modules[lit.AsyncCheckpointIO.__module__]
    for cls in (module.AsyncCheckpointIO, module.CPUOffloadCallback):
        with pytest.raises(TypeError, match=rf"^{cls.__name__}\.__init__\(\) got an unexpected"):
            cls(durability=True)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_io": "torch"},
        {"checkpoint_io": TorchCheckpointIO},
        {"engine": 64 << 20},
        {"on_durable": "print"},
    ],
)
def test_an_object_of_the_wrong_kind_is_refused_at_once(lit, options):
    with pytest.raises(TypeError, match=next(iter(options))):
        lit.AsyncCheckpointIO(**options)


@pytest.mark.parametrize(
    "options", [{"pool_bytes": 64 << 20}, {"max_in_flight": 3}, {"when_busy": "raise"}]
)
def test_engine_together_with_engine_options_is_refused(lit, options):
    with stillframe.Engine() as engine, pytest.raises(ValueError, match="engine="):
        lit.AsyncCheckpointIO(engine=engine, **options)


def test_the_given_engine_is_used_and_not_closed(lit, tmp_path):
    with stillframe.Engine() as engine:
        plugin = lit.AsyncCheckpointIO(engine=engine)
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        plugin.teardown()
        assert engine.stats()["saves_total"] == 1
        plugin.save_checkpoint(STATE, tmp_path / "b.ckpt")
        plugin.teardown()
        assert engine.stats()["saves_total"] == 2


def test_default_engine_is_used_unless_options_need_another(lit, tmp_path):
    before = stillframe.default_engine().stats()["saves_total"]
    for plugin in (lit.AsyncCheckpointIO(), lit.AsyncCheckpointIO(max_in_flight=3)):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        plugin.teardown()
        assert load(tmp_path / "a.ckpt")["n"] == 3
    assert stillframe.default_engine().stats()["saves_total"] == before + 1


def test_plugins_own_engine_exists_from_first_save_to_teardown(lit, tmp_path, monkeypatch):
    import stillframe._lightning.writers

    made, open_now = [], []

    class Engine(stillframe.Engine):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(options)
            open_now.append(self)

        def close(self):
            super().close()
            if self in open_now:
                open_now.remove(self)

    monkeypatch.setattr(stillframe._lightning.writers, "Engine", Engine)
    plugin = lit.AsyncCheckpointIO(pool_bytes=64 << 20)
    assert open_now == []
    for _ in range(2):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        plugin.save_checkpoint(STATE, tmp_path / "b.ckpt")
        assert len(open_now) == 1
        assert open_now[0].stats()["saves_total"] == 2
        plugin.teardown()
        assert open_now == []
        plugin.teardown()
    assert made[-1] == {"pool_bytes": 64 << 20, "max_in_flight": 2, "when_busy": "wait"}


def test_methods_accept_arguments_by_position_and_by_name(pkg, tmp_path):
    plugin = pkg.AsyncCheckpointIO()
    plugin.save_checkpoint(STATE, tmp_path / "trainer.ckpt", storage_options=None)
    plugin.save_checkpoint(
        checkpoint=STATE, path=str(tmp_path / "fabric.ckpt"), storage_options=None
    )
    plugin.save_checkpoint(STATE, tmp_path / "all.ckpt", None)
    for name in ("trainer", "fabric", "all"):
        path = tmp_path / f"{name}.ckpt"
        loaded = (
            plugin.load_checkpoint(path),
            plugin.load_checkpoint(path, None),
            plugin.load_checkpoint(path=path, map_location="cpu"),
        )
        if VERSION >= (2, 6):
            loaded += (
                plugin.load_checkpoint(path, map_location=None, weights_only=True),
                plugin.load_checkpoint(path, weights_only=False),
            )
        for each in loaded:
            assert torch.equal(each["x"], STATE["x"])
    plugin.remove_checkpoint(tmp_path / "all.ckpt")
    plugin.remove_checkpoint(path=str(tmp_path / "fabric.ckpt"))
    plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["trainer.ckpt"]


def test_load_raises_the_errors_of_lightnings_plugin(pkg, tmp_path):
    for path, options in ((tmp_path / "none.ckpt", {}), (tmp_path / "a.ckpt", {"no_such": 1})):
        raised = []
        for plugin in (pkg.TorchCheckpointIO(), pkg.AsyncCheckpointIO()):
            with pytest.raises(Exception) as caught:
                plugin.load_checkpoint(path, **options)
            raised.append((caught.type, str(caught.value)))
        assert raised[0] == raised[1]


def test_storage_options_are_refused_with_lightnings_message(pkg, tmp_path):
    messages = []
    for plugin in (pkg.TorchCheckpointIO(), pkg.AsyncCheckpointIO()):
        with pytest.raises(TypeError) as caught:
            plugin.save_checkpoint(STATE, tmp_path / "a.ckpt", storage_options={"x": 1})
        messages.append(str(caught.value).replace(type(plugin).__name__, "CLASS"))
    assert messages[0] == messages[1]
    assert not (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize("ours", [stillframe.save, stillframe.async_save])
def test_plugin_saves_if_torch_save_is_replaced_by_ours(lit, tmp_path, monkeypatch, caplog, ours):
    monkeypatch.setattr(torch, "save", ours)
    monkeypatch.setattr(torch, "load", stillframe.load)
    plugin = lit.AsyncCheckpointIO()
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["n"] == STATE["n"]
    plugin.teardown()
    assert stillframe.load(tmp_path / "a.ckpt", weights_only=False)["n"] == STATE["n"]
    assert "torch.save is not torch's own" not in caplog.text


def test_a_replaced_torch_save_is_called(lit, tmp_path, monkeypatch, caplog):
    """A user who replaced torch.save by a wrapper expects that checkpoints are saved through it."""
    heard, own = queue.SimpleQueue(), torch.save

    def layer(obj, file, **options):
        own({"layer": obj}, file, **options)

    plugin = lit.AsyncCheckpointIO(on_durable=lambda path, report: heard.put(report))
    monkeypatch.setattr(torch, "save", layer)
    for name in ("a", "b"):
        plugin.save_checkpoint(STATE, tmp_path / f"{name}.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.teardown()
    stillframe.wait_all()
    monkeypatch.undo()
    assert load(tmp_path / "b.ckpt")["layer"]["n"] == 3
    assert not (tmp_path / "a.ckpt").exists()
    assert caplog.text.count("torch.save is not torch's own") == 1
    for _ in range(2):
        assert "TorchCheckpointIO" in heard.get(timeout=120).fallbacks[0]
    plugin.save_checkpoint(STATE, tmp_path / "c.ckpt")
    plugin.teardown()
    assert load(tmp_path / "c.ckpt")["n"] == 3


def test_a_load_waits_for_the_save(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO()
    with held_until_awaited("fdatasync"):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        assert not (tmp_path / "a.ckpt").exists()
        assert plugin.load_checkpoint(tmp_path / "a.ckpt")["n"] == 3
    plugin.teardown()


def test_remove_returns_at_once_and_runs_after_the_save(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO()
    with held("fdatasync"):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        plugin.remove_checkpoint(tmp_path / "a.ckpt")
        assert _core.log_pending() == 2  # both calls have returned, and neither operation has ended
    plugin.teardown()
    assert list(tmp_path.iterdir()) == []


def test_teardown_waits_for_the_remove_of_a_relative_name(lit, tmp_path, monkeypatch):
    (tmp_path / "a.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    plugin = lit.AsyncCheckpointIO()
    with held("unlink"):
        plugin.remove_checkpoint("a.ckpt")
        monkeypatch.chdir("/")
        assert (tmp_path / "a.ckpt").exists()
    plugin.teardown()
    assert not (tmp_path / "a.ckpt").exists()


def test_remove_takes_directories_and_ignores_missing_names(lit, tmp_path):
    sharded = tmp_path / "sharded.ckpt"
    (sharded / "inner").mkdir(parents=True)
    (sharded / "inner" / "0.distcp").write_bytes(b"x")
    plugin = lit.AsyncCheckpointIO()
    plugin.remove_checkpoint(sharded)
    plugin.remove_checkpoint(tmp_path / "missing.ckpt")
    plugin.teardown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("durable", [True, False])
def test_missing_parent_directories_are_created_and_synced(lit, tmp_path, monkeypatch, durable):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    plugin = lit.AsyncCheckpointIO(durable=durable)
    plugin.save_checkpoint(STATE, tmp_path / "a" / "b" / "c.ckpt")
    plugin.teardown()
    assert load(tmp_path / "a" / "b" / "c.ckpt")["n"] == 3
    assert synced == ([str(tmp_path), str(tmp_path / "a")] if durable else [])


def test_a_bare_file_name_is_saved_in_the_working_directory(lit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugin = lit.AsyncCheckpointIO()
    plugin.save_checkpoint(STATE, "a.ckpt")
    monkeypatch.chdir("/")
    plugin.teardown()
    assert load(tmp_path / "a.ckpt")["n"] == 3


def test_save_replaces_a_link_and_not_its_target(lit, tmp_path):
    target, link = tmp_path / "e0.ckpt", tmp_path / "last.ckpt"
    torch.save({"n": 0}, target)
    link.symlink_to("e0.ckpt")
    plugin = lit.AsyncCheckpointIO()
    plugin.save_checkpoint(STATE, link)
    plugin.teardown()
    assert not link.is_symlink()
    assert load(link)["n"] == 3
    assert load(target)["n"] == 0


def test_removing_a_link_leaves_its_target(lit, tmp_path):
    target, link = tmp_path / "e0.ckpt", tmp_path / "last.ckpt"
    torch.save({"n": 0}, target)
    link.symlink_to("e0.ckpt")
    plugin = lit.AsyncCheckpointIO()
    plugin.remove_checkpoint(link)
    plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["e0.ckpt"]


def test_on_durable_is_called_with_the_path_as_given(lit, tmp_path):
    calls = queue.SimpleQueue()
    path = tmp_path / "a.ckpt"
    plugin = lit.AsyncCheckpointIO(on_durable=lambda *each: calls.put(each))
    plugin.save_checkpoint(STATE, path)
    plugin.teardown()
    given, report = calls.get(timeout=60)  # callbacks run on a separate thread
    assert calls.empty()
    assert given == path
    assert report.nbytes == path.stat().st_size


def test_plugin_is_pickled_with_only_its_options(pkg, tmp_path):
    plugin = pkg.AsyncCheckpointIO(pool_bytes=64 << 20, when_busy="raise", durable=False)
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    copy = pickle.loads(pickle.dumps(plugin))
    plugin.teardown()
    assert isinstance(copy, pkg.CheckpointIO)
    copy.save_checkpoint(STATE, tmp_path / "b.ckpt")
    copy.teardown()
    assert load(tmp_path / "b.ckpt")["n"] == 3
    assert copy._checkpoints.writers.options == plugin._checkpoints.writers.options
    assert copy in sys.modules["stillframe._lightning.plugin"].live


def test_a_plugin_with_an_engine_cannot_be_pickled_and_says_why(lit):
    with stillframe.Engine() as engine:
        plugin = lit.AsyncCheckpointIO(engine=engine)
        with pytest.raises(TypeError, match="spawns its workers"):
            pickle.dumps(plugin)


def test_plugin_is_a_checkpoint_io_of_both_packages(pkg):
    import lightning.fabric.plugins
    import lightning_fabric.plugins

    plugin = pkg.AsyncCheckpointIO()
    assert isinstance(plugin, lightning.fabric.plugins.CheckpointIO)
    assert isinstance(plugin, lightning_fabric.plugins.CheckpointIO)


def test_plugin_is_no_subclass_of_lightnings_wrapper(pkg):
    # A strategy would replace the inner CheckpointIO of a wrapper.
    assert not any("Wrapping" in base.__name__ for base in pkg.AsyncCheckpointIO.__mro__)


def test_long_wait_prints_one_line(lit, tmp_path, capfd):
    plugin = lit.AsyncCheckpointIO()
    with slow("fdatasync", 1.5):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        plugin.teardown()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "stillframe" in line]
    assert line.startswith("stillframe: waiting for 1 checkpoint to reach the disk")


def test_short_wait_prints_nothing(lit, tmp_path, capfd):
    plugin = lit.AsyncCheckpointIO()
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    plugin.teardown()
    assert capfd.readouterr().err == ""


def test_wait_without_stderr_prints_nothing(monkeypatch):
    monkeypatch.setattr(work, "DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", None)
    work.WaitProgressDisplay([])._run()


def test_a_terminal_gets_a_progress_bar(lit, tmp_path, monkeypatch):
    leader, follower = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    plugin = lit.AsyncCheckpointIO()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with slow("fdatasync", 1.5):
            plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
            plugin.teardown()
        terminal.flush()
        drawn = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "waiting for 1 checkpoint" in drawn
    assert "\x1b[" in drawn


def test_an_interrupted_teardown_can_be_called_again(lit, tmp_path):
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    plugin = lit.AsyncCheckpointIO(pool_bytes=64 << 20)
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        with held("fdatasync"):
            plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
            plugin.remove_checkpoint(tmp_path / "missing.ckpt")
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                plugin.teardown()
            assert not (tmp_path / "a.ckpt").exists()
        plugin.teardown()
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert load(tmp_path / "a.ckpt")["n"] == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_starts_without_saves_under_way(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO(pool_bytes=64 << 20)
    with slow("fdatasync", 0.3):
        plugin.save_checkpoint(STATE, tmp_path / "parent.ckpt")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                plugin.save_checkpoint(STATE, tmp_path / "child.ckpt")
                plugin.teardown()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        plugin.teardown()
    assert load(tmp_path / "parent.ckpt")["n"] == load(tmp_path / "child.ckpt")["n"] == 3
