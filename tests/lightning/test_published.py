"""Loggers, metrics and `on_durable`: when they are called for a checkpoint."""

import errno
import os
import signal
import threading

import pytest
import stillframe
import torch
from fix_lightning import DISKS, at, every_steps, load, loader, trainer
from stillframe import _core
from stillframe.testing import fault, slow


def loggers_of(pkg):
    """Return a logger class that notes each call, and whether the file existed then."""
    import importlib

    base = importlib.import_module(
        "lightning.pytorch.loggers" if pkg.name == "lightning" else "pytorch_lightning.loggers"
    ).Logger

    class Noting(base):
        name, version = "noting", 0

        def __init__(self):
            super().__init__()
            self.events, self.metrics, self.threads = [], [], set()

        def log_metrics(self, metrics, step=None):
            self.metrics.append((dict(metrics), step))

        def log_hyperparams(self, *args, **kwargs):
            return

        def after_save_checkpoint(self, callback):
            self.threads.add(threading.current_thread())
            path = callback.best_model_path
            there = os.path.exists(path)
            self.events.append(
                (os.path.basename(path), there, load(path)["global_step"] if there else None)
            )

        def finalize(self, status):
            self.events.append(status)

    return Noting


def fit(pkg, tmp_path, logger, *, plugin=None, callbacks=(), **options):
    run = trainer(
        pkg,
        tmp_path,
        plugin=pkg.AsyncCheckpointIO() if plugin is None else plugin,
        callbacks=[*callbacks, every_steps(pkg, tmp_path / "c", 2)],
        **options,
    )
    run.loggers = [logger] if not isinstance(logger, list) else logger
    model = pkg.Model()
    run.fit(model, loader())
    return run


@pytest.mark.parametrize("seconds", DISKS)
def test_loggers_are_called_in_order_once_checkpoints_are_durable(pkg, tmp_path, seconds):
    logger = loggers_of(pkg)()
    with slow("fdatasync", seconds):
        fit(pkg, tmp_path, logger)
    assert logger.events == [
        *((f"step={step}.ckpt", True, step) for step in (2, 4, 6, 8)),
        "success",
    ]
    assert logger.threads == {threading.main_thread()}
    # A remove that waited for a logger runs when the logger has been called.
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step=8.ckpt"]


