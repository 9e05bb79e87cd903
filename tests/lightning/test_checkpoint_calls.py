"""Single calls of the plugin and its companion, and the state that each leaves."""

import os
from types import SimpleNamespace

import pytest
import stillframe
from fix_lightning import at, load, loader, trainer
from stillframe import _core
from stillframe._lightning import checkpoints, rotation, writers
from stillframe._lightning.companion import _file_exists
from stillframe._lightning.plugin import saves_with_plugin_alone
from stillframe._lightning.writers import PluginOptions, Writers
from stillframe._save.engine import is_closed
from stillframe._save.options import SaveOptions
from stillframe.testing import fault, held

STATE = {"n": 3}


@pytest.fixture
def plugin(lit):
    return lit.AsyncCheckpointIO()


@pytest.fixture
def calls(plugin):
    return plugin._checkpoints


class Callback:
    """A stand-in for ModelCheckpoint, which loggers are called with."""


class Strategy:
    """A strategy of several ranks that all do the same as this one."""

    global_rank = 0

    def __init__(self):
        self.asked = 0

    def reduce_boolean_decision(self, decision, all):
        self.asked += 1
        return decision


# ---- saves, removes, links ----


def test_new_save_of_a_name_survives_a_remove_that_waited_for_loggers(plugin, calls, tmp_path):
    path, notified = tmp_path / "a.ckpt", []
    with held("fdatasync"):
        plugin.save_checkpoint(STATE, path)
        calls.publish(notified.append, Callback())
        plugin.remove_checkpoint(path)
        plugin.save_checkpoint({"n": 4}, path)
    plugin.teardown()
    assert len(notified) == 1
    assert load(path)["n"] == 4  # the second save's, so the remove took only the first one


