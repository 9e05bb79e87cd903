"""The scenarios of test_ranks.py: `python ranks.py START DIRECTORY SCENARIO...`.

START is "spawn", "fork" (Lightning starts the ranks) or "torchrun" (they run already). Scenarios
run one after the other, because a process takes seconds to import everything. Each has its own
DIRECTORY/SCENARIO. Every rank writes its notes to rank<n>.json there, and each process writes the
scenario's error to raised<n>.txt.
"""

import contextlib
import errno
import json
import multiprocessing.util
import os
import sys
import traceback
from pathlib import Path

import stillframe._save.api
import torch
from fix_lightning import LightningModel, loader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from stillframe.lightning import AsyncCheckpointIO
from stillframe.testing import fault, slow

RANKS = 2


class Report:
    """A callback that writes this rank's notes."""

    def __init__(self, directory):
        self.directory, self.notes = directory, {}

    def write(self, rank):
        (Path(self.directory) / f"rank{rank}.json").write_text(json.dumps(self.notes))
        # End a rank that Lightning started before the interpreter ends: otherwise gloo's threads
        # abort the process, with or without stillframe.
        multiprocessing.util.Finalize(None, leave, exitpriority=0)


def leave():
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_trainer(start, directory, callbacks, **options):
    strategy = options.pop("strategy", "ddp" if start == "torchrun" else f"ddp_{start}")
    plugin = options.pop("plugin", None) or AsyncCheckpointIO()
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=RANKS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        limit_val_batches=0,
        plugins=[plugin],
        callbacks=callbacks,
        **{"max_steps": 6, **options},
    )


def checkpoints(directory, **options):
    return ModelCheckpoint(
        f"{directory}/c", filename="{step}", every_n_train_steps=2, **{"save_top_k": 1, **options}
    )


class Pools(Callback):
    """Notes at the end of training whether the rank has an engine."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_end(self, trainer, module):
        report = Report(self.directory)
        report.notes["engine"] = _has_engine()
        report.notes["step"] = trainer.global_step
        report.write(trainer.global_rank)


def trains(start, directory):
    """Train on a slow disk, with `save_last="link"`."""
    with slow("fdatasync", 0.2):
        run = make_trainer(
            start, directory, [Pools(directory), checkpoints(directory, save_last="link")]
        )
        model = LightningModel()
        before = model.head.weight.detach().clone()
        run.fit(model, loader())
    # A launched worker's weights reach its parent through a checkpoint that the parent removes.
    if not run.is_global_zero:
        return
    saved = torch.load(f"{directory}/c/step=6.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert not torch.equal(before, model.head.weight)


class FullDisk(Callback):
    """Fills rank 0's disk from step 2 on and notes the error of `save_checkpoint` on each rank."""

    def __init__(self, directory, late):
        self.directory, self.late = directory, late

    def on_train_batch_end(self, trainer, *args):
        step = trainer.global_step
        if trainer.is_global_zero and step == (6 if self.late else 2):
            self.full = fault("fdatasync", err=errno.ENOSPC, sticky=True)
            self.full.__enter__()

    def mend(self):
        if hasattr(self, "full"):
            self.full.__exit__(None, None, None)

    def on_exception(self, trainer, module, exception):
        # With torchrun, the launched ranks call this. If Lightning launches, the launching process
        # does.
        report = Report(self.directory)
        report.notes["raised"] = type(exception).__name__
        report.notes["errno"] = getattr(exception, "errno", None)
        report.notes["text"] = str(exception)
        report.notes["step"] = trainer.global_step
        report.write(trainer.global_rank)


def full_disk(start, directory):
    """Fill the disk so that a save during training notices it."""
    _fit_on(FullDisk(directory, late=False), start, directory, max_steps=8)


def full_disk_at_the_end(start, directory):
    """Fill the disk so that only the end of training notices it."""
    _fit_on(FullDisk(directory, late=True), start, directory, max_steps=6)


def full_disk_after_training(start, directory):
    """Fill the disk after training: the save is durable on return, and all ranks meet after it."""
    run = make_trainer(start, directory, [checkpoints(directory)])
    run.fit(LightningModel(), loader())
    report = Report(directory)
    report.notes["raised"] = None
    full = fault("fdatasync", err=errno.ENOSPC, sticky=True)
    with full if run.is_global_zero else contextlib.nullcontext():
        try:
            run.save_checkpoint(f"{directory}/c/late.ckpt")
        except stillframe.SaveError as error:
            report.notes["raised"] = error.errno
    run.strategy.barrier()
    report.write(run.global_rank)


