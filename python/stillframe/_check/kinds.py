"""The kinds of directories that are checkpoints, and the files that each must have.

    kind           known by                          must have, besides whole files
    sharded        .metadata                         the files that .metadata names; in NAME.ckpt
                                                     meta.pt too, which Lightning writes last
    shards         *.distcp without .metadata,       never whole: .metadata is written last
                   and no other checkpoint
    transformers   the name checkpoint-N             model, trainer_state.json of step N; optimizer,
                                                     scheduler and RNG state unless only the model
                                                     was saved
    accelerate     random_states_N.pkl; or           model, optimizer, the RNG state of all ranks
                   optimizer.bin without files of    up to the highest; no gap in numbered files
                   a Trainer; or the name
                   checkpoint_N

Any directory may have the marker that `stillframe.checkpoint(url)` writes last. Then it must have
all files that the marker names, with their sizes.

A model is one of:

    safetensors or .bin files, with an index if there are several
    an adapter with its adapter_config.json
    the directory of a sharded model

training_args.bin says whether only the model was saved (`save_only_model`). Without that file,
only the model was saved if trainer_state.json is there, and optimizer, scheduler and RNG state
are all missing: trainer_state.json is written after them.

Nothing tells whether Accelerate should have written a scheduler. So a missing scheduler.bin goes
unnoticed here.

These rules come from the source of transformers 5.23.0 and accelerate 1.15.0.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any

from stillframe import _core
from stillframe._base import file_kinds, records, safetensors
from stillframe._base.disk import LOCAL, Disk
from stillframe._base.file_kinds import MARKER
from stillframe._check import pickles

# Names of files that are checkpoints, or parts of one. Files .bin and .pkl count only under the
# names that Hugging Face's libraries give, because other programs write such files too.
CHECKPOINT_NAME = re.compile(
    r".*\.(ckpt|pt|pth|safetensors|(safetensors|bin)\.index\.json)"
    r"|(.*pytorch_model.*|adapter_model|training_args|optimizer(_\d+)?|scheduler(_\d+)?"
    r"|sampler(_\d+)?|dl_state_dict(_\d+)?)\.bin"
    r"|(random_states|custom_checkpoint)_\d+\.pkl"
)
# Names of files that are only parts of a checkpoint. Many of them match CHECKPOINT_NAME too.
PART_NAME = re.compile(
    r"(model|adapter_model)(_\d+)?(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
    r"|.*-\d+-of-\d+\.(safetensors|bin)|.*\.distcp"
    r"|(.*pytorch_model.*|adapter_model|training_args|optimizer(_\d+)?|scheduler(_\d+)?"
    r"|sampler(_\d+)?|dl_state_dict(_\d+)?)\.bin(\.index\.json)?"
    r"|(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth"
    r"|(random_states|custom_checkpoint)_\d+\.pkl"
)
# Names of the directories to which a Trainer and Accelerate save.
_TRAINER = re.compile(r"checkpoint-(\d+)")
_ACCELERATE = re.compile(r"checkpoint_\d+")
_TRAINER_STATE, _TRAINING_ARGS = "trainer_state.json", "training_args.bin"
_UNFINISHED = "checkpoint-is-incomplete.txt"  # exists while a Trainer saves after SIGTERM
_TRAINER_FILES = {_TRAINER_STATE, _TRAINING_ARGS, _UNFINISHED, "config.json"}
# Names of the files and directories that transformers, Accelerate and DeepSpeed write for a model,
# and for an optimizer.
_MODEL = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)(\.index\.json)?|adapter_model\.(safetensors|bin)"
    r"|pytorch_model_fsdp(_\d+)?(_rank\d+)?(\.bin)?|global_step\d+|pytorch_model(_\d+)?"
)
_OPTIMIZER = re.compile(
    r"(rank\d+-of-\d+-)?optimizer\.pt(_.*)?|optimizer(_\d+)?(_rank\d+)?\.bin|optimizer_\d+"
    r"|global_step\d+|pytorch_model(_\d+)?"  # DeepSpeed's directories have both
)
# Files of one rank; the group is the rank.
_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_RANDOM_STATES = re.compile(r"random_states_(\d+)\.pkl")
# Accelerate's numbered files: stem, number and suffix. The first one often has no number.
_NUMBERED = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|custom_checkpoint)(?:_(\d+))?\.(safetensors|bin|pkl)"
)
_DEEPSPEED = "latest"  # DeepSpeed's file with the name of the directory that has its state


def checkpoint_kind_of(path: str, names: Sequence[str]) -> str | None:
    """Return the kind of a directory with these names, from the table at the head of this file, or
    None."""
    if file_kinds.is_sharded(names):
        return "sharded"
    files = [name for name in names if CHECKPOINT_NAME.fullmatch(name)]
    has_other_files = any(name != "meta.pt" for name in files)  # Lightning adds it to shards
    if any(map(file_kinds.is_shard, names)) and not has_other_files:
        return "shards"
    if any(map(_RANDOM_STATES.fullmatch, names)):
        return "accelerate"
    name = _base_name(path)
    # An empty directory may be a checkpoint that has just been begun.
    may_have_parts = not names or any(map(_is_part, names))
    has_trainer_files = not _TRAINER_FILES.isdisjoint(names)
    if _TRAINER.fullmatch(name) and (may_have_parts or has_trainer_files):
        return "transformers"
    if _TRAINER_STATE in names:
        return None  # a renamed checkpoint of a Trainer, or the Trainer's output directory
    if "optimizer.bin" in names or (_ACCELERATE.fullmatch(name) and may_have_parts):
        return "accelerate"
    return None


def _base_name(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def _is_part(name: str) -> bool:
    return PART_NAME.fullmatch(name) is not None


def incomplete(path: str, names: Sequence[str], disk: Disk = LOCAL) -> str | None:
    """Return a sentence about what a directory with these names lacks, or None. Of the files that
    are there, only JSON files are read. Raise OSError if one of them cannot be read."""
    problem = _describe_marker_mismatch(path, disk) if MARKER in names else None
    if problem is not None:
        return problem
    kind = checkpoint_kind_of(path, names)
    if kind == "sharded" and _base_name(path).endswith(".ckpt") and "meta.pt" not in names:
        return "it has no meta.pt, which Lightning writes last"
    if kind == "shards":
        return "it has no .metadata, which is written last"
    if kind == "transformers":
        return _describe_trainer_problem(path, names, disk)
    if kind == "accelerate":
        return _describe_accelerate_problem(path, names, disk)
    return None


def _describe_marker_mismatch(path: str, disk: Disk) -> str | None:
    """Return a sentence about a file that the marker names and that is missing or has another size,
    or None."""
    try:
        sizes = _read_json(os.path.join(path, MARKER), disk)["files"]
        listed = [(os.fsdecode(name), int(nbytes)) for name, nbytes in sizes.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"{MARKER} is truncated or damaged"
    for name, nbytes in listed:
        try:
            actual_nbytes = disk.nbytes(os.path.join(path, name))
        except FileNotFoundError:
            return f"it has no {name}, which {MARKER} names"
        if actual_nbytes != nbytes:
            return f"{name} has {actual_nbytes} bytes, and {MARKER} says {nbytes}"
    return None


def _describe_trainer_problem(path: str, names: Sequence[str], disk: Disk) -> str | None:
    """Return the result of `incomplete` for a checkpoint of a transformers Trainer."""
    step = int(_base_name(path).rpartition("-")[2])
    if _UNFINISHED in names:
        return f"it has {_UNFINISHED}"
    problem = _describe_missing_model(path, names, disk)
    if problem is not None:
        return problem
    if _TRAINER_STATE not in names:
        return f"it has no {_TRAINER_STATE}, which is written last"
    problem = _describe_damaged_json(path, names, disk)
    if problem is not None:
        return problem
    state = _read_json(os.path.join(path, _TRAINER_STATE), disk)
    if not isinstance(state, dict) or state.get("global_step") != step:
        other = state.get("global_step") if isinstance(state, dict) else None
        return f"its {_TRAINER_STATE} is of step {other}"
    tag, tag_problem = _read_and_check_deepspeed_tag(path, names, disk)
    has_part = {
        "optimizer": any(map(_OPTIMIZER.fullmatch, names)),
        "scheduler": "scheduler.pt" in names or tag is not None,
        "RNG state": any(map(_RNG.fullmatch, names)),
    }
    args: dict[str, Any] = {}  # stays empty if the names alone give the answer
    is_complete_of_one_rank = all(has_part.values()) and "rng_state.pth" in names
    if _TRAINING_ARGS in names and not is_complete_of_one_rank:
        args = _read_training_args(os.path.join(path, _TRAINING_ARGS), disk)
    has_only_model = not any(has_part.values())  # counts if the arguments do not say it
    is_model_only = args.get("save_only_model", has_only_model)
    if is_model_only:
        return tag_problem
    for part, is_there in has_part.items():
        if not is_there:
            return f"it has no {part}"
    tag_names_step = tag is not None and re.fullmatch(r"global_step\d+", tag) is not None
    if tag_names_step and tag != f"global_step{step}":
        return f"its DeepSpeed state is of {tag}"
    return tag_problem or _describe_missing_rank_file(names, _RNG, args.get("ranks", 1))


def _describe_accelerate_problem(path: str, names: Sequence[str], disk: Disk) -> str | None:
    """Return the result of `incomplete` for a checkpoint of Accelerate."""
    tag, problem = _read_and_check_deepspeed_tag(path, names, disk)
    problem = problem or _describe_missing_model(path, names, disk, may_be_saved_by_hooks=True)
    if problem is not None:
        return problem
    if tag is None and not any(map(_OPTIMIZER.fullmatch, names)):
        return "it has no optimizer"
    if not any(map(_RANDOM_STATES.fullmatch, names)):
        return "it has no random_states_0.pkl, which is written last"
    numbers_of: dict[tuple[str, str], set[int]] = {}  # of the numbered files, by stem and suffix
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            numbers_of.setdefault((match[1], match[3]), set()).add(int(match[2] or 0))
    for (stem, suffix), numbers in numbers_of.items():
        for number in range(max(numbers)):  # all numbers below the highest must be there
            if number not in numbers:
                # File 0 has no number in its name, unless it is of a custom object (.pkl).
                tail = f"_{number}" if number or suffix == "pkl" else ""
                return f"it has no {stem}{tail}.{suffix}"
    return _describe_missing_rank_file(names, _RANDOM_STATES, 1) or _describe_damaged_json(
        path, names, disk
    )


def _describe_missing_model(
    path: str, names: Sequence[str], disk: Disk, *, may_be_saved_by_hooks: bool = False
) -> str | None:
    """Return a sentence about the file of a model that is missing, or None. Hooks that the user has
    registered may have written the weights under any name."""
    if "adapter_model.safetensors" in names or "adapter_model.bin" in names:
        return None if "adapter_config.json" in names else "it has no adapter_config.json"
    models = [name for name in names if _MODEL.fullmatch(name)]
    # transformers writes a generation_config.json or an index only with a config.json.
    has_index = any(model.endswith(".json") for model in models)
    needs_config = "generation_config.json" in names or has_index
    if needs_config and not may_be_saved_by_hooks and "config.json" not in names:
        return "it has no config.json"
    if models:
        return None
    if may_be_saved_by_hooks:
        for name in names:
            if CHECKPOINT_NAME.fullmatch(name) and not _is_part(name):
                return None
    for name in names:
        directory = os.path.join(path, name)
        if not name.startswith(".") and disk.is_directory(directory):
            # further adapters, or the models of a pipeline
            for file in disk.names(directory):
                if _MODEL.fullmatch(file) or file.endswith(safetensors.SUFFIX):
                    return None
    return "it has no model"


def _read_and_check_deepspeed_tag(
    path: str, names: Sequence[str], disk: Disk
) -> tuple[str | None, str | None]:
    """Return the name of the directory with DeepSpeed's state, and a sentence if this directory is
    missing. Either may be None."""
    tag_file = os.path.join(path, _DEEPSPEED)
    if _DEEPSPEED not in names or disk.is_directory(tag_file):  # a directory is not DeepSpeed's
        return None, None
    tag = os.fsdecode(disk.read(tag_file, 256)).strip()  # 256: the longest name
    is_name = tag != "" and os.path.basename(tag) == tag
    if is_name and disk.is_directory(os.path.join(path, tag)):
        return tag, None
    return tag, f"it has no directory {tag}, which {_DEEPSPEED} names"


def _describe_missing_rank_file(
    names: Sequence[str], rank_file: re.Pattern[str], nr_ranks: int
) -> str | None:
    """Return a sentence about the first rank whose file is missing, or None.

    Args:
        rank_file: Matches the name of a rank's file; the first group is the rank. At least one of
            the names matches.
        nr_ranks: How many ranks have saved at least. 0: each node has a directory of its own, and
            nothing is checked.
    """
    if nr_ranks == 0:
        return None
    matches = [rank_file.fullmatch(name) for name in names]
    ranks = {int(match[1] or 0) for match in matches if match is not None}
    for rank in range(max(nr_ranks, max(ranks) + 1)):
        if rank not in ranks:
            return f"it has no RNG state of rank {rank}"
    return None


def _describe_damaged_json(path: str, names: Sequence[str], disk: Disk) -> str | None:
    """Return a sentence about the first JSON file that is damaged, or None."""
    for name in names:
        if name.endswith(".json"):
            try:
                _read_json(os.path.join(path, name), disk)
            except (ValueError, RecursionError):
                return f"{name} is truncated or damaged"
    return None


def _read_json(path: str, disk: Disk) -> Any:
    return json.loads(disk.read(path))


def _read_training_args(path: str, disk: Disk) -> dict[str, Any]:
    """Return these values from training_args.bin, as far as they can be read:

    save_only_model: Whether only the model was saved.
    ranks: How many ranks saved to this directory; 0 if each node has a directory of its own.
    """
    try:
        with disk.open(path, peek=True) as file:
            _, core = _core.restore(file.fileno(), True)  # True: compare CRCs
            if core is None:  # not an archive as torch writes it
                return {}
            try:
                (data,) = records.read(core, ("data.pkl",))
            finally:
                core.close()
        state = pickles.read(io.BytesIO(data)).state  # the attributes of the TrainingArguments
        found: dict[str, Any] = {"save_only_model": bool(state["save_only_model"])}
        processes = getattr(state.get("distributed_state"), "state", None) or {}
        if state.get("save_on_each_node"):
            found["ranks"] = 0
        elif isinstance(processes.get("num_processes"), int):
            found["ranks"] = processes["num_processes"]
        return found
    except (pickle.UnpicklingError, records.RestoreFailed, AttributeError, KeyError, TypeError):
        return {}


# ---- which files --------------------------------------------------------------------------


def checkpoints_in(
    directory: str, failures: list[OSError], disk: Disk = LOCAL, *, is_complete: bool = False
) -> Iterator[str]:
    """Yield the paths of checkpoints under a directory, sorted, without hidden ones:

    - files for which `is_checkpoint` is true, except the shards of sharded checkpoints;
    - directories of torch.distributed.checkpoint;
    - other checkpoint directories that lack a file, so that the caller reports them.

    Args:
        failures: Gets an error for each directory that cannot be listed.
        is_complete: The caller knows that `directory` lacks no file (its subdirectories may).
    """
    for root, directories, names in disk.walk(directory, failures.append):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        is_known_complete = is_complete and root == directory
        is_sharded = file_kinds.is_sharded(names)
        may_lack_files = not is_sharded and not is_known_complete
        if is_sharded:
            yield root
        if may_lack_files and _is_incomplete_checkpoint(
            root, [*names, *directories], failures, disk
        ):
            yield root
        for name in sorted(names):
            path = os.path.join(root, name)
            if name.startswith(".") or file_kinds.is_shard(name):
                continue
            if is_checkpoint(path, disk):
                yield path


def _is_incomplete_checkpoint(
    path: str, names: list[str], failures: list[OSError], disk: Disk
) -> bool:
    """Return whether a directory is a checkpoint that lacks a file. Append an error in reading the
    directory to `failures`, and return False."""
    try:
        return incomplete(path, names, disk) is not None
    except OSError as error:
        failures.append(error)
        return False


def is_checkpoint(path: str, disk: Disk = LOCAL) -> bool:
    """Return whether a file has a checkpoint's name, or begins like an archive or legacy file of
    torch, or like safetensors."""
    if CHECKPOINT_NAME.fullmatch(os.path.basename(path)):
        return True
    try:
        head = disk.read(path, 1024)
    except OSError as error:
        if disk.is_remote and not isinstance(error, FileNotFoundError):
            raise  # the store does not answer
        return False
    if head.startswith(b"PK\3\4") and len(head) >= 30:  # the first name begins at offset 30
        _, _, base_name = file_kinds.first_name_in_zip(head).partition(b"/")
        return base_name == b"data.pkl"  # the first name in an archive of torch: NAME/data.pkl
    return file_kinds.LEGACY in head[:32] or safetensors.begins_like_safetensors(head)
