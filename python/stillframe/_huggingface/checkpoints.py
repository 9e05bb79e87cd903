"""The checkpoints of one Trainer: how they are written, and what follows when they are durable.

    _save_checkpoint ──▶ save: open the directory, let the Trainer write into it, close it
                               └─▶ `_waiting` ──follow, at the end of a later step──▶ push, on_save
                                              ├─▶ rotation
                                              └─▶ `_failed`: raised by the next save or at the end

The Trainer writes to "checkpoint-N" in the directory that `_get_output_dir` returns. During a save,
`_get_output_dir` returns another directory, the *substitute*. There, "checkpoint-N" is a link to
the temporary directory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from stillframe import _core
from stillframe._base.calls import inside_call
from stillframe._check.latest import latest
from stillframe._huggingface.ranks import (
    LeaderDirectoryWriter,
    Ranks,
    lead,
    ranks_sharing_directory,
)
from stillframe._huggingface.redirect import redirect_saves_to
from stillframe._save import api, uploads
from stillframe._save.checkpoint import checkpoint
from stillframe._save.handle import SaveHandle, report_of, take_uncollected_error, wait_for_end
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

_SUBSTITUTE = ".stillframe-run"  # stands in for the output directory during a save
_SENTINEL = "checkpoint-is-incomplete.txt"  # see `remove_incomplete_marker`


@dataclass
class Checkpoint:
    """One checkpoint under way.

    Attributes:
        number: Counts the checkpoints from 0; the same on all ranks.
        path: The final directory of the checkpoint.
        run_dir: The parent of `path`.
        state: A copy of the Trainer's state at the call.
        push: Whether to push the checkpoint to the Hub.
        handle: The handle of the save; None if this rank is not the leader.
    """

    number: int
    path: str
    run_dir: str
    state: Any = None
    push: bool = False
    handle: SaveHandle | None = None


class Checkpoints:
    """The checkpoints of one Trainer, in one process.

    Attributes:
        substitute_dir: The directory that stands in for the output directory while a checkpoint is
            written; otherwise None.
        wants_push: The Trainer has asked to push the checkpoint that is written.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Checkpoints that `follow` has not handled yet, oldest first.
        self._waiting: deque[Checkpoint] = deque()
        # Checkpoints for which another rank has not yet called `on_save`.
        self._unannounced: deque[Checkpoint] = deque()
        # Failures not raised yet: this rank's failed saves, and errors that the leader reported.
        self._failures: list[SaveHandle | StillframeError] = []
        # For each run_dir, the paths of this training's checkpoints, oldest first.
        self._ours: defaultdict[str, list[str]] = defaultdict(list)
        self._count = 0  # how many checkpoints were begun
        self._ranks: Ranks | None = None  # set by the first save
        # The checkpoint that was just saved, until the Trainer calls `on_save`.
        self._submitted: Checkpoint | None = None
        self.substitute_dir: str | None = None
        self.wants_push = False
        self._resume_uploads()

    def _resume_uploads(self) -> None:
        """Upload checkpoints in the output directory that an earlier process did not upload."""
        trainer = self._trainer
        if trainer.args.should_save:
            # `uploads.resume` uses only the parent directory of the path.
            path = os.path.join(trainer.args.output_dir, "checkpoint")
            uploads.resume(trainer.mirror, trainer.storage_options, path)

    # ---- saving ----

    def save(self, run_dir: str, write: Callable[[], object]) -> None:
        """Write one checkpoint with `write()`, and return when all tensors are copied.

        Args:
            run_dir: The output directory of the current trial.
            write: Writes the files to the directory that `_get_output_dir` returns.

        Raises:
            Exception: An earlier checkpoint failed, or what `write` raises.
        """
        state = self._trainer.state
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        ckpt = Checkpoint(self._count, os.path.join(run_dir, name), run_dir)
        self.follow()
        if self._count == 0:
            self._ranks = ranks_sharing_directory(self._trainer.args)
        self._count += 1
        self.wants_push = False
        remove_incomplete_marker(ckpt.path)
        is_leader = self._ranks is None or self._ranks.is_leader
        block = (
            self._open_directory_as_leader(ckpt)
            if is_leader
            else self._redirect_to_leaders_directory(ckpt)
        )
        with block:
            write()
            self._correct_best_checkpoint_path(run_dir)

        ckpt.push = self.wants_push
        ckpt.state = copy.copy(state)
        ckpt.state.log_history = list(state.log_history)
        ckpt.state.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
        self._waiting.append(ckpt)
        self._submitted = ckpt
        if is_leader:
            # If this step was saved before, the path moves to the end of the list.
            self._drop_from_own_checkpoints(ckpt)
            self._ours[ckpt.run_dir].append(_normalize_path(ckpt.path))
            self._remove_old_checkpoints(ckpt)

    @contextlib.contextmanager
    def _open_directory_as_leader(self, ckpt: Checkpoint) -> Iterator[None]:
        """Open the directory on the leader. At the end of the block, wait for the other ranks and
        submit the save."""
        with contextlib.ExitStack() as stack:
            files: Any = None  # the open `checkpoint`

            def open_directory() -> str:
                nonlocal files
                self._raise_first_unseen_error()
                os.makedirs(ckpt.run_dir, exist_ok=True)
                options = self._trainer.storage_options
                files = stack.enter_context(
                    checkpoint(ckpt.path, mirror=self._trainer.mirror, storage_options=options)
                )
                self._make_substitute_output_dir(files.path, ckpt)
                directory: str = files.path
                return directory

            leading = lead(self._ranks, ckpt.number, open_directory)
            with (
                leading as directory,
                self._with_output_dir_replaced(directory),
                redirect_saves_to(files),
            ):
                yield
            # The stack closes the checkpoint next, which must not contain the substitute.
            shutil.rmtree(os.path.join(directory, _SUBSTITUTE))
        ckpt.handle = files.handle

    @contextlib.contextmanager
    def _redirect_to_leaders_directory(self, ckpt: Checkpoint) -> Iterator[None]:
        """Let this rank write its files into the leader's directory."""
        ranks, args = self._ranks, self._trainer.args
        assert ranks is not None
        self._raise_first_unseen_error()
        is_on_other_machine = args.process_index != args.local_process_index
        with ranks.follow(ckpt.number, ckpt.path) as directory:
            files = LeaderDirectoryWriter(directory, durable=is_on_other_machine)
            with self._with_output_dir_replaced(directory), redirect_saves_to(files):
                yield

    @contextlib.contextmanager
    def _with_output_dir_replaced(self, directory: str) -> Iterator[None]:
        """In the block, let `_get_output_dir` return the substitute that is in `directory`."""
        self.substitute_dir = os.path.join(directory, _SUBSTITUTE)
        try:
            yield
        finally:
            self.substitute_dir = None

    def _make_substitute_output_dir(
        self, directory: str | os.PathLike[str], ckpt: Checkpoint
    ) -> None:
        """Make the substitute of the output directory. In it "checkpoint-N" is a link to
        `directory`, where the files go. The Trainer looks there for the best checkpoint too."""
        substitute = os.path.join(directory, _SUBSTITUTE)
        os.mkdir(substitute)
        name = os.path.basename(ckpt.path)
        os.symlink(os.pardir, os.path.join(substitute, name))
        best = f"{PREFIX_CHECKPOINT_DIR}-{self._trainer.state.best_global_step}"
        best_path = os.path.join(ckpt.run_dir, best)
        if best != name and api.exists(best_path):
            os.symlink(os.path.abspath(best_path), os.path.join(substitute, best))

    def _correct_best_checkpoint_path(self, run_dir: str) -> None:
        """Replace the substitute's path, if the Trainer has named the best checkpoint by it, in the
        Trainer's state and in the state file."""
        state, substitute_dir = self._trainer.state, self.substitute_dir
        assert substitute_dir is not None
        best = state.best_model_checkpoint
        if best is None or os.path.dirname(best) != substitute_dir:
            return
        state.best_model_checkpoint = os.path.join(run_dir, os.path.basename(best))
        if self._trainer.args.should_save:
            state.save_to_json(os.path.join(substitute_dir, os.pardir, TRAINER_STATE_NAME))

    # ---- afterwards ----

    def follow(self) -> None:
        """Push durable checkpoints, call `on_save` for them, and remove old checkpoints."""
        while self._waiting and self._has_ended(self._waiting[0]):
            ckpt = self._waiting.popleft()
            if self._record_failure_if_any(ckpt):
                continue
            self._push_and_call_on_save(ckpt)
            if ckpt.handle is None:
                assert self._ranks is not None
                self._ranks.report_on_save_called(ckpt.number)
            else:
                if self._ranks is not None:
                    self._unannounced.append(ckpt)
                self._remove_old_checkpoints(ckpt)

    def finish(self) -> None:
        """Wait for every save and remove, call `follow`, and raise the first error."""
        self._wait_and_handle_ended()
        if self._unannounced:  # another rank has not called `on_save` for these yet
            assert self._ranks is not None
            last = self._unannounced[-1]
            self._ranks.wait_until_on_save_called(last.number)
            self._remove_old_checkpoints(last)
        wait_for_saves_and_removes()
        self._raise_first_unseen_error()

    def _wait_and_handle_ended(self) -> None:
        """Wait until every checkpoint under way has ended, and call `follow` after each."""
        for ckpt in list(self._waiting):
            if ckpt.handle is not None:
                wait_for_end(ckpt.handle)
            elif self._ranks is not None:
                self._ranks.wait_until_end_reported(ckpt.number)
            self.follow()

    def find_checkpoint_to_resume(self, resume_from: str | bool) -> str:
        """Wait for the saves in flight, and return the path of the checkpoint to resume from.

        `resume_from` is a path, or True for the newest whole checkpoint of the output directory.
        Raise ValueError, as transformers does, if there is none.
        """
        wait_for_saves_and_removes()
        if not isinstance(resume_from, bool):
            return resume_from
        directory = self._trainer.args.output_dir
        for path in reversed(sort_checkpoints(directory)):
            # `latest` may return a file in a directory that is not itself a checkpoint.
            if path.rpartition("-")[2].isdigit() and latest(path) == Path(path):
                return path
        raise ValueError(f"No valid checkpoint found in output directory ({directory})")

    def _has_ended(self, ckpt: Checkpoint) -> bool:
        """Return whether a checkpoint is durable or has failed, without waiting."""
        if ckpt.handle is not None:
            return ckpt.handle.done()
        assert self._ranks is not None
        return self._ranks.has_ended(ckpt.number)

    def _record_failure_if_any(self, ckpt: Checkpoint) -> bool:
        """Keep the error of a checkpoint that has ended. Return whether there is one."""
        if ckpt.handle is None:
            assert self._ranks is not None
            error = self._ranks.error_of(ckpt.number)
            if error is not None:
                self._failures.append(error)
            return error is not None
        failed = report_of(ckpt.handle) is None  # only a durable save has a report
        if failed:
            self._failures.append(ckpt.handle)
            self._drop_from_own_checkpoints(ckpt)
        # The other ranks' error names only the path. This rank raises the reason.
        if self._ranks is not None:
            self._ranks.report_ended(ckpt.number, ckpt.path if failed else None)
        return failed

    def _raise_first_unseen_error(self) -> None:
        """Raise the first error that nobody has seen, with the other errors as notes."""
        failures, self._failures = self._failures, []
        errors = [
            each if isinstance(each, StillframeError) else take_uncollected_error(each)
            for each in failures
        ]
        unseen = [error for error in errors if error is not None]  # None: the user has seen it
        for error in unseen[1:]:
            unseen[0].add_note(f"Another checkpoint failed as well: {error}")
        if unseen:
            raise unseen[0]

    def _push_and_call_on_save(self, ckpt: Checkpoint) -> None:
        """Push a durable checkpoint to the Hub and call `on_save`, with the state of its step."""
        trainer = self._trainer
        live_state = trainer.state
        trainer.state = ckpt.state
        try:
            if ckpt.push:
                trainer._push_from_checkpoint(ckpt.path)
            trainer.control = trainer.callback_handler.call_event(
                "on_save", trainer.args, ckpt.state, trainer.control
            )
        finally:
            trainer.state = live_state

    def attach(self) -> None:
        """Prepare for a training: replace `callback_handler.on_save`."""
        self._resume_uploads()  # again, because the user may have set `mirror` meanwhile
        handler = self._trainer.callback_handler
        if "on_save" not in vars(handler):
            handler.on_save = functools.partial(self._call_on_save_submitted, handler.on_save)

    def _call_on_save_submitted(self, original: Any, args: Any, state: Any, control: Any) -> Any:
        """Call `on_save_submitted` of the callbacks. The Trainer calls this after a save, in place
        of the method `original`."""
        ckpt, self._submitted = self._submitted, None
        if ckpt is None:  # a subclass has written a checkpoint without this module
            return original(args, state, control)
        control.should_save = False
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            hook = getattr(callback, "on_save_submitted", None)
            if hook is not None:
                changed = hook(args, ckpt.state, control, model=trainer.model, handle=ckpt.handle)
                control = control if changed is None else changed
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if is_last:
            trainer.control = control
            self._wait_and_handle_ended()  # so that `on_save` comes before the end of the training
            return trainer.control
        return control

    def _drop_from_own_checkpoints(self, ckpt: Checkpoint) -> None:
        """Remove a checkpoint's path from the list of this training's checkpoints."""
        path = _normalize_path(ckpt.path)
        ours = self._ours[ckpt.run_dir]
        ours[:] = [each for each in ours if each != path]

    def _remove_old_checkpoints(self, ckpt: Checkpoint) -> None:
        """Remove old checkpoints next to `ckpt`. Keep those for which some rank has not called
        `on_save` yet."""
        if self._ranks is not None:
            announced = self._ranks.announced()
            while self._unannounced and self._unannounced[0].number <= announced:
                self._unannounced.popleft()
        _remove_old_checkpoints(
            ckpt.run_dir,
            self._trainer.args.save_total_limit,
            self._trainer.state.best_model_checkpoint,
            self._ours[ckpt.run_dir],
            {_normalize_path(each.path) for each in (*self._waiting, *self._unannounced)},
        )


