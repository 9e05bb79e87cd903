"""The scenarios of test_trainer_ranks.py, which torchrun starts on two ranks.

    trainer_ranks.py SCENARIO...

Each scenario runs in a directory of its own name.
"""

import contextlib
import errno
import json
import os
import sys
from pathlib import Path

import stillframe
import torch.distributed as dist
from fix_trainer import OurTrainer, checkpoints, is_whole, trainer, transformers
from stillframe._base.distributed import poll
from stillframe._huggingface.ranks import Ranks
from stillframe.testing import fault

NOTES = {}
FAULTS = []  # injected faults that stay active until the process ends


class Notes(transformers.TrainerCallback):
    def on_save_submitted(self, args, state, control, handle=None, **kwargs):
        NOTES.setdefault("submitted", []).append((state.global_step, handle is not None))

    def on_save(self, args, state, control, **kwargs):
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        files = {f"rng_state_{rank}.pth" for rank in range(dist.get_world_size())}
        whole = is_whole(path, save_only_model=True) and files <= set(os.listdir(path))
        NOTES.setdefault("saved", []).append((state.global_step, whole))


def trains(cls=OurTrainer):
    trainer(
        cls,
        save_total_limit=1,
        callbacks=[Notes()],
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        max_steps=8,
    ).train()


def hears_late():
    """Let rank 1 learn only after the last step that its checkpoints are durable."""
    if dist.get_rank() == 1:
        own, Ranks.has_ended = Ranks.has_ended, lambda ranks, number: False

        class Late(Notes):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 8:
                    Ranks.has_ended = own

        trainer(save_total_limit=1, callbacks=[Late()], max_steps=8).train()
    else:
        trainer(save_total_limit=1, callbacks=[Notes()], max_steps=8).train()


def trains_theirs():
    trains(transformers.Trainer)


def resumes():
    trainer(max_steps=6).train()
    made = trainer(max_steps=8)
    made.train(resume_from_checkpoint=True)
    NOTES["step"] = made.state.global_step


def full_disk():
    class Fail(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4 and dist.get_rank() == 0:
                FAULTS.append(fault("pwrite", err=errno.ENOSPC, sticky=True))
                FAULTS[0].__enter__()

    try:
        trainer(callbacks=[Fail(), Notes()]).train()
    except Exception as error:
        NOTES["error"] = f"{type(error).__name__}: {error}"


def other_rank_fails():
    class Broken(OurTrainer):
        def _save_rng_state(self, output_dir):
            if dist.get_rank() == 1 and self.state.global_step == 4:
                raise OSError(errno.EIO, "broken")
            super()._save_rng_state(output_dir)

    try:
        trainer(Broken).train()
    except Exception as error:
        NOTES["error"] = f"{type(error).__name__}: {error}"


def leader_fails_before_the_other_writes():
    """The leader removes the directory, and rank 1, which comes late, makes it again."""

    class Late(OurTrainer):
        def _save_rng_state(self, output_dir):
            if self.state.global_step == 4 and dist.get_rank() == 0:
                assert poll(Path("entered").exists, 60)
                raise OSError(errno.EIO, "broken")
            if self.state.global_step == 4:
                Path("entered").touch()
                assert poll(lambda: not os.path.exists(output_dir), 60)
                os.makedirs(output_dir)
            super()._save_rng_state(output_dir)

    try:
        trainer(Late).train()
    except Exception as error:
        NOTES["error"] = f"{type(error).__name__}: {error}"


def main():
    top = Path.cwd()
    for name in sys.argv[1:]:
        NOTES.clear()
        (top / name).mkdir(exist_ok=True)
        os.chdir(top / name)
        globals()[name]()
        with contextlib.suppress(stillframe.StillframeError):
            stillframe.wait_all()  # a failed training does not wait for the saves before
        dist.barrier()
        NOTES["left"] = sorted(os.listdir("out"))
        Path(f"rank{dist.get_rank()}.json").write_text(json.dumps(NOTES))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert checkpoints  # the helpers of the tests in this folder
    main()
