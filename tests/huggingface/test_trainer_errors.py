"""Checkpoints of the Trainer that fail, and trainings that end early."""

import errno
import gc
import os

import pytest
import stillframe
from fix_trainer import OurTrainer, checkpoints, is_whole, model, trainer, transformers
from stillframe._save.handle import wait_for_end
from stillframe.testing import fault, held


class Fail(transformers.TrainerCallback):
    """A callback that makes the disk full from the end of step `first` to the end of `last`."""

    def __init__(self, first, last=10**9):
        self.first, self.last = first, last
        self.fault = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.first:
            stillframe.wait_all()  # the disk has room for the saves before this one
            self.fault = fault("pwrite", err=errno.ENOSPC, sticky=True)
            self.fault.__enter__()
        if state.global_step == self.last:
            self.end()

    def end(self):
        if self.fault is not None:
            self.fault.__exit__(None, None, None)
            self.fault = None


class Wait(transformers.TrainerCallback):
    """A callback that waits for each save and ignores its error."""

    def on_save_submitted(self, args, state, control, handle=None, **kwargs):
        wait_for_end(handle)


@pytest.fixture
def full():
    made = []

    def fail(*steps):
        made.append(Fail(*steps))
        return made[-1]

    yield fail
    for each in made:
        each.end()


def test_failed_save_raises_at_the_next_save_and_keeps_the_old_checkpoint(full):
    made = trainer(save_total_limit=1, callbacks=[full(4, 5), Wait()])
    with pytest.raises(stillframe.SaveError, match="No space left") as raised:
        made.train()
    assert raised.value.errno == errno.ENOSPC
    assert made.state.global_step == 6
    assert checkpoints() == ["checkpoint-2"]
    assert is_whole("out/checkpoint-2")
    stillframe.wait_all()  # the error was raised already


def test_failed_last_save_raises_at_the_end_of_the_training(full):
    with pytest.raises(stillframe.SaveError, match="No space left"):
        trainer(save_total_limit=1, callbacks=[full(6)]).train()
    assert checkpoints() == ["checkpoint-4"]
    stillframe.wait_all()


def test_error_of_a_save_does_not_replace_that_of_the_training(full):
    class Boom(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise RuntimeError("boom")

    made = trainer(callbacks=[full(4), Wait(), Boom()])
    with pytest.raises(RuntimeError, match="boom"):
        made.train()
    assert checkpoints() == ["checkpoint-2"]
    with pytest.raises(stillframe.SaveError, match="No space left"):
        stillframe.wait_all()


def test_refused_save_raises_in_its_call(full):
    class Unpicklable(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step == 4:
                optimizer.param_groups[0]["name"] = lambda: None

    with pytest.raises(Exception, match=r"(?i)pickle"):
        trainer(callbacks=[Unpicklable()]).train()
    stillframe.wait_all()
    assert checkpoints() == ["checkpoint-2"]


def test_ctrl_c_leaves_whole_checkpoints_only():
    class Interrupt(transformers.TrainerCallback):
        def on_save_submitted(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    made = trainer(callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    stillframe.wait_all()
    assert checkpoints() == ["checkpoint-2", "checkpoint-4"]
    assert is_whole("out/checkpoint-4")
    made.callback_handler.remove_callback(Interrupt)
    made.train(resume_from_checkpoint=True)
    assert is_whole("out/checkpoint-6")


def test_ctrl_c_while_files_are_handed_over_leaves_nothing_behind():
    class Cut(OurTrainer):
        def _save_scaler(self, output_dir):
            if self.state.global_step == 4:
                raise KeyboardInterrupt

    made = trainer(Cut)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    del made
    gc.collect()
    stillframe.wait_all()
    assert checkpoints() == ["checkpoint-2"]


def test_change_outside_the_step_fails_the_save_and_names_the_tensor():
    class Meddle(transformers.TrainerCallback):
        """Writes to the weights between a save and the next step, after steps that did not."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                self.hold = held("lane_copy")
                self.hold.__enter__()

        def on_save_submitted(self, args, state, control, handle=None, **kwargs):
            self.handle = handle

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                for parameter in model.parameters():
                    parameter.data.mul_(2)
                self.hold.__exit__(None, None, None)
                wait_for_end(self.handle)  # before the next save

    with pytest.raises(stillframe.TornSnapshotError, match="wait_staged"):
        trainer(save_steps=4, max_steps=8, callbacks=[Meddle()], net=model(64)).train()
    assert checkpoints() == []


class Terminate(transformers.TrainerCallback):
    """Asks for a checkpoint as SIGTERM does, after its grace period."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.manager.is_checkpoint_requested = True


@pytest.mark.parametrize("steps", [4, 100], ids=["saved_before", "new"])
def test_checkpoint_at_sigterm_appears_whole_and_is_durable_at_the_end(steps):
    seen = []

    class ChecksDirectories(OurTrainer):
        def _save_checkpoint(self, *args, **kwargs):
            with held("fdatasync"):  # nothing new appears meanwhile
                super()._save_checkpoint(*args, **kwargs)
                seen.append([name for name in checkpoints() if not is_whole(f"out/{name}")])

    terminate = Terminate()
    made = trainer(
        ChecksDirectories, enable_jit_checkpoint=True, save_steps=steps, callbacks=[terminate]
    )
    callbacks = made.callback_handler.callbacks
    terminate.manager = next(each for each in callbacks if hasattr(each, "jit_manager")).jit_manager
    made.train()
    assert seen == ([[]] if steps == 100 else [[], []])
    assert checkpoints() == ["checkpoint-4"]
    assert is_whole("out/checkpoint-4")
    assert "checkpoint-is-incomplete.txt" not in os.listdir("out/checkpoint-4")
