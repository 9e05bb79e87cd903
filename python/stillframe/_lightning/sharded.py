"""Saves checkpoints of strategies in which each rank saves a part of the state, through DCP.

These are `FSDPStrategy(state_dict_type="sharded")` and `ModelParallelStrategy`, of a Trainer and of
Fabric. They call DCP themselves and bypass the CheckpointIO. So this module replaces methods of the
strategy object:

    save_checkpoint              all ranks save through stillframe's DCP writer, during training
    load_checkpoint              waits for such saves, and refuses incomplete checkpoints
    lightning_module_state_dict  returns tensors where they are, because the save copies them
    optimizer_state              does the same for the state of an optimizer

Lightning and stillframe can load each other's checkpoints.

On every rank a save is an entry of the process's log: it starts after earlier removes, and later
removes and links wait for its end. The save either succeeds or fails on all ranks. A file or link
that has the name of the checkpoint's directory is removed first.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stillframe._base import urls
from stillframe._base.calls import inside_call
from stillframe._base.paths import CheckpointPath
from stillframe._lightning import ranks
from stillframe._lightning.callers import Fabric, sharded_model_key, takes_no_urls
from stillframe._lightning.checkpoints import Checkpoints
from stillframe._lightning.trainers import Wraps
from stillframe._lightning.work import Work
from stillframe._lightning.writers import PluginOptions, Writers
from stillframe._save import ordered
from stillframe._save.engine import Engine, limits_of
from stillframe._save.handle import SaveHandle, wait_for_end
from stillframe._save.options import SaveOptions
from stillframe._snapshot.save import SnapshotSave
from stillframe._watch import gate
from stillframe.errors import CorruptCheckpointError, SaveError, StillframeError

Original = Callable[..., Any]

# Lightning recognises a sharded checkpoint by this file.
META = "meta.pt"


def wrap_methods(wraps: Wraps, checkpoints: Checkpoints, trainer: Any) -> None:
    """Let `checkpoints` save the sharded checkpoints of `trainer`, until `wraps` is restored."""
    strategy = trainer.strategy
    wraps.put(strategy, "save_checkpoint", functools.partial(_save, checkpoints, trainer))
    wraps.put(strategy, "load_checkpoint", functools.partial(_load, checkpoints, strategy))
    # FSDPStrategy has the key "model". It is left out, because its hooks copy the state to the host
    # anyway.
    is_model_parallel = sharded_model_key(strategy) == "state_dict"
    if is_model_parallel:
        for name, function in (
            ("lightning_module_state_dict", _model_state),
            ("optimizer_state", _optimizer_state),
        ):
            module = getattr(type(strategy), name).__module__
            if module.endswith(".strategies.model_parallel"):  # Lightning's own method
                wraps.put(strategy, name, functools.partial(function, strategy))


def _save(
    checkpoints: Checkpoints,
    trainer: Any,
    original: Original,
    checkpoint: dict[str, Any],
    filepath: Any,
    storage_options: Any | None = None,
) -> None:
    """Save a checkpoint, in place of the strategy's `save_checkpoint`."""
    strategy = trainer.strategy
    if storage_options is not None:
        original(checkpoint, filepath, storage_options)  # raises the strategy's error
        return
    target = CheckpointPath.of(strategy.broadcast(filepath))  # the path that rank 0 was given
    refuse_url(strategy, target)
    rest = dict(checkpoint)
    model_key = sharded_model_key(strategy) or "state_dict"  # it has a key, see `wrap_methods`
    state = {model_key: rest.pop("state_dict")}
    for number, optimizer_state in enumerate(rest.pop("optimizer_states", ())):
        state[f"optimizer_{number}"] = optimizer_state
    contents = CheckpointContents(state, rest, strategy.global_rank)
    _save_together(checkpoints, strategy, trainer, contents, target)


