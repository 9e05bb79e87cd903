"""Holds and checks the options of the checkpoint plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stillframe._base.flags import refuse_unclear
from stillframe._save.engine import Engine, limits_of, refuse_no_engine
from stillframe._save.options import (
    DEFAULT_IN_FLIGHT,
    EngineOptions,
    OnDurable,
    SaveOptions,
    Size,
    WhenBusy,
)

OnError = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """The options of `CheckpointPlugin`, except for the other CheckpointIO.

    Raises:
        TypeError, ValueError: `Engine` refuses an option, the engine skips saves, or `engine` is
            given together with an option of an engine.
    """

    engine: Engine | None = None
    pool_bytes: Size | None = None
    max_in_flight: int = DEFAULT_IN_FLIGHT
    when_busy: WhenBusy = "wait"
    durable: bool = True
    overlap: bool = True
    check_mutation: bool = False
    on_durable: OnDurable | None = None
    on_error: OnError = "raise"
    log_metrics: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error has to be 'raise' or 'warn', not {self.on_error!r}")
        self.save_options(overlap=self.overlap)  # raises what a save would raise
        refuse_unclear(log_metrics=self.log_metrics)
        own = self.engine_options()
        if self.engine is not None:
            refuse_no_engine(self.engine)
            refuse_skipping(limits_of(self.engine).when_busy)
            if own is not None:
                raise ValueError(
                    "engine= has its own pool and its own limits: give pool_bytes, max_in_flight"
                    " and when_busy to the Engine, not to the plugin."
                )
        elif own is not None:
            refuse_skipping(self.when_busy)
            Engine(**own).close()  # raises now what the first save would raise

    def engine_options(self) -> EngineOptions | None:
        """Return the options of the plugin's own engine; None if it uses another engine."""
        given = (self.pool_bytes, self.max_in_flight, self.when_busy)
        if given == (None, DEFAULT_IN_FLIGHT, "wait"):
            return None
        return {
            "pool_bytes": self.pool_bytes,
            "max_in_flight": self.max_in_flight,
            "when_busy": self.when_busy,
        }

    def save_options(self, *, overlap: bool) -> SaveOptions:
        return SaveOptions(
            overlap=overlap,
            durable=self.durable,
            check_mutation=self.check_mutation,
            on_durable=self.on_durable,
            follow_link=False,
            create_parents=True,
        )


def refuse_skipping(when_busy: WhenBusy) -> None:
    """Check `when_busy` of an engine that a plugin uses.

    Raises:
        ValueError: The value is "skip", which may lose checkpoints, or is not known.
    """
    if when_busy == "skip":
        raise ValueError(
            "when_busy='skip' would lose checkpoints under Lightning: ModelCheckpoint removes the"
            " previous file after a save, also when that save was skipped. Use 'wait' or 'raise'."
        )
    if when_busy not in ("wait", "raise"):
        raise ValueError(f"when_busy has to be 'wait' or 'raise', not {when_busy!r}")
