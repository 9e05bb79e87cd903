"""One save of all ranks: a plan, everybody's files, one commit.

DCP's planners make the plan and describe it, with PyTorch's own by default; between them and the
files stands what DCP's `save` does, with two differences. A plan that all ranks still have is used
again without being made, compared or sent. And where all goes well, what the ranks have to tell
each other then is a few numbers (`Ranks.words`), three times:

    prepared ──numbers──▶ agreed ──▶ written ──numbers──▶ committed by the first ──numbers──▶ ended
                            │            ▲
                            └─ planned ──┘   plans, results and the metadata go round as objects

The state dict may still be being copied meanwhile: only what is to be written has to be there.
An error of any rank before the commit, or of the commit, is every rank's.

A plan depends on names, types and shapes on all ranks, and on nothing else. So a rank that finds
its state dict as it was has its part of the plan already, and where all ranks have theirs of one
and the same save, nobody plans, and none of it is sent.
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

_MOST = 8  # structures whose plans are kept

Places = list[list[tuple[int, int]]]  # of the items of each file: offset and length


class JointSave:
    """
    Args:
        plans: Those kept so far; this one's is added.
        number: Of this save, the same on all ranks.
        planner: The user's own, which is asked each time; None for PyTorch's.
        wait: Returns when the bytes of the state dict's tensors are there.
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
        self._own: DefaultSavePlanner | None = None
        if planner is None:
            planner = self._own = DefaultSavePlanner()
        self._planner: SavePlanner = planner
        self._wait = wait
        self._structure: Hashable = None
        self._kept: Kept | None = None
        self._files: RankFiles | None = None
        self._metadata: Metadata | None = None  # on the coordinator, as the plan has it

    def prepare(self, state_dict: StateDict) -> tuple[int, bool]:
        """What this rank can do by itself; nothing is written.

        Returns:
            Which save the plan is known of, 0 where it is not; and whether all will stand where it
            stood in the last save of that plan.
        """
        if self._own is None:
            self._wait()  # a user's planner may look at anything
        first = self._ranks.coordinates
        meta = self._writer.storage_meta()
        self._planner.set_up_planner(state_dict=state_dict, storage_meta=meta, is_coordinator=first)
        self._writer.set_up_storage_writer(first, rank=self._ranks.rank, use_collectives=True)
        if self._own is None:
            return 0, False
        with torch.no_grad():
            self._structure = structure(self._own.state_dict, self._own.mappings)
        kept = None if self._structure is None else self._plans.of(self._structure)
        if kept is None:
            return 0, False
        self._kept = kept
        self._files = self._writer.lay_out(kept.plan, self._resolve, self._wait)
        return kept.number, self._files.places == kept.places

    def save(self, is_planned: bool, is_same: bool, files_ids: list[int]) -> Metadata:
        """Once all ranks have agreed to.

        Args:
            is_planned: The plan is known on all ranks, and the same one's.
            is_same: What is prepared stands in its files as it did in the last save, on all ranks.
            files_ids: What the files of each rank have in their names.

        Raises:
            CheckpointException: It failed on some rank.
        """
        if not is_planned:
            self._kept = None
        plan = self._kept.plan if self._kept is not None else self._plan()
        new: checkpoint.New | None = None
        failure: BaseException | None = None
        try:
            if self._kept is not None:
                self._writer.prepare_local_plan(plan)
            else:
                plan = self._planner.finish_plan(plan)
                self._files = self._writer.lay_out(plan, self._resolve, self._wait)
            self._wait()
            new = self._write(is_same, files_ids)
        except BaseException as error:
            failure = error
        self._agree_on("write", failure)
        assert self._files is not None
        results = None if is_same else self._ranks.gathered(self._files.results())
        try:
            if self._ranks.coordinates:
                new = new or self._described(results)
                self._writer.commit(new)
        except BaseException as error:
            failure = error
        self._agree_on("write", failure)
        metadata = self._known_to_all(new)
        if self._structure is not None:
            number = self._number if self._kept is None else self._kept.number
            kept = Kept(number, plan, self._files.places, metadata, files_ids)
            self._plans.keep(self._structure, kept)
        if self._ranks.coordinates:
            self._writer.tidy()
        return metadata

    def _resolve(self, item: WriteItem) -> torch.Tensor | BytesIO:
        own = self._own
        if own is not None and item.type is WriteItemType.BYTE_IO:
            value = own.lookup_object(item.index)
            if not _is_without_tensors(value):
                self._wait()
        return self._planner.resolve_data(item)

    def _plan(self) -> SavePlan:
        """This rank's part of a plan that all make now.

        Raises:
            CheckpointException: Some rank cannot, or all together.
        """
        plan: SavePlan | None = None
        plans: list[SavePlan] | None = None
        failure: BaseException | None = None
        try:
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        except BaseException as error:
            failure = error
        self._agree_on("plan", failure)
        gathered = self._ranks.gathered(plan)
        try:
            if gathered is not None:
                plans, self._metadata = self._planner.create_global_plan(gathered)
                plans = self._writer.prepare_global_plan(plans)
        except BaseException as error:
            failure = error
        self._agree_on("plan", failure)
        scattered: SavePlan = self._ranks.scattered(plans)
        return scattered

    def _agree_on(self, step: str, failure: BaseException | None) -> None:
        if any(failed for (failed,) in self._ranks.words(failure is not None)):
            self._ranks.refuse(step, failure)

    def _write(self, is_same: bool, files_ids: list[int]) -> checkpoint.New | None:
        """Returns what is to be committed, on the coordinator and where that is known before."""
        assert self._files is not None
        self._writer.start()
        try:
            # In the time that the writing takes.
            if is_same and self._ranks.coordinates:
                assert self._kept is not None and self._kept.metadata is not None
                old = self._kept.metadata
                return self._writer.describe(old, _renamed(old, self._kept.files_ids, files_ids))
            return None
        finally:
            self._files.wait()  # whatever goes wrong: memory is read until then

    def _described(self, results: Any) -> checkpoint.New:
        metadata = self._metadata
        if metadata is None:
            assert self._kept is not None and self._kept.metadata is not None
            metadata = self._kept.metadata
        return self._writer.describe(
            metadata, {each.index: each.storage_data for rank in results for each in rank}
        )

    def _known_to_all(self, new: checkpoint.New | None) -> Metadata:
        """The checkpoint's; where the storage is, only the coordinator knows."""
        if self._kept is None:
            whole: Metadata = self._ranks.broadcast(self._metadata)
        else:
            assert self._kept.metadata is not None
            whole = self._kept.metadata
        return whole if new is None else new.metadata


