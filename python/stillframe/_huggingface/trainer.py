"""Defines `AsyncCheckpointMixin`, which overrides the Trainer's methods about checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

from stillframe._huggingface.checkpoints import Checkpoints


def _wrap_save_checkpoint(save: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method `_save_checkpoint`, so that all files it writes become one checkpoint."""

    @functools.wraps(save)
    def save_checkpoint(self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        write = functools.partial(save, self, model, trial, *args, **kwargs)
        if self._stillframe.substitute_dir is None:
            self._stillframe.save(self._get_output_dir(trial), write)
        else:  # a subclass's wrapped method called this method of its base class
            write()

    return save_checkpoint


class AsyncCheckpointMixin:
    """Makes the checkpoints of a Trainer asynchronous, durable and never half written.

        class MyTrainer(AsyncCheckpointMixin, trl.SFTTrainer): ...

    The mixin has to be the first base. The files have the names and contents that the Trainer
    gives them. Training goes on while they are written. A directory `checkpoint-N` appears when all
    its files are on disk.

    `on_save` of callbacks is called at the end of the first step after the checkpoint is durable.
    It gets the Trainer's state of the checkpoint's step. A callback may also have a method
    `on_save_submitted(args, state, control, model=None, handle=None, **kwargs)`, which is called
    at once. `handle` is the `SaveHandle`, or None on ranks that do not write.

    `train` returns when every checkpoint is durable. A checkpoint that failed raises its error
    once, at the next checkpoint or at the end of the training. `resume_from_checkpoint=True`
    resumes from the newest whole checkpoint.

    With `mirror`, each durable checkpoint is uploaded to a store in the background. The rotation
    removes a checkpoint only after its upload; see docs/remote.md. Set `mirror` in the class, or
    on the Trainer before `train`:

        trainer.mirror = "s3://bucket/run/"

    Attributes:
        mirror: The URL of a directory in a store.
        storage_options: For the mirror's store; see `stillframe.async_save`.

    Raises:
        ValueError: The Trainer uses DeepSpeed, FSDP, XLA or SageMaker's model parallelism.
    """

    mirror: str | None = None
    storage_options: dict[str, Any] | None = None
    _stillframe: Checkpoints

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_save_checkpoint" in vars(cls):
            cls._save_checkpoint = _wrap_save_checkpoint(cls._save_checkpoint)  # type: ignore[method-assign]

    # The Trainer's constructor calls this.
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        refuse_unsupported(self)
        self._stillframe = Checkpoints(self)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if resume_from_checkpoint:
            resume_from_checkpoint = self._stillframe.find_checkpoint_to_resume(
                resume_from_checkpoint
            )
        self._stillframe.attach()
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    # The training loop calls this at the end of each step, and of each epoch.
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._stillframe.follow()
        return super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    @_wrap_save_checkpoint
    def _save_checkpoint(self, model: Any, trial: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(model, trial, **kwargs)  # type: ignore[misc]

    # The Trainer makes `checkpoint-N` in the directory that this returns.
    def _get_output_dir(self, trial: Any) -> Any:
        substitute_dir = self._stillframe.substitute_dir
        return substitute_dir or super()._get_output_dir(trial)  # type: ignore[misc]

    # The Trainer calls this during a save. The checkpoint can be pushed only later.
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._stillframe.substitute_dir is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]
        else:
            self._stillframe.wants_push = True

    # The training loop calls this last.
    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._stillframe.finish()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]


def refuse_unsupported(trainer: Any) -> None:
    """Raise ValueError for a Trainer whose checkpoints stillframe cannot write."""
    unsupported = (
        ("DeepSpeed", trainer.is_deepspeed_enabled),
        ("FSDP", trainer.is_fsdp_enabled),
        ("PyTorch/XLA", is_torch_xla_available()),
        ("SageMaker's model parallelism", is_sagemaker_mp_enabled()),
    )
    for name, is_used in unsupported:
        if is_used:
            raise ValueError(
                f"stillframe does not write checkpoints of {name}: use transformers' own Trainer"
            )
