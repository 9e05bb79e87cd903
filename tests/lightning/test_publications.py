"""Publications: the calls of loggers for a checkpoint. test_published.py tests whole fits."""

import os
import weakref
from types import SimpleNamespace

import pytest
from stillframe._base.paths import CheckpointPath
from stillframe._lightning import publish


def ended(report):
    return SimpleNamespace(_outcome=SimpleNamespace(report=report), done=lambda: True)


def test_publication_is_delivered_once_and_not_for_a_failed_save(caplog):
    calls = []
    publication = publish.DurableSaveCallback(
        ended("report"), CheckpointPath.of("a.ckpt"), calls.append
    )
    publication.call_once_if_saved()
    publication.call_once_if_saved()
    publish.DurableSaveCallback(
        ended(None), CheckpointPath.of("b.ckpt"), calls.append
    ).call_once_if_saved()
    assert calls == ["report"]
    assert f"not told of {os.path.abspath('b.ckpt')}" in caplog.text


def test_logger_sees_the_callback_as_it_was_at_the_save():
    callback = SimpleNamespace(best_model_path="a", best_k_models={"a": 1}, other=1)
    seen = []

    def notify(callback):
        seen.append((callback.best_model_path, dict(callback.best_k_models), callback.other))
        raise RuntimeError("no network")

    call = publish.make_logger_notifier(notify, callback)
    callback.best_k_models["b"] = 2
    callback.best_model_path, callback.other = "b", 2
    with pytest.raises(RuntimeError):
        call("report")
    assert seen == [("a", {"a": 1}, 2)]
    assert vars(callback) == {"best_model_path": "b", "best_k_models": {"a": 1, "b": 2}, "other": 2}


def test_logger_sees_every_name_and_score_as_at_the_save(lit):
    callback = lit.ModelCheckpoint(filename="x")
    callback._last_checkpoint_saved = ""
    names = {*callback.state_dict(), "_last_checkpoint_saved"} - {"monitor", "dirpath"}
    assert len(names) == 8
    seen = {}

    def turn(value):
        for name in names:
            setattr(callback, name, {"path": value} if name == "best_k_models" else value)

    turn("then")
    call = publish.make_logger_notifier(lambda callback: seen.update(vars(callback)), callback)
    turn("now")
    call("report")
    then = {name: {"path": "then"} if name == "best_k_models" else "then" for name in names}
    assert {name: seen[name] for name in names} == then
    assert callback.last_model_path == "now"


def test_publication_for_a_deleted_callback_is_dropped(caplog):
    class Callback:
        best_model_path = "a"

    callback = Callback()
    call = publish.make_logger_notifier(
        lambda callback: callback.best_model_path, weakref.proxy(callback)
    )
    del callback
    call(SimpleNamespace(path="a.ckpt"))
    assert "not told of a.ckpt: its callback is gone" in caplog.text


def test_logger_with_the_hook_is_recognised_whatever_its_class_is_called(lit):
    from lightning.pytorch.loggers import CSVLogger

    class Logger:
        def after_save_checkpoint(self, callback):
            pass

    Logger.after_save_checkpoint.__qualname__ = "Logger.after_save_checkpoint"
    assert publish.overrides_after_save(Logger())
    assert not publish.overrides_after_save(CSVLogger("x"))


def test_metrics_have_the_units_of_their_names_and_the_step_of_the_trainer():
    logged = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((metrics, step)))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7))
    report = SimpleNamespace(
        blocked_s=0.5, gate_wait_s=0.25, backpressure_s=9.0, durable_after_s=3.0, nbytes=10
    )
    publish.make_metrics_logger(SimpleNamespace(fit_loop=loop, loggers=[logger, logger]))(report)
    metrics = {"call_ms": 500.0, "gate_ms": 250.0, "durable_s": 3.0, "bytes": 10.0}
    assert logged == [({f"checkpoint/{name}": each for name, each in metrics.items()}, 7)] * 2
