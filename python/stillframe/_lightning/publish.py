"""Tells loggers of a checkpoint, and logs its metrics, once the checkpoint is durable.

Lightning calls `after_save_checkpoint` of its loggers when a save returns. With stillframe, the
training thread makes this call at the first hook after the file is durable. During the call,
attributes of ModelCheckpoint such as `best_model_path` have their values of the save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stillframe._base.paths import CheckpointPath
from stillframe._save.handle import SaveHandle, report_of
from stillframe._save.report import SaveReport

log = logging.getLogger("stillframe")

# The attributes of ModelCheckpoint that name checkpoints and their scores.
_STATE = (
    "best_model_path",
    "best_model_score",
    "best_k_models",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_checkpoint_saved",
)


class DurableSaveCallback:
    """A call to make when a save is durable. `target` is a checkpoint that must not be removed
    before the call. It may be None."""

    def __init__(
        self,
        handle: SaveHandle,
        target: CheckpointPath | None,
        call: Callable[[SaveReport], object],
    ) -> None:
        self.handle = handle
        self.target = target
        self._call: Callable[[SaveReport], object] | None = call

    def due(self) -> bool:
        return self.handle.done()

    def call_once_if_saved(self) -> None:
        """Make the call once, with the report of the save, unless the save failed."""
        # Taken before it is made, because a signal handler may call this method meanwhile.
        call, self._call = self._call, None
        if call is None:
            return
        report = report_of(self.handle)
        if report is not None:
            call(report)
        elif self.target is not None:
            log.warning("stillframe: loggers are not told of %s: it failed", self.target.name)


def make_logger_notifier(
    notify: Callable[[Any], object], callback: Any
) -> Callable[[SaveReport], object]:
    """Return a function that calls `notify(callback)` with the callback's present state."""
    state: dict[str, Any] = {}
    for name in _STATE:
        if hasattr(callback, name):
            value = getattr(callback, name)
            state[name] = dict(value) if isinstance(value, dict) else value

    def call(report: SaveReport) -> None:
        try:
            with _set_attributes_temporarily(callback, state):
                notify(callback)
        except ReferenceError:  # Lightning passes a weak proxy, and the callback was freed
            log.warning("stillframe: loggers are not told of %s: its callback is gone", report.path)

    return call


@contextmanager
def _set_attributes_temporarily(callback: Any, state: dict[str, Any]) -> Iterator[None]:
    """Set the attributes in `state` on the callback, until the end of the block."""
    current = {name: getattr(callback, name) for name in state}
    try:
        for name, value in state.items():
            setattr(callback, name, value)
        yield
    finally:
        for name, value in current.items():
            setattr(callback, name, value)


def make_metrics_logger(trainer: Any) -> Callable[[SaveReport], object]:
    """Return a function that logs the cost of a save to the loggers of `trainer`."""

    def call(report: SaveReport) -> None:
        metrics = {
            "checkpoint/call_ms": report.blocked_s * 1e3,
            "checkpoint/gate_ms": report.gate_wait_s * 1e3,
            "checkpoint/durable_s": report.durable_after_s,
            "checkpoint/bytes": float(report.nbytes),
        }
        # The same step as Trainer.log uses, because some loggers refuse a smaller step.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    return call


def overrides_after_save(logger: Any) -> bool:
    """Return whether `logger` overrides `after_save_checkpoint`."""
    method = getattr(logger, "after_save_checkpoint", None)
    function = getattr(method, "__func__", method)  # a bound method has `__func__`
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "")
    is_lightnings = name == "Logger.after_save_checkpoint" and module.endswith(".loggers.logger")
    return not is_lightnings