def _load(
    checkpoints: Checkpoints, strategy: Any, original: Original, *args: Any, **kwargs: Any
) -> Any:
    """Load once the saves of all ranks to that path have ended, in place of `load_checkpoint`."""
    # The parameter's name is `path` in Fabric and `checkpoint_path` in a Trainer.
    path = args[0] if args else kwargs.get("path", kwargs.get("checkpoint_path"))
    target = CheckpointPath.of(strategy.broadcast(path))
    refuse_url(strategy, target)
    error: BaseException | None = None
    try:
        checkpoints.wait_for(target)
        gate.wait()  # the load will overwrite state that saves in flight may still copy
        if strategy.global_rank == 0:
            _check_and_repair_checkpoint(target.text)
    except (StillframeError, OSError) as caught:
        error = caught
    # A collective: when it returns, the saves of all ranks have ended.
    error, _ = ranks.agree(strategy, error)
    if error is not None:
        raise error
    return original(*args, **kwargs)


def refuse_url(strategy: Any, target: CheckpointPath) -> None:
    """Raise ValueError for a URL, which Lightning would use as the name of a local directory."""
    if target.remote:
        raise ValueError(
            f"{urls.shown(target.text)}: Lightning's {type(strategy).__name__} takes no URLs, and"
            " would use a local directory of this name. Save to a local directory, and give the"
            " plugin mirror=, which uploads it"
        )


def refuse_urls(trainer: Any) -> None:
    """Raise ValueError if a `ModelCheckpoint` saves to a URL and the strategy takes no URLs."""
    if takes_no_urls(trainer.strategy):
        for each in trainer.checkpoint_callbacks:
            if directory := getattr(each, "dirpath", None):
                refuse_url(trainer.strategy, CheckpointPath.of(directory))


def _check_and_repair_checkpoint(path: str) -> None:
    """Check that a checkpoint is complete. Replace `meta.pt` if it belongs to another save.

    Raises:
        CorruptCheckpointError: The checkpoint's save never ended.
        OSError: The right `meta.pt` cannot be put in place.
    """
    from stillframe._dcp import checkpoint, side_file

    if not os.path.isdir(path):
        return
    if not os.path.exists(checkpoint.metadata_path(path, None)):
        names = os.listdir(path)
        if META in names or any(name.endswith(checkpoint.SUFFIX) for name in names):
            raise CorruptCheckpointError(
                f"{path} is not a complete checkpoint: it has no .metadata, which a save writes"
                " last"
            )
    side_file.mend(path, META)


def _model_state(strategy: Any, original: Original) -> Any:
    """Return the model's state, in place of `lightning_module_state_dict`."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(strategy.model)


def _optimizer_state(strategy: Any, original: Original, optimizer: Any) -> Any:
    """Return an optimizer's state, in place of `optimizer_state`."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if type(optimizer).__name__.startswith("Lightning"):  # Lightning's wrapper
        optimizer = optimizer._optimizer
    return get_optimizer_state_dict(strategy.model, optimizer)