def test_remove_of_a_relative_path_waits_for_loggers(plugin, calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = []
    with held("fdatasync"):
        plugin.save_checkpoint(STATE, "a.ckpt")
        calls.publish(lambda callback: there.append(os.path.exists("a.ckpt")), Callback())
        plugin.remove_checkpoint("a.ckpt")
        assert calls._work.rotation.to_remove
    plugin.teardown()
    assert there == [True] and os.listdir(tmp_path) == []


@pytest.mark.parametrize("durable", [True, False])
def test_links_follow_the_plugins_durable_option(lit, tmp_path, monkeypatch, durable):
    asked = []
    monkeypatch.setattr(rotation, "make_link", lambda *_, durable: not asked.append(durable))
    plugin = lit.AsyncCheckpointIO(durable=durable)
    plugin._checkpoints.link(None, tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    plugin.teardown()
    assert asked == [durable]


def test_new_trainer_finds_earlier_saves_on_disk(lit, tmp_path, monkeypatch, plugin):
    drained, drain = [], _core.log_drain
    monkeypatch.setattr(_core, "log_drain", lambda *given: drained.append(drain(*given)))
    assert plugin._checkpoints._current_work().saves == []
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    trainer(lit, tmp_path, plugin=plugin)
    assert drained and (tmp_path / "a.ckpt").exists()
    plugin.teardown()


# ---- errors ----


def test_keyboard_interrupt_ends_a_wait_for_a_save(lit, tmp_path, monkeypatch):
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(on_error="warn"))
    run.fit(lit.Model(), loader())

    def interrupted(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "wait_for_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.save_checkpoint(tmp_path / "a.ckpt")
    stillframe.wait_all()


def test_error_after_an_interrupted_training_is_raised(lit, tmp_path):
    def boom(run):
        raise ZeroDivisionError

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[at(lit, {2: boom})])
    with pytest.raises(ZeroDivisionError):
        run.fit(lit.Model(), loader())
    with fault("fdatasync", sticky=True), pytest.raises(stillframe.SaveError):
        run.save_checkpoint(tmp_path / "bad.ckpt")


def test_interrupted_save_of_all_ranks_hides_no_later_error(plugin, calls, tmp_path):
    with pytest.raises(ZeroDivisionError), calls.together(Strategy()):
        raise ZeroDivisionError
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(stillframe.SaveError, match="directory"):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    plugin.teardown()


def test_error_of_a_save_outlives_an_exception_before_the_barrier(plugin, calls, tmp_path):
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(ZeroDivisionError), calls.together(Strategy()):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        raise ZeroDivisionError
    with pytest.raises(stillframe.SaveError, match="directory"):
        plugin.teardown()


def test_wait_all_raises_the_errors_that_no_save_has_raised(plugin, tmp_path):
    with fault("rename", sticky=True):
        with held("fdatasync"):
            for name in ("a", "b"):
                plugin.save_checkpoint(STATE, tmp_path / f"{name}.ckpt")
        _core.log_drain(None)
    with pytest.raises(stillframe.SaveError, match=r"a\.ckpt"):
        plugin.save_checkpoint(STATE, tmp_path / "c.ckpt")
    with pytest.raises(stillframe.SaveError, match=r"b\.ckpt"):
        stillframe.wait_all()
    plugin.teardown()


def test_ranks_agree_once_on_a_joint_save(calls):
    strategy = Strategy()
    with calls.together(strategy), calls.together(strategy):
        pass
    assert strategy.asked == 1


# ---- loggers ----


def test_logger_error_before_finalize_is_raised_at_the_end(plugin, calls, tmp_path):
    def refuse(callback):
        raise RuntimeError("no network")

    with held("fdatasync"):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        calls.publish(refuse, Callback())
    calls.settle()
    with pytest.raises(RuntimeError, match="no network"):
        plugin.teardown()


def test_finalizing_loggers_early_keeps_the_engine(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO(pool_bytes=64 << 20)
    plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    engine = plugin._checkpoints._work.engine
    plugin._checkpoints.settle()
    assert plugin._checkpoints._work.engine is engine and not is_closed(engine)
    plugin.teardown()
    assert is_closed(engine)


def test_loggers_are_called_at_once_for_foreign_checkpoints_and_never_for_refused_ones(
    lit, tmp_path
):
    plugin, notified = lit.AsyncCheckpointIO(on_error="warn"), []
    plugin._checkpoints.publish(notified.append, "somebody else's")
    plugin.save_checkpoint(STATE, tmp_path / "good.ckpt")
    stillframe.wait_all()
    plugin._checkpoints.publish(lambda callback: notified.append("ours"), Callback())
    (tmp_path / "a.ckpt").mkdir()
    with pytest.warns(UserWarning, match="was not saved"):
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
    plugin._checkpoints.publish(notified.append, "refused")
    plugin.teardown()
    assert notified == ["somebody else's", "ours"]
    stillframe.save({}, tmp_path / "good.pt")


# ---- options ----


def test_each_option_reaches_the_save(lit, tmp_path, monkeypatch):
    heard = []
    given = {"durable": False, "check_mutation": True, "on_durable": print}
    asked = PluginOptions(**given).save_options(overlap=False)
    kept = {"follow_link": False, "create_parents": True}
    assert asked == SaveOptions(overlap=False, **given, **kept)
    submit = Writers.submit

    def noted(self, work, checkpoint, path, storage_options, overlap):
        heard.append(overlap)
        return submit(self, work, checkpoint, path, storage_options, overlap)

    monkeypatch.setattr(Writers, "submit", noted)
    for overlap in (True, False):
        plugin = lit.AsyncCheckpointIO(overlap=overlap)
        plugin.save_checkpoint(STATE, tmp_path / "a.ckpt")
        plugin.teardown()
    assert heard == [True, False]


def test_given_engine_determines_max_in_flight():
    with stillframe.Engine(max_in_flight=5, when_busy="raise") as engine:
        assert PluginOptions(engine=engine).engine_options() is None
    assert PluginOptions(max_in_flight=3).engine_options() == {
        "pool_bytes": None,
        "max_in_flight": 3,
        "when_busy": "wait",
    }


def test_an_engine_that_was_made_to_check_the_options_is_closed(lit, monkeypatch):
    made = []

    class Engine(stillframe.Engine):
        def __init__(self, **given):
            super().__init__(**given)
            made.append(self)

    monkeypatch.setattr(writers, "Engine", Engine)
    lit.AsyncCheckpointIO(max_in_flight=3)
    assert [is_closed(each) for each in made] == [True]


# ---- who saves, and what stands over methods ----


def test_wrapper_around_our_plugin_may_save_by_itself(lit, plugin):
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    def holding(io):
        return SimpleNamespace(strategy=SimpleNamespace(_checkpoint_io=io))

    assert saves_with_plugin_alone(holding(plugin))
    assert not saves_with_plugin_alone(holding(_WrappingCheckpointIO(plugin)))
    assert not saves_with_plugin_alone(holding(lit.AsyncCheckpointIO(lit.TorchCheckpointIO())))
    assert not saves_with_plugin_alone(SimpleNamespace())


def test_callbacks_file_system_is_restored_even_after_an_error(calls):
    class FileSystem:
        def exists(self, path):
            raise OSError("no network")

    own = FileSystem()
    callback = SimpleNamespace(_fs=own)
    with pytest.raises(OSError, match="no network"):
        _file_exists(calls, callback, lambda: callback._fs.exists("nowhere://a.ckpt"))
    assert callback._fs is own


def test_plugin_also_belongs_to_a_package_imported_later(lit, monkeypatch):
    import sys

    registered = []

    class CheckpointIO:
        register = registered.append

    name = "lightning_fabric.plugins"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(CheckpointIO=CheckpointIO))
    lit.AsyncCheckpointIO()
    assert registered == [lit.AsyncCheckpointIO]
