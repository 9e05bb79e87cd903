"""What does a checkpoint cost on many ranks? An estimate from measurements on one machine.

    python benchmarks/dcp_scale.py --dir DIR [--items 400] [--state-per-rank 2GB] [--disk 20GB]

The coordinator is the rank that merges the plans of all ranks. The script measures its work for
each item of a plan: merging plans, making and pickling `.metadata`, and unpickling what ranks send.
It also measures a small file that is synced and renamed, and a directory's sync. From these it
computes the coordinator's time at 8 to 10,240 ranks: for a save that makes its plans, and for one
that uses the plans of the save before. For comparison it computes how long a shared file system
takes to store the bytes. The ranks' network and slow ranks are not included.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    BenchError,
    Series,
    format_seconds,
    format_size,
    parse_size,
    print_table,
    write_json,
)
from machine import add_directory_options, facts_lines, machine_facts, scratch_directory

RANKS = (8, 64, 1024, 10240)
MEASURED_RANKS = 32  # ranks whose plans are made for the measurements
ROUNDS = 5


def plans(nr_ranks: int, nr_items: int) -> list[Any]:
    """Return a save plan for each rank, with its shard of each of `nr_items` tensors."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    properties = TensorProperties(dtype=torch.float32)
    whole = torch.Size([nr_ranks * 4, 8])

    def item(rank: int, number: int) -> Any:
        offsets = torch.Size([rank * 4, 0])
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([4, 8]))
        index = MetadataIndex(f"model.layers.{number}.attention.weight", offsets)
        data = TensorWriteData(chunk=chunk, properties=properties, size=whole)
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)

    return [SavePlan([item(rank, i) for i in range(nr_items)]) for rank in range(nr_ranks)]


def median_seconds(function: Callable[[], object]) -> float:
    """Return the median of the seconds that ROUNDS calls of `function` take."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return Series.of(found).median


def measure_items(nr_items: int) -> dict[str, float]:
    """Return what one item of a plan costs the coordinator, in seconds and bytes."""
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    rank_plans = plans(MEASURED_RANKS, nr_items)
    count = MEASURED_RANKS * nr_items
    _, metadata = create_default_global_save_plan(rank_plans)
    results = [  # each item has 4 x 8 float32, 128 bytes
        WriteResult(item.index, 128, _StorageInfo(f"__{rank}_0.0a1b2c3d.distcp", i * 128, 128))
        for rank, plan in enumerate(rank_plans)
        for i, item in enumerate(plan.items)
    ]
    metadata.storage_data = {each.index: each.storage_data for each in results}
    sent_plans, sent_results = pickle.dumps(rank_plans), pickle.dumps(results)
    written = pickle.dumps(metadata)
    return {
        "merge_s": median_seconds(lambda: create_default_global_save_plan(rank_plans)) / count,
        "receive_plan_s": median_seconds(lambda: pickle.loads(sent_plans)) / count,
        "receive_result_s": median_seconds(lambda: pickle.loads(sent_results)) / count,
        "write_s": median_seconds(lambda: pickle.dumps(metadata)) / count,
        "read_s": median_seconds(lambda: pickle.loads(written)) / count,
        "plan_nbytes": len(sent_plans) / count,
        "result_nbytes": len(sent_results) / count,
        "metadata_nbytes": len(written) / count,
    }


def measure_files(directory: Path) -> dict[str, float]:
    """Return the seconds to write, sync and rename a small file, and to sync its directory."""

    def write_file() -> None:  # writes t, syncs it, and renames it to f
        fd = os.open(directory / "t", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, bytes(4096))
        os.fsync(fd)
        os.close(fd)
        os.rename(directory / "t", directory / "f")

    def sync_directory() -> None:
        fd = os.open(directory, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def write_file_and_sync_directory() -> None:
        write_file()
        sync_directory()

    alone = median_seconds(write_file)
    # A directory's sync is measured after a change in it; without one it has nothing to write.
    both = median_seconds(write_file_and_sync_directory)
    return {"file_s": alone, "directory_s": max(both - alone, 0.0)}


def estimate(
    nr_ranks: int, options: argparse.Namespace, cost: dict[str, float]
) -> dict[str, float]:
    """Return the coordinator's seconds, the bytes, and the disk's seconds of one checkpoint."""
    count = nr_ranks * options.items
    # A commit syncs the directory's parent, and the directory before and after the rename.
    commit = count * (cost["receive_result_s"] + cost["write_s"]) + 3 * cost["directory_s"]
    return {
        "first_s": count * (cost["receive_plan_s"] + cost["merge_s"]) + commit,
        "next_s": commit,
        "received_nbytes": count * (cost["plan_nbytes"] + cost["result_nbytes"]),
        "metadata_nbytes": count * cost["metadata_nbytes"],
        "read_metadata_s": count * cost["read_s"],
        "disk_s": nr_ranks * options.state_per_rank / options.disk,
    }


def show(options: argparse.Namespace, cost: dict[str, float]) -> None:
    """Print the estimates on stdout: a row for each figure, a column for each number of ranks."""
    found = {nr: estimate(nr, options, cost) for nr in RANKS}
    rows: list[list[str] | None] = []
    for key, title in (
        ("first_s", "coordinator: the first save, and each save of another set of tensors"),
        ("next_s", "coordinator: each further save, plans kept"),
        ("received_nbytes", "coordinator receives, plans and results"),
        ("metadata_nbytes", ".metadata"),
        ("read_metadata_s", "reading .metadata, on each rank of a load"),
        ("disk_s", f"writing the bytes, at {format_size(options.disk)}/s for all"),
    ):
        form = format_size if key.endswith("nbytes") else format_seconds
        rows.append([title, *(form(found[nr][key]) for nr in RANKS)])
    print_table(
        f"{options.items} items and {format_size(options.state_per_rank)} a rank",
        ["", *(f"{nr:,} ranks" for nr in RANKS)],
        rows,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0, or 2 if it cannot run: then stderr says why."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--items", type=int, default=400, help="tensors that each rank has a shard of"
    )
    parser.add_argument("--state-per-rank", type=parse_size, default=2 * 10**9)
    parser.add_argument(
        "--disk", type=parse_size, default=20 * 10**9, help="bytes a second, shared"
    )
    add_directory_options(parser)
    options = parser.parse_args(argv)
    try:
        with scratch_directory(
            options.dir, allow_tmpfs=options.allow_tmpfs, need_bytes=10**6
        ) as directory:
            facts = machine_facts(directory)
            cost = {**measure_items(options.items), **measure_files(directory)}
    except BenchError as error:
        print(f"dcp_scale.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(facts_lines(facts)))
    for name, value in cost.items():
        text = f"{value:.0f} bytes an item" if "nbytes" in name else f"{value * 1e6:.1f} us"
        print(f"  {name}: {text}")
    show(options, cost)
    if options.json:
        estimates = {str(nr): estimate(nr, options, cost) for nr in RANKS}
        write_json(options.json, {"facts": facts, "cost": cost, "estimates": estimates})
    return 0


if __name__ == "__main__":
    sys.exit(main())