# ---- one save ----


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint on one rank."""

    state: dict[str, Any]  # the states of models and optimizers, which DCP saves
    rest: dict[str, Any]  # everything else, which only rank 0 saves, to `meta.pt`
    rank: int


def _save_together(
    checkpoints: Checkpoints,
    strategy: Any,
    caller: Any,
    contents: CheckpointContents,
    target: CheckpointPath,
) -> None:
    """Save a checkpoint on all ranks. If the save fails on one rank, all ranks raise the error.
    `caller` is a Trainer or `Fabric`."""

    def submit_contents(work: Work, target: CheckpointPath, overlap: bool) -> SaveHandle:
        writers = checkpoints.writers
        options = writers.options.save_options(target.name, overlap=overlap)
        return submit(contents, target, options, engine=writers.engine_of(work))

    with checkpoints.together(strategy):
        checkpoints.save_with(submit_contents, caller, target.given)


def submit(
    contents: CheckpointContents, target: CheckpointPath, options: SaveOptions, *, engine: Engine
) -> SaveHandle:
    """Start the save of one checkpoint, and return its handle. All ranks have to call this.

    A state that does not fit into the pool is saved from its own memory, in the call.

    Raises:
        BusyError: The engine of some rank is busy and was made with when_busy="raise". All ranks
            raise it.
        StillframeError, Exception: This rank could not copy its state. The save fails on all ranks.
    """
    from stillframe._dcp.api import saver_of_this_process
    from stillframe._dcp.rounds import SaveRequest
    from stillframe._dcp.side_file import SideFile

    is_rank_0 = contents.rank == 0
    saver = saver_of_this_process()
    with inside_call():
        ordered.refuse_in_external_work()
        request = SaveRequest(
            group=saver.group(None, no_dist=False),
            planner=None,
            overlap=options.overlap,
            durable=options.durable,
            engine=engine,
            when_busy="raise" if limits_of(engine).when_busy == "raise" else "wait",
            side_file=SideFile(META, contents.rest) if is_rank_0 else None,
            follow_link=options.follow_link,
            removes_file=is_rank_0,
            uncopied_if_full=True,
            on_durable=options.on_durable if is_rank_0 else None,
            mirror=options.mirror if is_rank_0 else None,
            error_of=as_exception,
        )
        save: SnapshotSave = _start(saver, contents.state, target, request)
        # Without a snapshot, the save reads the state's own memory.
        if save.snapshot() is None:
            wait_for_end(save)
    return save


def _start(saver: Any, state: dict[str, Any], target: CheckpointPath, request: Any) -> Any:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return saver.save(state, target, request)
    except CheckpointException as error:
        raise as_exception(error, target.text) from None


def as_exception(error: BaseException, path: str) -> Exception:
    """Convert an error of a save of `path` to an Exception.

    DCP's CheckpointException, which has the failures of all ranks, is only a BaseException.
    """
    failures: dict[int, Any] = getattr(error, "failures", {})  # (error, traceback) of each rank
    if not failures:
        if isinstance(error, Exception):
            return error
        return StillframeError(f"{path} was not saved: {error!r}")
    causes = {rank: cause for rank, (cause, _) in sorted(failures.items())}
    words = "; ".join(f"rank {rank}: {_text_of(cause)}" for rank, cause in causes.items())
    first = next(iter(causes.values()))
    if isinstance(first, OSError) and first.errno:
        return SaveError(first.errno, words, path, getattr(first, "phase", "write"))
    return StillframeError(f"{path} was not saved: {words}")


def _text_of(cause: BaseException) -> str:
    """Return the text of one rank's error without the path."""
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) if isinstance(cause, StillframeError) else repr(cause)


# ---- Fabric ----


def sharded(strategy: Any) -> Any:
    """Save the sharded checkpoints of a strategy of Fabric with stillframe.

        fabric = Fabric(strategy=sharded(ModelParallelStrategy(parallelize)))

    `fabric.save` returns once the state is captured, and `fabric.load` waits for saves of its path.
    The next save raises the errors of earlier saves, on all ranks. At the end of a training, call
    `stillframe.wait_all()`, which raises the other errors. `sharded` may be called again for the
    same strategy.

    Args:
        strategy: `FSDPStrategy(state_dict_type="sharded")` or `ModelParallelStrategy`, of
            `lightning.fabric` or `lightning_fabric`.

    Returns:
        The same object.

    Raises:
        TypeError, ValueError: The strategy is not supported; the message gives the reason.
    """
    _refuse_unsupported(strategy)
    wraps = Wraps()
    # `_load` lets the strategy's own method read, so no reader is needed.
    writers = Writers(reader=object, checkpoint_io=None, options=PluginOptions())
    checkpoints = Checkpoints("sharded", writers)
    wraps.put(strategy, "save_checkpoint", functools.partial(_save_fabric, checkpoints, strategy))
    wraps.put(strategy, "load_checkpoint", functools.partial(_load, checkpoints, strategy))
    return strategy


