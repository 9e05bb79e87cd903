"""Pinned memory that spawned processes map and forked ones inherit.

Neither is promised on a GPU until these tests have run there. A driver may refuse pages of a file,
and after a fork the parent and the device may have different pages.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import stillframe
import torch
from fix_gpu import Training, same

MIB = 1 << 20


def state(training: Training) -> dict[str, Any]:
    """Return a state with device and host tensors, which share blocks."""
    return {**training.state(), "host": torch.full((3 * MIB,), float(training.input[0, 0]))}


def total(node: Any) -> int:
    """Sum all bytes without torch's threads, which a forked child does not have."""
    if isinstance(node, torch.Tensor):
        return sum(node.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()[::97])
    return sum(map(total, node.values())) if isinstance(node, dict) else 0


def answer(link: Connection) -> None:
    while (tree := link.recv()) is not None:
        link.send(total(tree))


def test_a_spawned_process_reads_pinned_memory_that_a_device_wrote():
    training = Training()
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs,), daemon=True)
    process.start()
    with stillframe.Engine(pool_bytes=512 * MIB, block_bytes=4 * MIB, shared_memory=True) as engine:
        engine.warm_up(256 * MIB)
        for _ in range(4):
            wanted = {**training.now(), "host": state(training)["host"]}
            snap = stillframe.snapshot(state(training), shared="spawn", engine=engine)
            training.step()
            same(snap.tree, wanted)
            weight = next(iter(snap.tree["model"].values()))
            assert weight.is_pinned()
            del weight
            link.send(snap.tree)
            snap.release()
            training.step()
            assert link.poll(60) and link.recv() == total(wanted)
        engine.trim()
        link.send(None)
        process.join()


@pytest.mark.parametrize("rounds", [3])
def test_pinned_blocks_can_be_used_again_after_a_fork_that_shared_them(rounds):
    training = Training()
    context = multiprocessing.get_context("fork")
    with stillframe.Engine(pool_bytes=256 * MIB, block_bytes=4 * MIB) as engine:
        engine.warm_up(256 * MIB)
        for _ in range(rounds):
            wanted = {**training.now(), "host": state(training)["host"]}
            link, theirs = context.Pipe()
            with stillframe.snapshot(state(training), shared=True, engine=engine) as snap:
                tree = snap.tree

                def child(tree: Any = tree, theirs: Connection = theirs) -> None:
                    theirs.send(total(tree))

                process = context.Process(target=child)
                process.start()
                training.step()
                same(tree, wanted)
                snap.hold_until(process)
                del tree, child
            assert link.poll(60) and link.recv() == total(wanted)
            process.join()
            # The same blocks again, written by the host and by the device.
            wanted = {**training.now(), "host": state(training)["host"]}
            with stillframe.snapshot(state(training), engine=engine) as snap:
                training.step()
                same(snap.tree, wanted)
