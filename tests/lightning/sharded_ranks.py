"""The scenarios of test_sharded.py: two forked ranks that communicate over gloo.

    python sharded_ranks.py DIRECTORY

Each scenario has its own directory, in which each rank writes its notes. torch and both packages
are imported once, before the fork. Lightning takes the ranks for those of torchrun.
"""

import contextlib
import errno
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path

import stillframe
import torch
import torch.distributed as dist
from fix_lightning import loader, package, trainer
from fix_waits import eventually
from stillframe._dcp import checkpoint
from stillframe._lightning import sharded
from stillframe._save import ordered
from stillframe.testing import fault, slow
from torch.distributed.fsdp import fully_shard

RANKS = 2
MOST_S = 60  # of one scenario
PACKAGES = {name: package(name) for name in ("lightning", "pytorch_lightning")}


def model_of(pkg):
    class Sharded(pkg.Model):
        def configure_model(self):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    return Sharded()


def run(pkg, path, callbacks=(), *, plugin=True, model=None, ckpt_path=None, samples=64, **options):
    """Fit under ModelParallelStrategy; return the Trainer and its error."""
    strategies = importlib.import_module(
        f"{pkg.Trainer.__module__.split('.trainer')[0]}.strategies"
    )
    strategy = strategies.ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    chosen = pkg.AsyncCheckpointIO() if plugin is True else plugin or None
    fitted = trainer(
        pkg,
        path,
        plugin=chosen,
        callbacks=list(callbacks),
        strategy=strategy,
        devices=RANKS,
        **{"max_steps": 6, **options},
    )
    raised = None
    try:
        fitted.fit(model or model_of(pkg), loader(samples), ckpt_path=ckpt_path)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        raised = error
    fitted.raised = raised
    return fitted


def saving(pkg, path, **options):
    return pkg.ModelCheckpoint(
        path / "c", filename="{step}", every_n_train_steps=2, **{"save_top_k": 1, **options}
    )


def at_step(pkg, actions):
    """Make a callback after ModelCheckpoint that runs `actions[step](trainer)`."""

    class At(pkg.ModelCheckpoint):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step in actions:
                actions[trainer.global_step](trainer)

        on_train_epoch_end = on_validation_end = on_train_end = lambda self, *args: None

        @property
        def state_key(self):
            return "at"

    return At(save_top_k=0)


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def state_of(fitted):
    """Return this rank's part of parameters and optimizer state."""
    (optimizer,) = fitted.optimizers
    held = [local(each) for each in fitted.strategy.model.parameters()]
    for each in optimizer.state.values():
        held += [local(value) for value in each.values()]
    return held


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def resumed(pkg, path, checkpoint, **options):
    """Return the state of a new Trainer that resumes from a checkpoint and does no step."""
    held = {}

    class Observer(pkg.Callback):
        def on_train_start(self, trainer, module):
            held["step"], held["state"] = trainer.global_step, state_of(trainer)
            trainer.should_stop = True

    fitted = run(
        pkg, path, [Observer()], ckpt_path=checkpoint, max_steps=100, min_steps=0, **options
    )
    if "state" not in held:
        raise fitted.raised
    return held


def names(path):
    """List checkpoints and their files, with the ids of saves removed."""
    found = {}
    for each in sorted(path.iterdir()):
        found[each.name] = sorted({name.split(".")[0] or name for name in os.listdir(each)})
    return found


def note_of(error):
    text = "" if error is None else str(error)
    return {"raised": type(error).__name__, "errno": getattr(error, "errno", None), "text": text}


def full_on_rank_1(rank):
    full = fault("pwrite", err=errno.ENOSPC, sticky=True)
    return full if rank == 1 else contextlib.nullcontext()


def after_save_of(checkpoint, do):
    """Return an action that runs after the save of `checkpoint` has ended."""

    def action(trainer):
        ordered.wait_for_saves_of_path(checkpoint)
        do()

    return action


# ---- scenarios: each is given its directory and its rank ----


