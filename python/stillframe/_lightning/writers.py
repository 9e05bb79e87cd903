"""Chooses the writer of a plugin's checkpoints, and its engine.

    checkpoint_io given          that one, from a snapshot (`wrapped.py`)
    a remote path                Lightning's TorchCheckpointIO, through fsspec, from a snapshot
    torch.save was replaced      Lightning's TorchCheckpointIO, from a snapshot
    any other                    stillframe itself

The second and third do not keep stillframe's promises, so each is logged once and named in the
report of every such save. The writer of a path also removes it.

If `torch.save` was replaced by a function that is not stillframe's, that function is called,
because its author expects it. `stillframe.save` refuses remote paths, but the plugin accepts them,
so that a run on `s3://` keeps working when only the import is changed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from stillframe._base.paths import Place
from stillframe._lightning.caller import io_chain
from stillframe._lightning.options import PluginOptions, refuse_skipping
from stillframe._lightning.pending import Work
from stillframe._lightning.reading import read
from stillframe._lightning.wrapped import Inner
from stillframe._save.api import async_save, engine_or_default, save
from stillframe._save.engine import Engine, limits_of, submit
from stillframe._save.handle import SaveHandle
from stillframe._save.report import IoMode

log = logging.getLogger("stillframe")

_REMOTE = (
    "Lightning's TorchCheckpointIO wrote it through fsspec, as its path is remote: that a"
    " complete file replaces the old one, and lasts, is up to the remote file system."
)
_REPLACED = (
    "Lightning's TorchCheckpointIO wrote it, as torch.save is not torch's own and that one calls"
    " it: it is not synced."
)


class Writers:
    """The writers of one plugin.

    Args:
        reader: TorchCheckpointIO of the package.
        checkpoint_io: See `CheckpointPlugin`.

    Attributes:
        inner: The CheckpointIO that was given.

    Raises:
        TypeError: `checkpoint_io` is not a CheckpointIO.
    """

    def __init__(
        self, reader: type[Any], checkpoint_io: Any | None, options: PluginOptions
    ) -> None:
        if checkpoint_io is not None:
            _refuse_no_io(checkpoint_io)
        self._reader = reader
        self._options = options
        self.inner = None if checkpoint_io is None else Inner(checkpoint_io, reader)
        self._told: set[str] = set()

    def submit(
        self, work: Work, checkpoint: Any, place: Place, storage_options: Any, overlap: bool
    ) -> SaveHandle:
        """Start the save of `checkpoint`."""
        engine = self.engine_of(work)
        inner = self._writer_of(place)
        options = self._options.save_options(overlap=overlap)
        if inner is None:
            return submit(engine, checkpoint, place.given, options)
        return inner.save(
            checkpoint,
            place,
            storage_options=storage_options,
            options=options,
            engine=engine,
            pending=work.pending,
        )

    def remover_of(self, place: Place) -> Inner | None:
        """Return the CheckpointIO that removes a file; None for stillframe itself."""
        if self.inner is None and place.remote:
            return self._lightnings(_REMOTE, "fsspec")
        return self.inner

    def load(self, place: Place, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner.io.load_checkpoint(place.given, *args, **kwargs)
        return read(self._reader().load_checkpoint, place, args, kwargs)

    def tear_down(self) -> None:
        if self.inner is not None:
            self.inner.io.teardown()

    def _writer_of(self, place: Place) -> Inner | None:
        if self.inner is not None:
            return self.inner
        if place.remote:
            self._tell_once(_REMOTE, place)
            return self._lightnings(_REMOTE, "fsspec")
        # A layer that encrypts, a test that counts: they expect that theirs is called.
        if torch.save not in (torch.serialization.save, save, async_save):
            self._tell_once(_REPLACED, place)
            return self._lightnings(_REPLACED, "wrapped")
        return None

    def _lightnings(self, sentence: str, io_mode: IoMode) -> Inner:
        return Inner(self._reader(), self._reader, sentence, io_mode)

    def _tell_once(self, sentence: str, place: Place) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("stillframe: %s: %s", place.text, sentence)

    def engine_of(self, work: Work) -> Engine:
        options = self._options.engine_options()
        if options is None:
            engine = engine_or_default(self._options.engine)
            refuse_skipping(limits_of(engine).when_busy)
            return engine
        if work.engine is not None:
            return work.engine
        return work.use(Engine(**options))


def refuse_ours(checkpoint_io: Any, ours: type[Any], name: str) -> None:
    """Refuse a stillframe plugin as the CheckpointIO of another one.

    Args:
        name: The class that the user wrote, for the message.

    Raises:
        ValueError: `checkpoint_io` is an `ours`, or wraps one.
    """
    if any(isinstance(io, ours) for io in (checkpoint_io, *io_chain(checkpoint_io))):
        raise ValueError(
            f"{name}(checkpoint_io=...) takes another CheckpointIO, not one of stillframe's: it"
            " would wait for itself."
        )


def _refuse_no_io(checkpoint_io: Any) -> None:
    """Refuse an object that is not a CheckpointIO now, not in the middle of a training."""
    if isinstance(checkpoint_io, type) or not all(
        callable(getattr(checkpoint_io, f"{what}_checkpoint", None))
        for what in ("save", "load", "remove")
    ):
        raise TypeError(f"checkpoint_io has to be a CheckpointIO, not {checkpoint_io!r}")