def _is_without_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_without_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_without_tensors, value))
    return type(value) in (bool, int, float, str, type(None))


def _renamed(
    metadata: Metadata, old_ids: list[int], new_ids: list[int]
) -> dict[MetadataIndex, _StorageInfo]:
    """Where each item stands, in files that have other names."""
    renewed = {
        checkpoint.id_text(old): checkpoint.id_text(new)
        for old, new in zip(old_ids, new_ids, strict=True)
    }
    names: dict[str, str] = {}
    found = {}
    for index, info in metadata.storage_data.items():
        name = names.get(info.relative_path)
        if name is None:
            name = names[info.relative_path] = checkpoint.renamed(info.relative_path, renewed)
        found[index] = _StorageInfo(name, info.offset, info.length)
    return found


# ---- plans that are kept ----


@dataclasses.dataclass
class Kept:
    """
    Attributes:
        number: Of the save that was planned; 0 where it is not known to be.
        plan: This rank's part.
        places: Where its items stood in the files of the last save.
        metadata: On the coordinator, of the last save.
        files_ids: On the coordinator, what each rank's files had in their names then.
    """

    number: int
    plan: SavePlan
    places: Places
    metadata: Metadata | None
    files_ids: list[int]


class Plans:
    """Those of one group."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Kept] = {}

    def of(self, structure: Hashable) -> Kept | None:
        return self._kept.get(structure)

    def keep(self, structure: Hashable, kept: Kept) -> None:
        self._kept.pop(structure, None)
        while len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[structure] = kept  # the last one used is the last to go


def structure(flat: dict[str, Any], mappings: dict[str, Any]) -> Hashable:
    """What a plan of PyTorch's planner depends on.

    Args:
        flat, mappings: As the planner has flattened the state dict.

    Returns:
        None where it has something in it that plans by itself.
    """
    kinds = []
    for value in flat.values():
        kind = _kind(value)
        if kind is None:
            return None
        kinds.append(kind)
    return tuple(mappings.items()), tuple(kinds)


def _kind(value: Any) -> Hashable:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.shape, value.dtype, value.layout, value.requires_grad
    if isinstance(value, DTensor):
        local = value.to_local().shape
        place = (value.device_mesh, value.placements)
        return value.shape, value.dtype, value.requires_grad, local, place
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return None
    return ()