def test_loggers_are_not_called_for_a_failed_checkpoint(lit, tmp_path, caplog):
    logger = loggers_of(lit)()
    broken = []

    def breaks(run):
        stillframe.wait_all()
        injected = fault("fdatasync", err=errno.ENOSPC)
        injected.__enter__()
        broken.append(injected)

    def ends(run):
        # wait until the log is empty, so that the next save is the first to sync
        _core.log_drain(None)

    try:
        fit(
            lit,
            tmp_path,
            logger,
            plugin=lit.AsyncCheckpointIO(on_error="warn"),
            callbacks=[at(lit, {4: breaks, 5: ends})],
        )
    finally:
        broken.pop().__exit__(None, None, None)
    names = [event[0] for event in logger.events if isinstance(event, tuple)]
    assert names == ["step=2.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert "not told of" in caplog.text


def test_loggers_are_called_before_finalize_when_training_is_interrupted(lit, tmp_path):
    logger = loggers_of(lit)()

    def boom(run):
        raise ValueError

    with slow("fdatasync", 0.3), pytest.raises(ValueError):
        fit(lit, tmp_path, logger, callbacks=[at(lit, {5: boom})])
    assert logger.events == [("step=2.ckpt", True, 2), ("step=4.ckpt", True, 4), "failed"]


def test_signal_handler_that_finalizes_loggers_finds_them_called(lit, tmp_path):
    """SLURM's requeue handler does the same during training."""
    logger = loggers_of(lit)()
    handler = signal.getsignal(signal.SIGUSR2)

    def finalise(run):
        signal.signal(
            signal.SIGUSR2, lambda *_: [each.finalize("finished") for each in run.loggers]
        )
        os.kill(os.getpid(), signal.SIGUSR2)

    class After(lit.Callback):
        def on_train_batch_start(self, run, *args):
            if run.global_step == 2:
                finalise(run)

    try:
        with slow("fdatasync", 0.3):
            fit(lit, tmp_path, logger, callbacks=[After()])
    finally:
        signal.signal(signal.SIGUSR2, handler)
    assert logger.events[:2] == [("step=2.ckpt", True, 2), "finished"]


def test_an_error_of_a_logger_reaches_the_run(lit, tmp_path):
    class Bad(loggers_of(lit)):
        def after_save_checkpoint(self, callback):
            raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        fit(lit, tmp_path, Bad())


def test_logger_without_the_hook_delays_nothing(lit, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    removed = []

    class Look(lit.Callback):
        def on_train_batch_start(self, run, *args):
            removed.append(list(run.strategy.checkpoint_io._checkpoints._work.rotation.to_remove))

    with slow("fdatasync", 0.1):
        fit(lit, tmp_path, CSVLogger(tmp_path / "logs"), callbacks=[Look()])
    assert not any(removed)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_metrics_of_each_save_are_logged(pkg, tmp_path, seconds):
    logger = loggers_of(pkg)()
    with slow("fdatasync", seconds):
        fit(pkg, tmp_path, logger, plugin=pkg.AsyncCheckpointIO(log_metrics=True))
    logged = [metrics for metrics, _ in logger.metrics if "checkpoint/bytes" in metrics]
    assert len(logged) == 4
    for metrics in logged:
        assert set(metrics) == {
            "checkpoint/call_ms",
            "checkpoint/gate_ms",
            "checkpoint/durable_s",
            "checkpoint/bytes",
        }
        assert metrics["checkpoint/bytes"] > 4 * 300 * 300
        assert metrics["checkpoint/durable_s"] >= seconds
        # A call takes some milliseconds. The file may be durable before the call returns.
        assert metrics["checkpoint/call_ms"] > 0.05


def test_metrics_are_not_logged_by_default(lit, tmp_path):
    logger = loggers_of(lit)()
    fit(lit, tmp_path, logger)
    assert not any("checkpoint/bytes" in metrics for metrics, _ in logger.metrics)


def test_on_durable_is_called_for_every_checkpoint_of_a_fit(lit, tmp_path):
    names, last = [], threading.Event()

    def hear(path, report):
        assert report.nbytes > 4 * 300 * 300
        names.append(os.path.basename(path))
        if len(names) == 4:
            last.set()

    fit(lit, tmp_path, [], plugin=lit.AsyncCheckpointIO(on_durable=hear))
    assert last.wait(60)  # callbacks run on a separate thread
    assert names == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]


def test_wrapped_methods_are_restored(pkg, tmp_path):
    logger = loggers_of(pkg)()
    during = []

    class Look(pkg.Callback):
        def on_train_start(self, run, module):
            during.append({"finalize", "after_save_checkpoint"} <= set(vars(logger)))
            during.append({"file_exists", "_link_checkpoint"} <= set(vars(run.checkpoint_callback)))

    def boom(run):
        raise ValueError

    for callbacks, error in (((), None), ([at(pkg, {3: boom})], ValueError)):
        run = None
        before = set(vars(logger))
        try:
            run = fit(pkg, tmp_path, logger, callbacks=[Look(), *callbacks])
        except ValueError:
            assert error is ValueError
        assert set(vars(logger)) == before
        if run is not None:
            assert not {"file_exists", "_link_checkpoint"} & set(vars(run.checkpoint_callback))
            assert "save_checkpoint" not in vars(run)
    assert during == [True] * 4


def test_callback_is_restored_after_loggers_were_called(lit, tmp_path):
    logger = loggers_of(lit)()
    with slow("fdatasync", 0.3):
        run = fit(lit, tmp_path, logger)
    assert run.checkpoint_callback.best_model_path == str(tmp_path / "c" / "step=8.ckpt")
    assert torch.load(run.checkpoint_callback.best_model_path, weights_only=False)
