"""When callbacks of the Trainer are called, what they see, and which checkpoints go meanwhile."""

import contextlib
import os

import pytest
import torch
from fix_trainer import OurTrainer, checkpoints, is_whole, trainer, transformers
from stillframe.testing import held

PROGRESS = "Training in progress, step"


class Notes(transformers.TrainerCallback):
    """Notes each call of a save's hooks."""

    def __init__(self):
        self.submitted, self.saved, self.handles = [], [], []

    def on_save_submitted(self, args, state, control, handle=None, **kwargs):
        self.submitted.append((state.global_step, handle.state != "durable"))
        self.handles.append(handle)

    def on_save(self, args, state, control, **kwargs):
        whole = is_whole(f"{args.output_dir}/checkpoint-{state.global_step}")
        self.saved.append((state.global_step, state.log_history[-1]["step"], whole))


def test_on_save_is_called_when_durable_with_the_state_at_its_step():
    notes = Notes()
    trainer(callbacks=[notes]).train()
    assert [step for step, _ in notes.submitted] == [2, 4, 6]
    assert notes.saved == [(2, 2, True), (4, 4, True), (6, 6, True)]
    assert all(handle.result().path for handle in notes.handles)


def test_training_goes_on_while_files_are_written():
    class Release(transformers.TrainerCallback):
        seen = None
        saved = ()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                self.hold = held("fdatasync")
                self.hold.__enter__()
            if state.global_step == 5:
                self.seen = checkpoints()
                self.hold.__exit__(None, None, None)

        def on_save(self, args, state, control, **kwargs):
            self.saved = (*self.saved, state.global_step)

    release = Release()
    made = trainer(save_steps=3, max_steps=5, callbacks=[release])
    before = {name: each.clone() for name, each in made.model.state_dict().items()}
    made.train()
    assert release.seen == []
    assert release.saved == (3, 5)
    assert is_whole("out/checkpoint-3")
    assert not torch.equal(before["lm_head.weight"], made.model.lm_head.weight)


def test_epoch_end_does_not_save_a_step_twice():
    notes = Notes()
    trainer(save_strategy="epoch", max_steps=-1, num_train_epochs=2, callbacks=[notes]).train()
    assert [step for step, _ in notes.submitted] == [16, 32]
    assert [step for step, *_ in notes.saved] == [16, 32]


def test_on_save_of_the_last_checkpoint_comes_before_the_end_of_epoch_and_training():
    events = []

    class Events(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            events.append(f"save {state.global_step}")

        def on_epoch_end(self, *args, **kwargs):
            events.append("epoch")

        def on_train_end(self, *args, **kwargs):
            events.append("train")

    trainer(callbacks=[Events()]).train()
    assert events == ["save 2", "save 4", "save 6", "epoch", "train"]


def test_on_save_may_stop_the_training():
    class Enough(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = True
            return control

    made = trainer(max_steps=1000, callbacks=[Enough()])
    made.train()
    assert made.state.global_step < 1000


def test_checkpoint_stays_until_its_on_save_has_been_called():
    class Late(transformers.TrainerCallback):
        seen = ()

        def on_save(self, args, state, control, **kwargs):
            self.seen = (*self.seen, is_whole(f"out/checkpoint-{state.global_step}"))

    late = Late()
    trainer(save_steps=1, save_total_limit=1, callbacks=[late]).train()
    assert late.seen == (True,) * 6
    assert checkpoints() == ["checkpoint-6"]


def test_rotation_leaves_a_durable_checkpoint_at_every_moment():
    class Inspector(transformers.TrainerCallback):
        found = ()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step > 2:
                self.found = (*self.found, self.one_is_whole())

        def one_is_whole(self):
            names = None
            while names != checkpoints():  # one may be removed meanwhile
                names = checkpoints()
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        if is_whole(f"out/{name}"):
                            return True
            return False

    class Wait(transformers.TrainerCallback):
        def on_save_submitted(self, args, state, control, handle=None, **kwargs):
            if state.global_step == 1:
                handle.result()

    inspector = Inspector()
    trainer(save_steps=1, max_steps=12, save_total_limit=1, callbacks=[Wait(), inspector]).train()
    assert inspector.found
    assert all(inspector.found)


def test_push_follows_the_checkpoint_with_the_state_at_its_step(monkeypatch):
    pushed = []

    class Pushes(OurTrainer):
        def init_hf_repo(self, *args, **kwargs):
            self.hub_model_id, self.push_in_progress = "user/model", None

        def _finish_current_push(self):
            pass

    class Job:
        def done(self):
            return True

    class Hub:
        def upload_folder(self, *, folder_path, commit_message, **kwargs):
            assert is_whole("out/" + commit_message.replace(f"{PROGRESS} ", "checkpoint-"))
            assert os.path.exists("out/model.safetensors")
            pushed.append(commit_message)
            return Job()

    monkeypatch.setattr(transformers.trainer, "hf_api", lambda *args, **kwargs: Hub())
    notes = Notes()
    trainer(Pushes, push_to_hub=True, hub_always_push=True, callbacks=[notes]).train()
    assert pushed == [f"{PROGRESS} {step}" for step in (2, 4, 6)]
    assert [whole for *_, whole in notes.saved] == [True] * 3


@pytest.mark.parametrize("limit", [None, 1])
def test_saves_outside_the_output_directory_are_left_alone(limit):
    class Else(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            torch.save(model.state_dict(), f"step{state.global_step}.pt")

    trainer(save_total_limit=limit, callbacks=[Else()]).train()
    assert all(torch.load(f"step{step}.pt") for step in range(1, 7))
