"""Who writes a plugin's checkpoints, and with which engine.

    checkpoint_io given          that one, from a snapshot (`_inner.py`)
    a remote path                Lightning's TorchCheckpointIO, through fsspec, from a snapshot
    torch.save was replaced      Lightning's TorchCheckpointIO, from a snapshot
    any other                    stillframe itself

The two in the middle are not what stillframe promises, so they are logged once each and stand in
the report of every save. Whoever writes a path also removes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from stillframe._lightning import rotation as _rotation
from stillframe._lightning import wrapped as _inner
from stillframe._lightning.pending import Work, is_remote
from stillframe._lightning.wrapped import Inner
from stillframe._save.engine import Engine, default_engine
from stillframe._save.handle import SaveHandle, SaveReport

log = logging.getLogger("stillframe")

DEFAULT_IN_FLIGHT = 2

_REMOTE = (
    "Lightning's TorchCheckpointIO wrote it through fsspec, as its path is remote: that a"
    " complete file replaces the old one, and lasts, is up to the remote file system."
)
_REPLACED = (
    "Lightning's TorchCheckpointIO wrote it, as torch.save is not torch's own and that one calls"
    " it: it is not synced."
)


class Writers:
    """The writers that one plugin's options ask for.

    Args:
        reader: TorchCheckpointIO of the package.
        others: See `CheckpointPlugin`.

    Attributes:
        inner: The CheckpointIO that was given.
        engine: The engine that was given.

    Raises:
        TypeError, ValueError: What `Engine` refuses, an engine that skips saves, `engine`
            together with an option of the engine, or objects of the wrong kind.
    """

    def __init__(
        self,
        reader: type[Any],
        checkpoint_io: Any | None,
        *,
        engine: Engine | None,
        pool_bytes: int | None,
        max_in_flight: int,
        when_busy: str,
        durable: bool,
        check_mutation: bool,
        on_durable: Callable[[Any, SaveReport], object] | None,
    ) -> None:
        _refuse_others(checkpoint_io, engine, on_durable)
        _refuse_skipping(when_busy if engine is None else engine._when_busy)
        own = pool_bytes is not None or max_in_flight != DEFAULT_IN_FLIGHT or when_busy != "wait"
        if engine is not None and own:
            raise ValueError(
                "engine= has its own pool and its own limits: give pool_bytes, max_in_flight and"
                " when_busy to the Engine, not to the plugin."
            )
        self._reader = reader
        self.inner = None if checkpoint_io is None else Inner(checkpoint_io, reader)
        self.engine = engine
        self._max_in_flight, self._when_busy = max_in_flight, when_busy
        if engine is not None:
            self._max_in_flight = engine._max_in_flight
            self._when_busy = engine._when_busy
        self._engine_options: dict[str, Any] | None = None
        if own:
            self._engine_options = {
                "pool_bytes": pool_bytes,
                "max_in_flight": max_in_flight,
                "when_busy": when_busy,
            }
            Engine(**self._engine_options).close()  # refuses now what it would refuse at a save
        self._durable = durable
        self._check_mutation = check_mutation
        self._on_durable = on_durable
        self._told: set[str] = set()

    def submit(
        self, work: Work, checkpoint: Any, path: Any, storage_options: Any, overlap: bool
    ) -> SaveHandle:
        """Starts the save of `checkpoint`."""
        engine = self._engine_of(work)
        inner = self._writer_of(path)
        if inner is not None:
            return inner.save(
                checkpoint,
                path,
                _rotation.key(path),
                storage_options=storage_options,
                overlap=overlap,
                engine=engine,
                pending=work.pending,
                max_in_flight=self._max_in_flight,
                when_busy=self._when_busy,
                on_durable=self._on_durable,
            )
        return engine._submit(
            checkpoint,
            path,
            overlap=overlap,
            durable=self._durable,
            check_mutation=self._check_mutation,
            on_durable=self._on_durable,
            follow_link=False,
            create_parents=True,
        )

    def remover_of(self, path: Any) -> Inner | None:
        """Who removes `path`; None for stillframe itself."""
        if self.inner is None and is_remote(path):
            return self._lightnings(_REMOTE, "fsspec")
        return self.inner

    def load(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        io = self._reader() if self.inner is None else self.inner.io
        return io.load_checkpoint(path, *args, **kwargs)

    def tear_down(self) -> None:
        if self.inner is not None:
            self.inner.io.teardown()

    def _writer_of(self, path: Any) -> Inner | None:
        if self.inner is not None:
            return self.inner
        if is_remote(path):
            self._tell_once(_REMOTE, path)
            return self._lightnings(_REMOTE, "fsspec")
        # A layer that encrypts, a test that counts: they expect that theirs is called.
        if torch.save is not torch.serialization.save:
            self._tell_once(_REPLACED, path)
            return self._lightnings(_REPLACED, "wrapped")
        return None

    def _lightnings(self, sentence: str, io_mode: str) -> Inner:
        return Inner(self._reader(), self._reader, sentence, io_mode)

    def _tell_once(self, sentence: str, path: Any) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("stillframe: %s: %s", os.fsdecode(path), sentence)

    def _engine_of(self, work: Work) -> Engine:
        if self.engine is not None:
            return self.engine
        if self._engine_options is None:
            engine = default_engine()
            _refuse_skipping(engine._when_busy)
            return engine
        if work.engine is not None:
            return work.engine
        return work.use(Engine(**self._engine_options))


def refuse_ours(checkpoint_io: Any, ours: type[Any]) -> None:
    """
    Raises:
        ValueError: `checkpoint_io` is an `ours`, or has one inside.
    """
    if _inner.wraps_ours(checkpoint_io, ours):
        raise ValueError(
            f"{ours.__name__}(checkpoint_io=...) takes another CheckpointIO, not one of"
            " stillframe's: it would wait for itself."
        )


def _refuse_others(checkpoint_io: Any, engine: Any, on_durable: Any) -> None:
    """Objects of the wrong kind would only be noticed when a training is under way."""
    if checkpoint_io is not None and (
        isinstance(checkpoint_io, type)
        or not all(
            callable(getattr(checkpoint_io, f"{what}_checkpoint", None))
            for what in ("save", "load", "remove")
        )
    ):
        raise TypeError(f"checkpoint_io has to be a CheckpointIO, not {checkpoint_io!r}")
    if engine is not None and not isinstance(engine, Engine):
        raise TypeError(f"engine has to be a stillframe.Engine, not {engine!r}")
    if on_durable is not None and not callable(on_durable):
        raise TypeError(f"on_durable has to be callable, not {on_durable!r}")


def _refuse_skipping(when_busy: str) -> None:
    if when_busy == "skip":
        raise ValueError(
            "when_busy='skip' would lose checkpoints under Lightning: ModelCheckpoint removes the"
            " previous file after a save, also when that save was skipped. Use 'wait' or 'raise'."
        )