def _fit_on(full_disk, start, directory, **options):
    try:
        make_trainer(start, directory, [full_disk, checkpoints(directory)], **options).fit(
            LightningModel(), loader(64)
        )
    finally:
        full_disk.mend()


class Resume(Callback):
    """Restores on every rank, during training, the checkpoint that rank 0 is still writing."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 4 and not hasattr(self, "done"):
            self.done = True
            path = f"{self.directory}/c/step=4.ckpt"
            trainer._checkpoint_connector.resume_start(path)
            report = Report(self.directory)
            report.notes["loaded"] = trainer._checkpoint_connector._loaded_checkpoint["global_step"]
            report.write(trainer.global_rank)
            trainer._checkpoint_connector._loaded_checkpoint = {}


def resumes(start, directory):
    with slow("fdatasync", 0.5):
        make_trainer(start, directory, [Resume(directory), checkpoints(directory)]).fit(
            LightningModel(), loader(64)
        )


def finds_a_rate(start, directory):
    with slow("fdatasync", 0.2):
        make_trainer(
            start,
            directory,
            [LearningRateFinder(num_training_steps=4), Pools(directory), checkpoints(directory)],
        ).fit(LightningModel(), loader(64))


def several_fits(start, directory):
    """Fit twice; each rank searches for the newest checkpoint as soon as its fit has ended."""
    plugin = AsyncCheckpointIO()
    with slow("fdatasync", 0.3):
        for steps in (4, 8):
            run = make_trainer(
                start,
                directory,
                [Pools(directory), checkpoints(directory, save_last=True)],
                max_steps=steps,
                plugin=plugin,
            )
            run.fit(LightningModel(), loader(64), ckpt_path="last")


def full_state(start, directory):
    """Train with FSDP2 and full state dicts, which rank 0 has completely."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Sharded(LightningModel):
        def configure_model(self):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    strategy = ModelParallelStrategy(
        data_parallel_size=RANKS, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    with slow("fdatasync", 0.2):
        run = make_trainer(
            start, directory, [Pools(directory), checkpoints(directory)], strategy=strategy
        )
        run.fit(Sharded(), loader())
    # This strategy never tears its CheckpointIO down.
    if run.is_global_zero:
        assert (Path(directory) / "c" / "step=6.ckpt").exists()


def train_with_fabric(fabric, directory):
    from torch import nn

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    with slow("fdatasync", 0.2):
        for nr in range(6):
            loss = model(torch.randn(4, 300)).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            fabric.save(f"{directory}/{nr}.ckpt", {"model": model, "optimizer": optimizer})
        stillframe.wait_all()
        fabric.barrier()
    fabric.load(f"{directory}/5.ckpt", {"model": model, "optimizer": optimizer})
    report = Report(directory)
    report.notes["engine"] = _has_engine()
    report.write(fabric.global_rank)


def fabric(start, directory):
    """Save with Fabric under DDP; `wait_all` waits for the last save."""
    import lightning.fabric

    run = lightning.fabric.Fabric(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if start == "torchrun" else f"ddp_{start}",
        plugins=[AsyncCheckpointIO()],
    )
    if start == "torchrun":
        run.launch()
        train_with_fabric(run, directory)
    else:
        run.launch(train_with_fabric, directory)


def fabric_fsdp2(start, directory):
    """Save the full state of an FSDP2 model with Fabric under DDP's strategy."""
    import lightning.fabric
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run = lightning.fabric.Fabric(
        accelerator="cpu", devices=RANKS, strategy="ddp", plugins=[AsyncCheckpointIO()]
    )
    run.launch()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with slow("fdatasync", 0.2):
        for nr in range(4):
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.save(f"{directory}/{nr}.ckpt", {"model": get_model_state_dict(model, options=full)})
        stillframe.wait_all()
        run.barrier()
    state = get_model_state_dict(model, options=full)
    loaded = run.load(f"{directory}/3.ckpt")["model"]
    same = all(torch.equal(state[name], loaded[name]) for name in state)
    report = Report(directory)
    report.notes.update(same=same, names=sorted(loaded), engine=_has_engine())
    report.write(run.global_rank)


def _has_engine():
    return stillframe._save.api._default.engine is not None


def main(start, directory, *scenarios):
    rank = os.environ.get("RANK", "")
    for name in scenarios:
        own = Path(directory) / name
        own.mkdir(exist_ok=True)
        print(f"{rank or 'launcher'}: {name}", file=sys.stderr, flush=True)
        try:
            globals()[name](start, str(own))
        except Exception:
            (own / f"raised{rank}.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    sys.stdout.flush()
    leave()
