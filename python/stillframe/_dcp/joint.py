"""One save of all ranks: a plan, the files of each rank, one commit.

This does what DCP's `save` does between a planner and a writer, but it uses plans again. A save
with such a plan and without errors exchanges only a few numbers (`Ranks.exchange`), three times:

    prepared ─numbers─▶ agreed ─▶ written ─numbers─▶ committed by rank 0 ─numbers─▶ ended
                           │         ▲
                           └─planned─┘   plans, results and metadata are sent as objects

The state dict may still be copied until the files are written. An error of any rank before or in
the commit fails the save on all ranks.

A plan depends only on the names, types and shapes in the state dicts of all ranks (`structure`).
Each rank keeps its part of the plan of an earlier save, by the structure of its state dict. The
ranks use a plan again if all of them have their parts of the plan of one save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from io import BytesIO
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from stillframe._dcp import checkpoint
from stillframe._dcp.checkpoint import RankFiles
from stillframe._dcp.ranks import Ranks
from stillframe._dcp.staged import StateDict
from stillframe._dcp.writer import FileSystemWriter

_MAX_PLANS = 8  # the most plans that are kept, each for one structure

ItemRanges = list[list[tuple[int, int]]]  # for each file, the offset and length of each item


class JointSave:
    """One save of all ranks.

    Args:
        plans: The plans kept so far; this save adds its own.
        number: The number of this save, the same on all ranks.
        planner: The user's planner, which makes a plan for each save; None for PyTorch's planner.
        wait: Waits until the bytes of the state dict's tensors are copied.
    """

    def __init__(
        self,
        ranks: Ranks,
        plans: Plans,
        number: int,
        writer: FileSystemWriter,
        planner: SavePlanner | None,
        wait: Callable[[], object],
    ) -> None:
        self._ranks = ranks
        self._plans = plans
        self._number = number
        self._writer = writer
        self._default_planner: DefaultSavePlanner | None = None  # None: the user gave a planner
        if planner is None:
            planner = self._default_planner = DefaultSavePlanner()
        self._planner: SavePlanner = planner
        self._wait = wait
        self._structure: Hashable = None  # None: the plan of this save is not kept
        self._reused: CachedPlan | None = None  # the plan to use again
        self._files: RankFiles | None = None
        self._metadata: Metadata | None = None  # of a new plan; on the coordinator only

    def prepare(self, state_dict: StateDict) -> tuple[int, bool]:
        """Do the part of this rank's work that needs no other rank. Nothing is written.

        Returns:
            The number of the save whose plan this rank still has, or 0; and whether every item has
            the same offset and length as in the last save with that plan.
        """
        if self._default_planner is None:
            self._wait()  # a user's planner may read the bytes
        is_coordinator = self._ranks.is_coordinator
        meta = self._writer.storage_meta()
        self._planner.set_up_planner(
            state_dict=state_dict, storage_meta=meta, is_coordinator=is_coordinator
        )
        self._writer.set_up_storage_writer(
            is_coordinator, rank=self._ranks.rank, use_collectives=True
        )
        if self._default_planner is None:
            return 0, False  # only plans of PyTorch's planner are kept
        with torch.no_grad():
            self._structure = structure(
                self._default_planner.state_dict, self._default_planner.mappings
            )
        kept = None if self._structure is None else self._plans.of(self._structure)
        if kept is None:
            return 0, False
        self._reused = kept
        self._files = self._writer.lay_out(kept.plan, self._resolve_item_data, self._wait)
        return kept.number, self._files.ranges == kept.ranges

    def save(self, has_common_plan: bool, has_same_ranges: bool, files_ids: list[int]) -> Metadata:
        """Make a plan if there is none to use again, then write and commit. Return the metadata.
        Called when all ranks have agreed to save.

        Args:
            has_common_plan: All ranks have their parts of the same plan.
            has_same_ranges: On all ranks, every item has the same offset and length as in the last
                save with that plan.
            files_ids: The id in the names of each rank's files.

        Raises:
            CheckpointException: The save failed on some rank. All ranks raise it.
        """
        if not has_common_plan:
            self._reused = None  # another rank does not have this plan
        plan = self._reused.plan if self._reused is not None else self._plan()

        ready: checkpoint.UncommittedCheckpoint | None = None
        failure: BaseException | None = None
        try:
            if self._reused is not None:
                self._writer.prepare_local_plan(plan)
            else:
                plan = self._planner.finish_plan(plan)
                self._files = self._writer.lay_out(plan, self._resolve_item_data, self._wait)
            self._wait()
            ready = self._write(has_same_ranges, files_ids)
        except BaseException as error:
            failure = error
        self._raise_if_any_rank_failed("write", failure)
        self._writer.mark_as_committing()

        assert self._files is not None
        results = None if has_same_ranges else self._ranks.gather(self._files.results())
        try:
            if self._ranks.is_coordinator:
                if ready is None:  # `_write` makes it only with `has_same_ranges`
                    ready = self._describe(results)
                self._writer.commit(ready)
        except BaseException as error:
            failure = error
        self._raise_if_any_rank_failed("write", failure)

        metadata = self._share_metadata(ready)
        if self._structure is not None:
            # The number of the save that made the plan.
            number = self._number if self._reused is None else self._reused.number
            kept = CachedPlan(number, plan, self._files.ranges, metadata, files_ids)
            self._plans.keep(self._structure, kept)
        if self._ranks.is_coordinator:
            self._writer.remove_unneeded_files()
        return metadata

    def _resolve_item_data(self, item: WriteItem) -> torch.Tensor | BytesIO:
        """Return an item's tensor or pickle. Before an object with tensors is pickled, wait for the
        tensors' bytes."""
        planner = self._default_planner
        if planner is not None and item.type is WriteItemType.BYTE_IO:
            value = planner.lookup_object(item.index)
            if not _is_plain_data(value):
                self._wait()
        return self._planner.resolve_data(item)

    def _plan(self) -> SavePlan:
        """Make a plan together with all ranks and return this rank's part. If a rank fails, all
        ranks raise CheckpointException."""
        plan: SavePlan | None = None
        plans: list[SavePlan] | None = None
        failure: BaseException | None = None
        try:
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        except BaseException as error:
            failure = error
        self._raise_if_any_rank_failed("plan", failure)
        gathered = self._ranks.gather(plan)
        try:
            if gathered is not None:
                plans, self._metadata = self._planner.create_global_plan(gathered)
                plans = self._writer.prepare_global_plan(plans)
        except BaseException as error:
            failure = error
        self._raise_if_any_rank_failed("plan", failure)
        scattered: SavePlan = self._ranks.scatter(plans)
        return scattered

    def _raise_if_any_rank_failed(self, step: str, failure: BaseException | None) -> None:
        """Exchange whether a rank has failed in a step. If so, all ranks raise
        CheckpointException."""
        answers = self._ranks.exchange(failure is not None)
        if any(has_failed for (has_failed,) in answers):
            self._ranks.raise_errors_of_all_ranks(step, failure)

    def _write(
        self, has_same_ranges: bool, files_ids: list[int]
    ) -> checkpoint.UncommittedCheckpoint | None:
        """Write the data files. With `has_same_ranges`, the coordinator also writes the metadata
        meanwhile, and returns the checkpoint to commit. Otherwise return None."""
        assert self._files is not None
        self._writer.start()  # the engine's threads now write the data files
        try:
            if has_same_ranges and self._ranks.is_coordinator:
                assert self._reused is not None and self._reused.metadata is not None
                old = self._reused.metadata
                return self._writer.describe(
                    old, _storage_data_with_new_ids(old, self._reused.files_ids, files_ids)
                )
            return None
        finally:
            # Also after an error, because the engine's threads read the tensors until then.
            self._files.wait()

    def _describe(self, results: Any) -> checkpoint.UncommittedCheckpoint:
        """Write the metadata, with the write results of all ranks. Return the checkpoint to
        commit."""
        metadata = self._metadata
        if metadata is None:
            assert self._reused is not None and self._reused.metadata is not None
            metadata = self._reused.metadata
        return self._writer.describe(
            metadata, {each.index: each.storage_data for rank in results for each in rank}
        )

    def _share_metadata(self, ready: checkpoint.UncommittedCheckpoint | None) -> Metadata:
        """Return the checkpoint's metadata on each rank. The coordinator sends the metadata if the
        plan is new. Only the coordinator's metadata has the files and offsets of items."""
        if self._reused is None:
            whole: Metadata = self._ranks.broadcast(self._metadata)
        else:
            assert self._reused.metadata is not None
            whole = self._reused.metadata
        return whole if ready is None else ready.metadata


