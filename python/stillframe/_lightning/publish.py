"""What is made known of a checkpoint once it is durable: to loggers, and as metrics.

Lightning tells its loggers of a checkpoint when the save returns (`after_save_checkpoint`), and
they upload the file then. Here the call is kept until the file is durable, and made on the main
thread, at the first hook after that. Until then the callback goes on to later checkpoints, so
for the call it is put back to what it was at the save: `best_model_path` and its like name files
that are there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stillframe._base.paths import Place
from stillframe._save.handle import SaveHandle, report_of
from stillframe._save.report import SaveReport

log = logging.getLogger("stillframe")

# Of ModelCheckpoint: what names checkpoints and their scores.
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


class Publication:
    """A call that waits for a save to be durable.

    Attributes:
        place: The checkpoint, which is not removed before the call; None where it may be.
    """

    def __init__(
        self, handle: SaveHandle, place: Place | None, call: Callable[[SaveReport], object]
    ) -> None:
        self.handle = handle
        self.place = place
        self._call: Callable[[SaveReport], object] | None = call

    def due(self) -> bool:
        return self.handle.done()

    def deliver(self) -> None:
        """Makes the call, once; not if the save failed."""
        call, self._call = self._call, None
        if call is None:
            return
        report = report_of(self.handle)
        if report is not None:
            call(report)
        elif self.place is not None:
            log.warning("stillframe: loggers are not told of %s: it failed", self.place.name)


def logger_call(tell: Callable[[Any], object], callback: Any) -> Callable[[SaveReport], object]:
    """`tell(callback)`, made later with the callback's state of now."""
    state = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in ((name, getattr(callback, name, None)) for name in _STATE)
        if hasattr(callback, name)
    }

    def call(report: SaveReport) -> None:
        try:
            with _put_back(callback, state):
                tell(callback)
        except ReferenceError:  # Lightning hands on a weak proxy, and the callback is gone
            log.warning("stillframe: loggers are not told of %s: its callback is gone", report.path)

    return call


@contextmanager
def _put_back(callback: Any, state: dict[str, Any]) -> Iterator[None]:
    current = {name: getattr(callback, name) for name in state}
    try:
        for name, value in state.items():
            setattr(callback, name, value)
        yield
    finally:
        for name, value in current.items():
            setattr(callback, name, value)


def metrics_call(trainer: Any) -> Callable[[SaveReport], object]:
    """Logs what a save cost to the loggers of `trainer`."""

    def call(report: SaveReport) -> None:
        metrics = {
            "checkpoint/call_ms": report.blocked_s * 1e3,
            "checkpoint/gate_ms": report.gate_wait_s * 1e3,
            "checkpoint/durable_s": report.durable_after_s,
            "checkpoint/bytes": float(report.nbytes),
        }
        # As Trainer.log counts: some loggers refuse a step below the last one.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    return call


def listens(logger: Any) -> bool:
    """Whether `logger` does anything in `after_save_checkpoint`; the base class does not."""
    method = getattr(logger, "after_save_checkpoint", None)
    function = getattr(method, "__func__", method)
    return not (
        getattr(function, "__qualname__", "") == "Logger.after_save_checkpoint"
        and getattr(function, "__module__", "").endswith(".loggers.logger")
    )