def trains(path, rank, pkg):
    """Train on slow disks; note unwritten files after the call, final files, and readers."""
    held, reports, unfinished = {}, [], []
    directory = path / "c"

    def observe(trainer):
        held[trainer.global_step] = state_of(trainer)
        newest = directory / f"step={trainer.global_step}.ckpt"
        unfinished.append(not (newest / ".metadata").exists())

    plugin = pkg.AsyncCheckpointIO(on_durable=lambda path, report: reports.append(report))
    with slow("fdatasync", 0.2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = run(
            pkg,
            path,
            [
                saving(pkg, path, save_last="link"),
                at_step(pkg, {2: observe, 4: observe, 6: observe}),
            ],
            plugin=plugin,
        )
    ours = [str(each.message) for each in caught if "stillframe" in each.filename]
    dist.barrier()
    by_us = resumed(pkg, path, directory / "last.ckpt")
    by_lightning = resumed(pkg, path, directory / "last.ckpt", plugin=False)
    return {
        **note_of(fitted.raised),
        "warnings": ours,
        "unfinished": unfinished,
        "files": names(directory),
        "link": os.readlink(directory / "last.ckpt"),
        "deferred": [report.deferred_nbytes for report in reports],
        "nbytes": [report.nbytes for report in reports],
        "steps": [by_us["step"], by_lightning["step"]],
        "same": [same(each["state"], held[6]) for each in (by_us, by_lightning)],
        "ours gone": not any(
            name in vars(fitted.strategy) for name in ("save_checkpoint", "load_checkpoint")
        ),
    }


def lightnings_own(path, rank, pkg):
    """Load Lightning's own checkpoint, save over it, and load it again."""
    checkpoint = path / "c"
    first = run(pkg, path, plugin=False, max_steps=2)
    first.save_checkpoint(checkpoint)
    before = resumed(pkg, path, checkpoint)

    def save(trainer):
        trainer.save_checkpoint(checkpoint)

    fitted = run(pkg, path, [at_step(pkg, {3: save})], max_steps=3)
    after = [resumed(pkg, path, checkpoint, plugin=each) for each in (True, False)]
    return {
        **note_of(fitted.raised),
        "steps": [before["step"], *(each["step"] for each in after)],
        "same": [same(before["state"], state_of(first))]
        + [same(each["state"], state_of(fitted)) for each in after],
        "files": sorted({name.split(".")[0] or name for name in os.listdir(checkpoint)}),
    }


def overwrites(path, rank, pkg):
    """Save repeatedly to `last.ckpt`; a save replaces files and links of its name."""
    meta_was_there = []  # at each commit, that is, before `.metadata` exists
    commit_metadata = checkpoint.commit_metadata

    def watched_commit(new, **kwargs):
        if not new.location.exists(new.name):
            meta_was_there.append(new.location.exists("meta.pt"))
        commit_metadata(new, **kwargs)

    if rank == 0:
        (path / "c").mkdir()
        (path / "target").mkdir()
        (path / "target" / "kept").touch()
        (path / "c" / "a.ckpt").write_bytes(b"a file")
        (path / "c" / "b.ckpt").symlink_to("../target")
    checkpoint.commit_metadata = watched_commit

    def save(name):
        return lambda trainer: trainer.save_checkpoint(path / "c" / name)

    actions = {1: save("a.ckpt"), 3: save("b.ckpt")}
    fitted = run(pkg, path, [saving(pkg, path, save_last=True), at_step(pkg, actions)], max_steps=6)
    checkpoint.commit_metadata = commit_metadata
    dist.barrier()
    last = resumed(pkg, path, path / "c" / "last.ckpt")
    return {
        **note_of(fitted.raised),
        "meta before commit": meta_was_there,
        "files": names(path / "c"),
        "step": last["step"],
        "same": same(last["state"], state_of(fitted)),
        "is a link": (path / "c" / "b.ckpt").is_symlink(),
        "target": os.listdir(path / "target"),
    }


def in_flight(path, rank, pkg):
    """Restore on every rank, during training, a checkpoint that is still being written."""
    loaded, unfinished = [], []
    checkpoint = path / "c" / "step=4.ckpt"

    def load(trainer):
        unfinished.append(not (checkpoint / ".metadata").exists())
        trainer._checkpoint_connector.resume_start(checkpoint)
        loaded.append(trainer._checkpoint_connector._loaded_checkpoint["global_step"])
        trainer._checkpoint_connector._loaded_checkpoint = {}

    with slow("fdatasync", 0.2):
        fitted = run(pkg, path, [saving(pkg, path), at_step(pkg, {4: load})])
    return {**note_of(fitted.raised), "loaded": loaded, "unfinished": unfinished}


def full_disk(path, rank, pkg):
    """Fill rank 1's disk: all ranks raise at the next save, once, and the old checkpoint stays."""
    full = full_on_rank_1(rank)

    actions = {
        3: after_save_of(path / "c" / "step=2.ckpt", full.__enter__),
        5: after_save_of(path / "c" / "step=4.ckpt", lambda: full.__exit__(None, None, None)),
    }
    plugin = pkg.AsyncCheckpointIO()
    callbacks = [at_step(pkg, actions), saving(pkg, path)]
    fitted = run(pkg, path, callbacks, plugin=plugin, max_steps=10)
    full.__exit__(None, None, None)
    dist.barrier()
    notes = {
        **note_of(fitted.raised),
        "notes": getattr(fitted.raised, "__notes__", []),
        "step": fitted.global_step,
        "files": names(path / "c"),
        "loads": resumed(pkg, path, path / "c" / "step=2.ckpt")["step"],
    }
    again = run(pkg, path / "again", [saving(pkg, path / "again")], plugin=plugin)
    return {**notes, "again": note_of(again.raised), "then": names(path / "again" / "c")}


def full_disk_at_the_end(path, rank, pkg):
    full = full_on_rank_1(rank)
    actions = {5: after_save_of(path / "c" / "step=4.ckpt", full.__enter__)}
    callbacks = [at_step(pkg, actions), saving(pkg, path)]
    fitted = run(pkg, path, callbacks)
    full.__exit__(None, None, None)
    dist.barrier()
    try:
        stillframe.wait_all()
    except Exception as error:
        return {"twice": repr(error)}
    return {**note_of(fitted.raised), "files": names(path / "c")}


def warns(path, rank, pkg):
    """Fail with `on_error="warn"`: training goes on, and the old checkpoint stays."""
    full = full_on_rank_1(rank)
    plugin = pkg.AsyncCheckpointIO(on_error="warn")
    actions = {3: after_save_of(path / "c" / "step=2.ckpt", full.__enter__)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = run(
            pkg, path, [at_step(pkg, actions), saving(pkg, path)], plugin=plugin, max_steps=6
        )
    full.__exit__(None, None, None)
    dist.barrier()
    warned = [str(each.message) for each in caught if "was not saved" in str(each.message)]
    return {**note_of(fitted.raised), "warned": len(warned), "files": names(path / "c")}


def call_fails(path, rank, pkg):
    """Fail the copy on rank 1: all ranks raise its error, once."""
    submit = sharded._start

    def broken(saver, state, *args):
        state["unknown"] = Broken()
        return submit(saver, state, *args)

    def save(trainer):
        if rank == 1:
            sharded._start = broken
        raised = []
        for number in range(2):
            try:
                trainer.save_checkpoint(path / f"c{number}")
            except Exception as error:
                raised.append(str(error))
            sharded._start = submit
        notes["messages"] = raised

    notes = {}
    fitted = run(pkg, path, [at_step(pkg, {3: save})])
    return {
        **notes,
        **note_of(fitted.raised),
        "files": sorted(each.name for each in path.glob("c*")),
    }


class Broken(torch.Tensor):
    """An object that cannot be copied."""

    def __new__(cls):
        return torch.Tensor._make_subclass(cls, torch.zeros(5000))

    def __reduce_ex__(self, protocol):
        raise ValueError("not to be copied")


def small_pool(path, rank, pkg):
    """Save a state that does not fit into the pool; it is saved during the call."""
    reports, done = [], []
    plugin = pkg.AsyncCheckpointIO(
        pool_bytes=1 << 24, on_durable=lambda path, report: reports.append(report)
    )
    model = model_of(pkg)
    model.extra = torch.nn.Parameter(torch.zeros(10_000_000))

    def observe(trainer):
        done.append((path / "c" / "step=2.ckpt" / ".metadata").exists())

    with slow("fdatasync", 0.1):
        fitted = run(
            pkg, path, [saving(pkg, path), at_step(pkg, {2: observe})], plugin=plugin, model=model
        )
    # callbacks run on a separate thread
    assert rank != 0 or eventually(lambda: len(reports) == 3, 30)
    blocked = [each.blocked_s == each.durable_after_s for each in reports]
    return {**note_of(fitted.raised), "done": done, "blocked": blocked}


def interrupted(path, rank, pkg):
    """Press Ctrl-C on all ranks during a save: the checkpoint is complete after the fit."""

    def interrupt(trainer):
        raise KeyboardInterrupt

    with slow("fdatasync", 0.2):
        fitted = run(pkg, path, [saving(pkg, path), at_step(pkg, {4: interrupt})])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    dist.barrier()
    step = resumed(pkg, path, path / "c" / "step=4.ckpt")["step"]
    return {**note_of(fitted.raised), "files": names(path / "c"), "step": step}


def incomplete(path, rank, pkg):
    """Load the directory of an unfinished save: all ranks refuse it with the reason."""
    if rank == 0:
        (path / "c").mkdir()
        (path / "c" / "meta.pt").touch()
    dist.barrier()
    return note_of(run(pkg, path, ckpt_path=path / "c").raised)


def fabric(path, rank, pkg):
    """Save with Fabric, whose saves return when the state is captured."""
    ours = importlib.import_module(f"stillframe.{pkg.name}")
    strategies = importlib.import_module(f"{pkg.Fabric.__module__.rsplit('.', 1)[0]}.strategies")

    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = strategies.ModelParallelStrategy(
        parallelize_fn=parallelize, data_parallel_size=RANKS, tensor_parallel_size=1
    )
    assert ours.sharded(ours.sharded(strategy)) is strategy
    fabric = pkg.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    torch.manual_seed(5)
    model = fabric.setup(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

    def step():
        fabric.backward(model(torch.ones(4, 300)).sum())
        optimizer.step()
        optimizer.zero_grad()

    def state():
        held = [local(each) for each in model.parameters()]
        return held + [
            local(v) for each in optimizer.optimizer.state.values() for v in each.values()
        ]

    for _ in range(4):
        step()
    with slow("fdatasync", 0.2):
        wanted = state()
        fabric.save(path / "c", {"model": model, "optimizer": optimizer, "step": 4})
        early = not (path / "c" / ".metadata").exists()
        step()
        changed = not same(state(), wanted)
        loaded = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(path / "c", loaded)
    notes = {
        "early": early,
        "changed": changed,
        "same": same(state(), wanted),
        "step": loaded["step"],
    }
    errnos = []
    with full_on_rank_1(rank):
        fabric.save(path / "d", {"model": model, "optimizer": optimizer})
        ordered.wait_for_saves_of_path(path / "d")
        try:
            fabric.save(path / "e", {"model": model, "optimizer": optimizer})
        except stillframe.SaveError as error:
            errnos.append(error.errno)
    with contextlib.suppress(stillframe.SaveError):
        stillframe.wait_all()
    fabric.save(path / "f", {"model": model, "optimizer": optimizer})
    stillframe.wait_all()
    fabric.barrier()
    refused = []
    for arguments in ({}, {"model": model, "other": model}):
        try:
            fabric.save(path / "g", arguments)
        except ValueError as error:
            refused.append(str(error)[:20])
    files = sorted(each.name for each in path.iterdir() if each.is_dir())
    return {**notes, "errnos": errnos, "files": files, "refused": refused}


def killed(path, rank, pkg):
    """Kill one rank during a save: the other ends with a reason, and the old checkpoint loads."""

    def kill(trainer):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with slow("fdatasync", 0.5):
        fitted = run(pkg, path, [saving(pkg, path), at_step(pkg, {4: kill})])
    return {
        "raised": fitted.raised is not None,
        "in time": time.monotonic() - began < 30,
        "whole": [(path / "c" / name / ".metadata").exists() for name in ("step=2.ckpt",)],
    }


def at_urls(path, rank, pkg):
    """Give URLs to ModelCheckpoint, to a save and to a load; then use a mirror."""
    os.chdir(path)
    refused = [run(pkg, path, [pkg.ModelCheckpoint("memory://bucket/run")]).raised]
    actions = {1: lambda trainer: trainer.save_checkpoint("memory://bucket/run/a.ckpt")}
    refused += [
        run(pkg, path, [at_step(pkg, actions)]).raised,
        run(pkg, path, ckpt_path="memory://bucket/run/a.ckpt").raised,
    ]
    plugin = pkg.AsyncCheckpointIO(mirror=f"file://{path}/store/run/")
    fitted = run(pkg, path, [saving(pkg, path)], plugin=plugin)
    stillframe.wait_all(timeout=60, mirrors=True)
    dist.barrier()
    return {
        **note_of(fitted.raised),
        "refused": [[type(each).__name__, str(each)] for each in refused],
        "local": sorted(each for each in os.listdir(path) if "rank" not in each),
        "store": names(path / "store/run"),
        "files": names(path / "c"),
    }


BOTH = (trains, fabric)
ONCE = (
    *(lightnings_own, overwrites, in_flight, full_disk, full_disk_at_the_end, warns, call_fails),
    *(small_pool, interrupted, incomplete, at_urls, killed),
)


# ---- running them ----


def run_rank(directory, rank):
    torch.set_num_threads(1)
    for scenario in (*BOTH, *ONCE):
        if len(sys.argv) > 2 and scenario.__name__ not in sys.argv[2:]:
            continue
        for name in PACKAGES if scenario in BOTH else ("lightning",):
            path = directory / f"{scenario.__name__}-{name}"
            path.mkdir(exist_ok=True)
            # a rank that hangs prints its stack
            faulthandler.dump_traceback_later(MOST_S, exit=True)
            began = time.monotonic()
            try:
                notes = scenario(path, rank, PACKAGES[name])
            except BaseException:
                notes = {"failed": traceback.format_exc()}
            notes["took"] = time.monotonic() - began
            (path / f"rank{rank}.json").write_text(json.dumps(notes))


def main(directory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            torchrun = {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": RANKS, "RANK": rank}
            torchrun |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
            torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in torchrun.items()}
            try:
                run_rank(directory, rank)
            finally:
                sys.stderr.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