def _is_plain_data(value: Any) -> bool:
    """Return whether a value consists only of plain containers, numbers and strings."""
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain_data, value.values()))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain_data, value))
    return type(value) in (bool, int, float, str, type(None))


def _storage_data_with_new_ids(
    metadata: Metadata, old_ids: list[int], new_ids: list[int]
) -> dict[MetadataIndex, _StorageInfo]:
    """Return each item's file, offset and length, with the ids in file names replaced."""
    new_text_of = {
        checkpoint.id_text(old): checkpoint.id_text(new)
        for old, new in zip(old_ids, new_ids, strict=True)
    }
    names: dict[str, str] = {}  # each file's new name, by its old name
    storage_data = {}
    for index, info in metadata.storage_data.items():
        name = names.get(info.relative_path)
        if name is None:
            name = checkpoint.with_new_id(info.relative_path, new_text_of)
            names[info.relative_path] = name
        storage_data[index] = _StorageInfo(name, info.offset, info.length)
    return storage_data


# ---- plans that are kept ----


@dataclasses.dataclass
class CachedPlan:
    """A plan that is kept, with facts of the last save that used the plan."""

    number: int  # of the save that made the plan
    plan: SavePlan  # this rank's part
    # Of the last save:
    ranges: ItemRanges  # of this rank's items
    metadata: Metadata | None  # complete on the coordinator only
    files_ids: list[int]  # the id in the names of each rank's files


class Plans:
    """The plans kept for one group, by structure."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, CachedPlan] = {}

    def of(self, structure: Hashable) -> CachedPlan | None:
        return self._kept.get(structure)

    def keep(self, structure: Hashable, kept: CachedPlan) -> None:
        """Keep the plan of a structure, and drop the plans that were used longest ago."""
        self._kept.pop(structure, None)
        while len(self._kept) >= _MAX_PLANS:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
        self._kept[structure] = kept  # at the end: the dict is in the order of use


def structure(flat: dict[str, Any], mappings: dict[str, Any]) -> Hashable:
    """Return a key of everything that a plan of PyTorch's planner depends on; None if a value's own
    code plans its items. `flat` is the state dict as the planner has flattened it, and `mappings`
    has the path of each key."""
    facts = []
    for value in flat.values():
        fact = _make_plan_key_part(value)
        if fact is None:
            return None
        facts.append(fact)
    return tuple(mappings.items()), tuple(facts)


def _make_plan_key_part(value: Any) -> Hashable:
    """Return the facts about one value for `structure`, or None like `structure`."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.shape, value.dtype, value.layout, value.requires_grad
    if isinstance(value, DTensor):
        local = value.to_local().shape
        layout = (value.device_mesh, value.placements)
        return value.shape, value.dtype, value.requires_grad, local, layout
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return None  # the planner asks the value's own code, whose answer may change
    return ()  # the plan does not depend on other values, only on their names