def _refuse_unsupported(strategy: Any) -> None:
    name = type(strategy).__name__
    if not hasattr(strategy, "save_checkpoint"):
        raise TypeError(f"sharded() takes a strategy of Fabric, not {strategy!r}")
    if hasattr(strategy, "lightning_module"):
        raise TypeError(
            f"sharded() is for Fabric, and this {name} is a Trainer's: give the Trainer"
            " plugins=[AsyncCheckpointIO()]"
        )
    if sharded_model_key(strategy) is not None:
        return
    classes = {cls.__name__ for cls in type(strategy).__mro__}
    if "FSDPStrategy" in classes and getattr(strategy, "_state_dict_type", "") != "sharded":
        raise ValueError(
            f'{name} gathers full state dicts on rank 0: give it state_dict_type="sharded"'
        )
    if "ModelParallelStrategy" in classes and not strategy._save_distributed_checkpoint:
        raise ValueError(
            f"{name} gathers full state dicts on rank 0: give it save_distributed_checkpoint=True"
        )
    if classes & {"FSDPStrategy", "ModelParallelStrategy"}:
        raise TypeError(f"{name} has a save_checkpoint of its own, which would not be called")
    raise TypeError(
        f"{name} does not save a part of the state on each rank: give Fabric"
        " plugins=[AsyncCheckpointIO()], where it takes them"
    )


def _save_fabric(
    checkpoints: Checkpoints,
    strategy: Any,
    original: Original,
    path: Any,
    state: dict[str, Any],
    storage_options: Any | None = None,
    filter: dict[str, Any] | None = None,
) -> None:
    """Save a checkpoint, in place of `save_checkpoint` of a strategy of Fabric."""
    model = _find_only_sharded_model(strategy, state)
    target = CheckpointPath.of(strategy.broadcast(path))
    refuse_url(strategy, target)
    if storage_options is not None or filter is not None or model is None:
        # Fabric's own method does not support these arguments either, and raises the error.
        original(path, state, storage_options=storage_options, filter=filter)
        return
    states, rest = _split_states(strategy, model, state)
    contents = CheckpointContents(states, rest, strategy.global_rank)
    _save_together(checkpoints, strategy, Fabric, contents, target)


def _find_only_sharded_model(strategy: Any, state: dict[str, Any]) -> Any:
    """Return the only sharded model in `state`; None if there is none, or more than one."""
    import torch

    if sharded_model_key(strategy) == "model":
        from torch.distributed.fsdp import FullyShardedDataParallel

        def is_sharded(model: Any) -> bool:
            return any(isinstance(each, FullyShardedDataParallel) for each in model.modules())
    else:
        from torch.distributed.tensor import DTensor

        def is_sharded(model: Any) -> bool:
            return any(isinstance(each, DTensor) for each in model.parameters())

    modules = (each for each in state.values() if isinstance(each, torch.nn.Module))
    models = [each for each in modules if is_sharded(each)]
    return models[0] if len(models) == 1 else None


def _split_states(
    strategy: Any, model: Any, state: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `state` into the states of models and optimizers, and all other values."""
    import torch

    get_sharded_model_state, get_sharded_optimizer_state = _state_getters(strategy, model)
    states: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, each in state.items():
        if isinstance(each, torch.nn.Module):
            states[name] = get_sharded_model_state(each)
        elif isinstance(each, torch.optim.Optimizer):
            states[name] = get_sharded_optimizer_state(each)
        elif hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            rest[name] = each.state_dict()
        else:
            rest[name] = each
    return states, rest


def _state_getters(strategy: Any, model: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions that get the sharded states of a model and of an optimizer."""
    if sharded_model_key(strategy) == "state_dict":
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        return get_model_state_dict, functools.partial(get_optimizer_state_dict, model)
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import api

    def use_sharded_state_dicts() -> Any:
        return FSDP.state_dict_type(
            model,
            api.StateDictType.SHARDED_STATE_DICT,
            api.ShardedStateDictConfig(offload_to_cpu=True),
            api.ShardedOptimStateDictConfig(offload_to_cpu=True),
        )

    def get_sharded_model_state(each: Any) -> Any:
        with use_sharded_state_dicts():
            return each.state_dict()

    def get_sharded_optimizer_state(optimizer: Any) -> Any:
        with use_sharded_state_dicts():
            return FSDP.optim_state_dict(model, optimizer)

    return get_sharded_model_state, get_sharded_optimizer_state
