"""What the companion callback does, for `lightning` and `pytorch_lightning` alike.

A save copies the larger part of the state under the next forward and backward, because only the
optimizer's step changes it, and the step waits. Lightning lets others write to it between steps
as well: weight averaging swaps the weights for validation, a callback loads older ones. So this
callback waits, at every hook where Lightning lets others act, until the saves in flight have
copied their state. It stands first in the Trainer's list, hence before whoever writes.

It does not wait inside the step (`on_before_zero_grad`, `on_before_backward`,
`on_after_backward`, `on_before_optimizer_step`), nor at `on_train_batch_start` and
`on_train_batch_end`: the forward and backward between those are what the copy hides under. Who
writes there regularly is found out by observation and has its storages captured in the call;
who does it rarely gets a TornSnapshotError, never a wrong file. The hooks about state
(`state_dict`, `on_save_checkpoint` and their counterparts) run inside a save or a load, and
loading waits by itself.

It has no state, so it is not in checkpoints, and does nothing in a Trainer that saves with
another plugin.
"""

from __future__ import annotations

from typing import Any

from stillframe import gate
from stillframe._caller import note_signal_handlers
from stillframe._plugin import plugin_of


class CompanionHooks:
    """The hooks; mixed in before the package's Callback."""

    def _wait(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if plugin_of(trainer) is not None:
            gate.wait()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        plugin = plugin_of(trainer)
        if plugin is None:
            return
        gate.wait()
        plugin.attach(trainer)
        if trainer.callbacks[0] is not self:
            # A new list: Lightning is iterating the old one, and changing that would skip a
            # callback.
            trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        plugin = plugin_of(trainer)
        if plugin is not None:
            gate.wait()
            note_signal_handlers()
            plugin.training_starts(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if plugin_of(trainer) is not None:
            gate.wait()
            note_signal_handlers()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        plugin = plugin_of(trainer)
        if plugin is not None:
            plugin.training_ends(trainer)
            gate.wait()

    teardown = _wait
    on_fit_start = on_fit_end = _wait
    on_sanity_check_start = on_sanity_check_end = _wait
    on_train_epoch_end = _wait
    on_validation_start = on_validation_end = _wait
    on_validation_epoch_start = on_validation_epoch_end = _wait
    on_validation_batch_start = on_validation_batch_end = _wait
    on_test_start = on_test_end = _wait
    on_test_epoch_start = on_test_epoch_end = _wait
    on_test_batch_start = on_test_batch_end = _wait
    on_predict_start = on_predict_end = _wait
    on_predict_epoch_start = on_predict_epoch_end = _wait
    on_predict_batch_start = on_predict_batch_end = _wait
    on_exception = _wait