def remove_incomplete_marker(path: str) -> None:
    """Remove the file by which `enable_jit_checkpoint` marks a checkpoint as incomplete, and its
    directory. With stillframe, the directory must not exist before the save is complete."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(path, _SENTINEL))
        os.rmdir(path)  # fails, as intended, if an older checkpoint is there


def wait_for_saves_and_removes() -> None:
    """Wait until every save and remove in the process's log has ended. Raise no errors."""
    with inside_call():
        _core.log_drain(None)


def _remove_old_checkpoints(
    run_dir: str, limit: int | None, best: str | None, ours: list[str], unreported: Collection[str]
) -> None:
    """Remove the oldest checkpoints beyond `limit`, after the saves that were submitted so far.

    The newest checkpoint and the `best` checkpoint stay, as with transformers.

    Args:
        limit: `save_total_limit`; None or 0 keeps all.
        ours: The checkpoints of this training, oldest first. This takes off the list those that no
            longer exist.
        unreported: The checkpoints for which `on_save` has not been called. They stay.
    """
    if limit is None or limit <= 0:
        return
    ours[:] = [path for path in ours if path in unreported or api.exists(path)]
    kept = _checkpoints_of_earlier_runs(run_dir, ours) + ours
    protected = set(kept[-1:])  # the newest
    if best:
        protected.add(_normalize_path(best))
    fewest = max(limit, len(protected))
    for path in list(kept):
        if len(kept) <= fewest:
            return
        if path not in protected and path not in unreported:
            api.remove(path)
            kept.remove(path)


def _checkpoints_of_earlier_runs(run_dir: str, ours: list[str]) -> list[str]:
    """Return the checkpoints in `run_dir` that are not among `ours`, the oldest first."""
    times = {}
    for path in sort_checkpoints(run_dir):
        if path not in ours and api.exists(path):
            with contextlib.suppress(FileNotFoundError):  # a remove runs in the background
                times[path] = os.path.getmtime(path)
    return sorted(times, key=times.__getitem__)


def _normalize_path(path: str) -> str:
    """Return a path in the form in which transformers lists it."""
    return str(Path(path))
