"""The ways in which a state is saved, and in which a file is loaded and looked at.

A way of saving writes `tree` to `path`. A way of loading returns what is wrong, or "".
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import states
import stillframe
import stillframe.dcp
import torch

Tree = dict[str, Any]


class WrongError(Exception):
    """A way ended without an error, but its result was wrong."""


# ---- saving -----------------------------------------------------------------------------------


def async_save(tree: Tree, path: str, state: states.State) -> None:
    _was_deferred(stillframe.async_save(tree, path).result(), state)


def safetensors_save(tree: Tree, path: str, state: states.State) -> None:
    handle = stillframe.async_save(tree["state_dict"], path, format="safetensors")
    _was_deferred(handle.result(), state)


def _was_deferred(report: stillframe.SaveReport | None, state: states.State) -> None:
    assert report is not None
    deferred = sum(state.sizes[: state.trained])
    if report.deferred_nbytes < deferred // 2:
        raise WrongError(f"{report.deferred_nbytes} bytes were deferred, and {deferred} could be")


def save(tree: Tree, path: str, _: states.State) -> None:
    stillframe.save(tree, path)


def plugin_save(tree: Tree, path: str, _: states.State) -> None:
    from stillframe.lightning import AsyncCheckpointIO

    plugin = AsyncCheckpointIO()
    plugin.save_checkpoint(tree, path)
    plugin.teardown()


def torch_save(tree: Tree, path: str, _: states.State) -> None:
    torch.save(tree, path)


def snapshot_save(tree: Tree, path: str, _: states.State) -> None:
    with stillframe.snapshot(tree) as snapshot:
        torch.save(snapshot.tree, path)


def dcp_save(tree: Tree, path: str, _: states.State) -> None:
    stillframe.dcp.save(tree, path, no_dist=True)


def dcp_async_save(tree: Tree, path: str, _: states.State) -> None:
    stillframe.dcp.async_save(tree, path, no_dist=True).upload_completion.result()


# ---- loading ----------------------------------------------------------------------------------


def _as_it_is(storage: Any, _: str) -> Any:
    return storage


def _loads(**arguments: Any) -> Callable[[str, states.State], str]:
    def load(path: str, state: states.State) -> str:
        return states.find_wrong(stillframe.load(path, **arguments), state)

    return load


def _torch_loads(**arguments: Any) -> Callable[[str, states.State], str]:
    def load(path: str, state: states.State) -> str:
        return states.find_wrong(torch.load(path, **arguments), state)

    return load


def load_into(path: str, state: states.State) -> str:
    target = states.make_target(state)
    stillframe.load(path, into=target)
    return states.find_wrong(target, state)


def plugin_load(path: str, state: states.State) -> str:
    from stillframe.lightning import AsyncCheckpointIO

    return states.find_wrong(AsyncCheckpointIO().load_checkpoint(path), state)


def resume(path: str, state: states.State) -> str:
    """Let a Trainer resume from the file. The module compares its weights and keeps none."""
    import lightning.pytorch as pl
    from stillframe.lightning import AsyncCheckpointIO

    found: list[str] = []

    class Module(pl.LightningModule):
        strict_loading = False

        def on_load_checkpoint(self, checkpoint: Tree) -> None:
            found.append(states.find_wrong(checkpoint, state))

        def training_step(self, *_: Any) -> None:
            pass

        def configure_optimizers(self) -> None:
            pass

    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        max_epochs=4, limit_train_batches=1, accelerator="cpu", plugins=[AsyncCheckpointIO()], **off
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(2, 1)), ckpt_path=path)
    return "; ".join(found) if found else "the module was given nothing"


def safetensors_load(path: str, state: states.State) -> str:
    from safetensors.torch import load_file

    return "; ".join(states.wrong_tensors(load_file(path), state))


def _commands(*command: str) -> Callable[[str, states.State], str]:
    def run(path: str, _: states.State) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "stillframe", *command, path],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        last = (done.stdout.strip().splitlines() or [""])[-1]
        return f"exit status {done.returncode}: {last}" if done.returncode else ""

    return run


def _dcp_loads(ours: bool) -> Callable[[str, states.State], str]:
    def load(path: str, state: states.State) -> str:
        from torch.distributed import checkpoint as dcp

        tree = {"state_dict": states.make_target(state)["state_dict"]}
        reader = stillframe.dcp.Reader(path) if ours else dcp.FileSystemReader(path)
        dcp.load(tree, storage_reader=reader, no_dist=True)
        return "; ".join(states.wrong_tensors(tree["state_dict"], state))

    return load


# ---- which there are --------------------------------------------------------------------------

SAVES = {
    "async_save": async_save,
    "torch.save": torch_save,
    "save": save,
    "Lightning plugin": plugin_save,
    "snapshot, torch.save": snapshot_save,
    "safetensors": safetensors_save,
    "dcp.save": dcp_save,
    "dcp.async_save": dcp_async_save,
}
LOADS = {
    "load": _loads(),
    "load(weights_only=False)": _loads(weights_only=False),
    'load(map_location="cpu")': _loads(map_location="cpu"),
    "load(map_location=function)": _loads(map_location=_as_it_is),
    "load(map_location=dict)": _loads(map_location={"cuda:0": "cpu"}),
    "load(verify=False)": _loads(verify=False),
    "load(shared=True)": _loads(shared=True),
    "load(mmap=True)": _loads(mmap=True),
    "load(mmap, verify=False)": _loads(mmap=True, verify=False),
    "load(into=)": load_into,
    "torch.load": _torch_loads(),
    "torch.load(mmap=True)": _torch_loads(mmap=True),
    "verify": _commands("verify"),
    "inspect": _commands("inspect"),
    "plugin's load": plugin_load,
    "Lightning resume": resume,
}
DCP_LOADS = {
    "dcp.load": _dcp_loads(ours=False),
    "dcp.load, our Reader": _dcp_loads(ours=True),
    "verify": _commands("verify"),
}
FLAT_LOADS = {"safetensors.torch.load_file": safetensors_load}
EVERY_LOAD = (*LOADS, *DCP_LOADS, *FLAT_LOADS)
# The loads of files by writers other than async_save and torch.save, whose layout is the same.
_FEW_LOADS = ("load", "load(into=)", "torch.load", "verify", "Lightning resume")
_TWO_COPIES = ("snapshot, torch.save", "dcp.async_save")


def table_of(saving: str) -> dict[str, Callable[[str, states.State], str]]:
    """Return the ways that can load what `saving` writes."""
    if saving == "safetensors":
        return FLAT_LOADS
    return DCP_LOADS if saving.startswith("dcp") else LOADS


def loads_of(saving: str, *, every: bool) -> tuple[str, ...]:
    """Return the ways to try on a file that `saving` wrote: a choice, or with `every` all."""
    if table_of(saving) is not LOADS:
        return tuple(table_of(saving))
    if every or saving in ("async_save", "torch.save"):
        return tuple(LOADS)
    return _FEW_LOADS


def copies_in_memory(way: str) -> int:
    """Return how many times a way has all of the state in memory."""
    return 2 if way in _TWO_COPIES else 1


def quiet() -> None:
    """Turn off expected warnings of torch and Lightning."""
    warnings.simplefilter("ignore")
