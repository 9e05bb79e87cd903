"""Implements `CPUOffloadCallback` for `lightning` and `pytorch_lightning`.

Lightning gives every callback the checkpoint before it is written. This callback replaces the
tensors under some keys by copies in host memory. It copies all these keys in one snapshot, so that
tensors shared between keys stay shared. The memory of a copy goes back to the pool when the writer
of the checkpoint has dropped the copy.

The callback never waits for memory of the pool, because the training thread itself may have to
free that memory. Tensors that do not fit at once are copied to ordinary memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from stillframe._base import sizes
from stillframe._base.arguments import check_booleans
from stillframe._lightning.plugin import saves_with_plugin_alone
from stillframe._snapshot.copy import copy_to_ordinary_memory
from stillframe._snapshot.snapshot import snapshot_without_waiting
from stillframe._tree.walk import Tree, paths
from stillframe.errors import PoolExhaustedError

log = logging.getLogger("stillframe")

_DEFAULT_KEYS = ("state_dict", "optimizer_states", "lr_schedulers")
_SHOWN = 10  # how many skipped objects are shown from each end of the list

# (strategy, reason). Checked first, because some are subclasses of a compatible strategy.
_INCOMPATIBLE = (
    ("FSDPStrategy", "FSDP saves a sharded state, in which every rank has a part"),
    ("ModelParallelStrategy", "ModelParallel saves DTensors, in which every rank has a part"),
    ("DeepSpeedStrategy", "DeepSpeed has its own engine write its own format on every rank"),
    ("XLAStrategy", "XLA moves its lazy tensors to the host itself"),
    ("SingleDeviceXLAStrategy", "XLA moves its lazy tensors to the host itself"),
)
_COMPATIBLE = ("DDPStrategy", "SingleDeviceStrategy")
_COMPATIBLE_BY_NAME = ("DataParallelStrategy",)  # removed in Lightning 2, still used by older code
_STEP_COUNTER_BYTES = 4  # of each parameter in an optimizer's state


class OffloadHooks:
    """Copies a checkpoint's tensors to host memory before the checkpoint is written.

    Use it in trainings that keep their own CheckpointIO. On global rank 0, the tensors under
    `offload_keys` are copied into the pool of `stillframe.default_engine()`. The writer gets the
    state as it was at the save, however late it writes. Ties, views and container types are kept,
    and the module's own tensors are untouched. The memory goes back to the pool when the last of
    the checkpoint's tensors is gone. The callback never waits for memory: if the pool is too small
    or in use, it takes ordinary memory and logs that.

    If your writer forks, the child must not read the tensors. Use
    `stillframe.snapshot(..., shared=True)` with `hold_until` instead.

    The callback works with strategies whose rank 0 has the whole state. With stillframe's own
    `AsyncCheckpointIO` it only counts saves, because that plugin copies tensors itself. If the
    plugin wraps another CheckpointIO, the callback copies too. Lightning does not call callbacks
    for checkpoints with `save_weights_only=True`, so those tensors stay where they are.

    Args:
        offload_keys: Keys of the checkpoint to offload; by default `state_dict`,
            `optimizer_states` and `lr_schedulers`. A key that a checkpoint lacks is skipped. A
            warning names such a key once, unless it is a default key.
        log_skipped: Log every object that is not copied, because it is neither a tensor, a
            container nor a plain value. By default the first and last 10, at level DEBUG.

    Raises:
        TypeError: `offload_keys` is not a list of strings, or `log_skipped` is not a bool.

    Messages go to the logger "stillframe": one line for each save at level INFO, the rest at DEBUG.
    The callback's state in checkpoints has these keys:

        checkpoint_count     saves seen
        total_time_saved     seconds spent offloading; similar callbacks use this name
        total_memory_freed   GPU memory freed meanwhile, in units of 10^9 bytes
        is_enabled           whether the callback works with the strategy
    """

    _strategies: Any  # the package's module of strategies

    def __init__(self, offload_keys: list[str] | None = None, log_skipped: bool = False) -> None:
        super().__init__()
        if offload_keys is None:
            offload_keys = list(_DEFAULT_KEYS)
        if not isinstance(offload_keys, list) or not all(
            isinstance(key, str) for key in offload_keys
        ):
            raise TypeError(
                "offload_keys has to be a list of strings, such as ['state_dict'], not"
                f" {offload_keys!r}"
            )
        check_booleans(log_skipped=log_skipped)
        self.offload_keys = list(offload_keys)
        self.log_skipped = log_skipped
        self._checkpoint_count = 0
        self._total_time_saved = 0.0
        self._total_memory_freed = 0.0
        self._is_enabled = True
        self._is_set_up = False  # `setup` was called in this process
        self._seen_keys: set[str] = set()  # keys that a checkpoint had
        self._warned_keys: set[str] = set()  # keys that a warning has named

    @property
    def is_enabled(self) -> bool:
        """Whether the callback works with the Trainer's strategy; True until `setup` checks it."""
        return self._is_enabled

    # ---- the Trainer's hooks ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check whether the callback works with the strategy."""
        self._is_enabled, reason = self._check_compatibility(trainer.strategy)
        self._is_set_up = True
        name = type(trainer.strategy).__name__
        if self._is_enabled:
            log.debug("CPUOffloadCallback: enabled for %s (%s)", name, stage)
        elif trainer.global_rank == 0:
            log.warning("CPUOffloadCallback: disabled for %s: %s", name, reason)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Log the number of parameters, the model's size, and the expected checkpoint size."""
        if not self._is_enabled or trainer.global_rank != 0:
            return
        parameters = list(pl_module.parameters())
        model_bytes = _nbytes(pl_module.state_dict())
        optimizer_bytes, unknown = _optimizer_nbytes(getattr(trainer, "optimizers", None) or [])
        log.info(
            "CPUOffloadCallback: %s parameters, %s of them trained; model %s, checkpoint about"
            " %s%s",
            f"{sum(each.numel() for each in parameters):,}",
            f"{sum(each.numel() for each in parameters if each.requires_grad):,}",
            sizes.decimal(model_bytes),
            sizes.decimal(model_bytes + optimizer_bytes),
            f" and the state of {', '.join(unknown)}" if unknown else "",
        )

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Replace the values of `offload_keys` by copies in host memory, on global rank 0."""
        if not self._is_enabled or trainer.global_rank != 0:
            return
        self._checkpoint_count += 1
        count = self._checkpoint_count
        if saves_with_plugin_alone(trainer):
            log.info(
                "CPUOffloadCallback: checkpoint %d: left to stillframe's AsyncCheckpointIO", count
            )
            return

        entered = time.perf_counter()
        before = _get_allocated_gpu_bytes()
        log.debug(
            "CPUOffloadCallback: checkpoint %d: GPU memory before: %s", count, sizes.decimal(before)
        )
        values = {}
        for key in self.offload_keys:
            if key in checkpoint:
                values[key] = checkpoint[key]
                self._seen_keys.add(key)
            else:
                self._warn_of_missing(key, checkpoint)
        copies, tensors, nbytes = _offload(values)
        checkpoint.update(copies)
        del values  # may free GPU memory

        after = _get_allocated_gpu_bytes()
        freed = max(0, before - after)
        spent = time.perf_counter() - entered
        self._total_time_saved += spent
        self._total_memory_freed += freed / 1e9
        self._log_skipped(copies)
        log.info(
            "CPUOffloadCallback: checkpoint %d: %d tensors, %s in host memory after %.3f s",
            count,
            tensors,
            sizes.decimal(nbytes),
            spent,
        )
        log.debug(
            "CPUOffloadCallback: GPU memory after: %s, freed: %s; in all %d checkpoints, %.3f s,"
            " %.2f GB freed",
            sizes.decimal(after),
            sizes.decimal(freed),
            count,
            self._total_time_saved,
            self._total_memory_freed,
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the totals."""
        if self._is_enabled and trainer.global_rank == 0:
            log.info("CPUOffloadCallback: %s", self._format_totals())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Log the totals."""
        if trainer.global_rank == 0:
            log.debug("CPUOffloadCallback: teardown (%s): %s", stage, self._format_totals())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Log how many checkpoints were seen before the exception."""
        if trainer.global_rank == 0:
            log.info(
                "CPUOffloadCallback: %s ended the run; %s",
                type(exception).__name__,
                self._format_totals(),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the class describes."""
        return {
            "checkpoint_count": self._checkpoint_count,
            "total_time_saved": self._total_time_saved,
            "total_memory_freed": self._total_memory_freed,
            "is_enabled": self._is_enabled,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's totals. After `setup`, `is_enabled` stays, because the
        checkpoint may come from another strategy."""
        self._checkpoint_count = state_dict.get("checkpoint_count", 0)
        self._total_time_saved = state_dict.get("total_time_saved", 0.0)
        self._total_memory_freed = state_dict.get("total_memory_freed", 0.0)
        if not self._is_set_up:
            self._is_enabled = state_dict.get("is_enabled", True)

    # ---- private ----

    def _check_compatibility(self, strategy: Any) -> tuple[bool, str]:
        """Return whether the callback works with a strategy, and the reason if not."""
        for name, reason in _INCOMPATIBLE:
            if self._is_strategy(strategy, name):
                return False, reason
        if any(self._is_strategy(strategy, name) for name in _COMPATIBLE):
            return True, ""
        if any(base.__name__ in _COMPATIBLE_BY_NAME for base in type(strategy).__mro__):
            return True, ""
        return False, (
            "the strategy is unknown, and may save something other than rank 0's whole state"
            f" (known are those of {self._strategies.__name__})"
        )

    def _is_strategy(self, strategy: Any, name: str) -> bool:
        """Return whether `strategy` is an instance of the package's class of that name."""
        kind = getattr(self._strategies, name, None)
        return isinstance(kind, type) and isinstance(strategy, kind)

    def _format_totals(self) -> str:
        count, spent = self._checkpoint_count, self._total_time_saved
        return (
            f"{count} checkpoints, {spent:.3f} s in offloading"
            f" ({spent / max(count, 1):.3f} s each), {self._total_memory_freed:.2f} GB of GPU"
            " memory freed"
        )

    def _warn_of_missing(self, key: str, checkpoint: dict[str, Any]) -> None:
        """Warn once of a key that no checkpoint has had yet, unless it is a default key."""
        if key in self._seen_keys or key in _DEFAULT_KEYS or key in self._warned_keys:
            log.debug("CPUOffloadCallback: the checkpoint has no key %r", key)
            return
        self._warned_keys.add(key)
        log.warning(
            "CPUOffloadCallback: offload_keys has %r, and the checkpoint does not: nothing is"
            " offloaded for it. The checkpoint has %s",
            key,
            ", ".join(map(repr, checkpoint)),
        )

    def _log_skipped(self, copies: dict[str, Any]) -> None:
        """Log the custom objects in the copied values, which were not copied themselves."""
        level = logging.INFO if self.log_skipped else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        skipped = list(_skipped(copies))
        if not skipped:
            return
        shown: Iterable[str] = skipped
        if not self.log_skipped and len(skipped) > 2 * _SHOWN:
            left_out = len(skipped) - 2 * _SHOWN
            shown = [*skipped[:_SHOWN], f"... {left_out} more ...", *skipped[-_SHOWN:]]
        log.log(
            level,
            "CPUOffloadCallback: %d custom objects are left as they are: %s",
            len(skipped),
            "; ".join(shown),
        )


# Python's own errors about arguments shall name the class that users know.
OffloadHooks.__init__.__qualname__ = "CPUOffloadCallback.__init__"


def _offload(values: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Copy the values of all keys together, so that tensors shared between them stay shared.

    Returns:
        The keys with their copies, the number of tensors, and the bytes copied. A key whose value
        cannot be copied is left out.
    """
    try:
        return _copy(values)
    except Exception as error:
        if len(values) == 1:
            log.warning(
                "CPUOffloadCallback: %r stays as it is, because it could not be copied to host"
                " memory: %s: %s",
                next(iter(values)),
                type(error).__name__,
                str(error),
            )
            return {}, 0, 0
        # The text only: the error's traceback would keep the checkpoint alive.
        log.debug("CPUOffloadCallback: the keys are tried one by one: %s", str(error))
    copies: dict[str, Any] = {}
    nr_tensors = nbytes = 0
    for key, value in values.items():
        copied, more_tensors, more_nbytes = _offload({key: value})
        copies.update(copied)
        nr_tensors += more_tensors
        nbytes += more_nbytes
    if len(copies) < len(values):  # some values cannot be copied: copy the others together
        copyable = {key: values[key] for key in copies}
        del copies, copied  # frees their memory
        return _offload(copyable)
    # Tensors that were shared between keys are separate in these copies.
    return copies, nr_tensors, nbytes


def _copy(values: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Copy values into the pool, or into ordinary memory if they do not fit now."""
    try:
        taken = snapshot_without_waiting(values)
        return taken.tree, taken.num_tensors, taken.nbytes
    except PoolExhaustedError as error:
        log.warning("CPUOffloadCallback: ordinary memory is used: %s", str(error))
        return copy_to_ordinary_memory(values)


def _skipped(copies: dict[str, Any]) -> Iterable[str]:
    """Yield "Type at 'path'" for each object that was not copied."""
    left_whole = {id(node): node for node in Tree(copies).left_whole}
    for path, node in paths(copies, lambda node: id(node) in left_whole):
        yield f"{type(node).__name__} at {path!r}"


def _get_allocated_gpu_bytes() -> int:
    """Return the bytes of this process's tensors on the current GPU."""
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


def _nbytes(tree: Any) -> int:
    return Tree(tree).nbytes()


def _optimizer_nbytes(optimizers: Iterable[Any]) -> tuple[int, list[str]]:
    """Return the bytes of the optimizers' state, and the names of optimizers of unknown size.

    The state of an optimizer that has not stepped yet is estimated.
    """
    nbytes = 0
    unknown: list[str] = []
    for optimizer in optimizers:
        if optimizer.state:
            nbytes += _nbytes(dict(optimizer.state))
            continue
        for group in optimizer.param_groups:
            copies = _nr_state_tensors(type(optimizer), group)
            if copies is None:
                unknown.append(type(optimizer).__name__)
                break
            trained = [each for each in group["params"] if each.requires_grad]
            nbytes += sum(each.numel() * each.element_size() for each in trained) * copies
            if copies:  # such an optimizer also keeps a step counter
                nbytes += _STEP_COUNTER_BYTES * len(trained)
    return nbytes, unknown


def _nr_state_tensors(kind: type[Any], group: dict[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size an optimizer keeps for it; None if unknown.

    Source: the list of state in each class's documentation in torch.optim.
    """
    # A class with its own `step` may keep any state.
    if not str(getattr(kind.step, "__module__", None)).startswith("torch.optim"):
        return None
    names = {base.__name__ for base in kind.__mro__}
    if names & {"Adam", "AdamW", "NAdam", "RAdam", "SparseAdam"}:
        return 3 if group.get("amsgrad") else 2
    if names & {"Adamax", "Adadelta", "Rprop"}:
        return 2
    if names & {"Adagrad", "ASGD", "Muon"}:
        return 1
    if "RMSprop" in names:
        return 1 + sum(1 for option in ("momentum", "centered") if group.get(option))
    if "SGD" in names:
        return 1 if group.get("momentum") else 0
    return None
