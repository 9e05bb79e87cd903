"""Prints how often each call releases the interpreter lock, as {call: releases}. test_handovers.py
runs it with the number of tensors and a directory."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import stillframe
import torch
from fix_handovers import Counter
from stillframe import _core
from stillframe._lightning.offload import OffloadHooks
from stillframe._watch import gate, step_hooks

MANY_RANKS = "save of many ranks, on its thread"
LOAD, TORCHS_LOAD = "load", "torch's load"
LENGTH = 2048  # elements of a parameter; storages up to 4 KiB are copied in the call


def make_training(tensors: int) -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
    """Return a model and its AdamW, which together have so many tensors."""
    model = torch.nn.ParameterList([torch.randn(LENGTH) for _ in range(max(tensors // 4, 1))])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(24):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model:
        parameter.grad = parameter.detach().clone()
    optimizer.step()


class Completion:
    """Detects when the completion thread waits again.

    A thread that sees this has the interpreter lock, so the completion thread has released it.
    """

    def __init__(self) -> None:
        self._wait = _core.notice_wait
        self._ended = 0  # the number of the last save whose last notice was taken
        self._waits = False
        _core.notice_wait = self._noted

    def _noted(self) -> tuple[int, int, str]:
        self._waits = True
        what, number, sentence = self._wait()
        self._waits = False
        if what == _core.NOTICE_ENDED:
            self._ended = number
        return what, number, sentence

    def id_behind(self, handle: stillframe.SaveHandle) -> int:
        """Return the completion thread's id once it has handled everything of this save."""
        (thread,) = [each for each in threading.enumerate() if each.name == "sf-completion"]
        while self._ended != handle._ticket.number or not self._waits:
            time.sleep(0.001)
        return int(thread.native_id or 0)


def main(tensors: int, directory: Path) -> dict[str, int]:
    counter, completion, counts = Counter(), Completion(), {}
    model, optimizer = make_training(tensors)
    optimizer.step()  # later steps see no gradient, so versions do not change

    def tree() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def save(name: str, state: Any, **options: Any) -> stillframe.SaveHandle:
        path = directory / f"{name.replace(' ', '-')}.pt"
        counts[name], handle = counter.count(lambda: stillframe.async_save(state, path, **options))
        return handle

    state = tree()
    handle = save("first save", state)
    handle.result()
    before = counter.of(completion.id_behind(handle))
    handle = save("save", state)
    counts["gate"], _ = counter.count(gate.wait)
    report = handle.result()
    assert report is not None
    assert report.deferred_nbytes > 2 * LENGTH * len(model), "nothing was deferred"
    after = counter.of(completion.id_behind(handle))
    counts["completion of a save"] = after - before
    before = after
    handle = save("save of what nobody else holds", tree())
    del state
    handle.result()
    after = counter.of(completion.id_behind(handle))
    counts["completion of what nobody else holds"] = after - before
    save("save in the call", tree(), overlap=False).result()
    save("save of the parameters", list(model)).result()
    views = [each[:2] for each in model] + [each.detach().view(2, -1) for each in model]
    save("save of views and ties", [views, list(model), views]).result()
    save("save of safetensors", model.state_dict(), format="safetensors").result()

    handle = stillframe.async_save(tree(), directory / "handle.pt")
    counts["wait_staged"], _ = counter.count(handle.wait_staged)
    counts["result"], _ = counter.count(handle.result)
    for name in ("done", "exception", "progress", "cancel"):
        counts[name], _ = counter.count(getattr(handle, name))
    counts["state"], _ = counter.count(lambda: handle.state)

    hooks = ((optimizer,), {})
    counts["before a step"], _ = counter.count(lambda: step_hooks._before_step(optimizer, *hooks))
    counts["after a step"], _ = counter.count(lambda: step_hooks._after_step(optimizer, *hooks))
    optimizer.load_state_dict(optimizer.state_dict())
    counts["enrolment"], _ = counter.count(lambda: step_hooks._after_step(optimizer, *hooks))

    state = tree()
    counts["snapshot"], taken = counter.count(lambda: stillframe.snapshot(state))
    del taken
    counts["snapshot with overlap"], taken = counter.count(
        lambda: stillframe.snapshot(state, overlap=True)
    )
    counts["its wait"], _ = counter.count(taken.wait)
    del taken
    parameters = list(model)
    counts["snapshot of parameters"], taken = counter.count(lambda: stillframe.snapshot(parameters))
    del taken
    trainer = SimpleNamespace(global_rank=0, strategy=None)
    checkpoint = {"state_dict": state["model"], "optimizer_states": [state["optimizer"]]}
    hook = OffloadHooks().on_save_checkpoint
    counts["callback"], _ = counter.count(lambda: hook(trainer, None, checkpoint))
    path = directory / "handle.pt"
    counts[LOAD], loaded = counter.count(lambda: stillframe.load(path))
    del loaded
    counts[TORCHS_LOAD], loaded = counter.count(lambda: torch.load(path))
    del loaded
    counts[MANY_RANKS] = of_many_ranks(counter, tensors, directory / "ranks")
    return counts


def of_many_ranks(counter: Counter, tensors: int, directory: Path) -> int:
    """Count the releases of the thread of stillframe.dcp during a save with a known plan."""
    from stillframe import dcp
    from stillframe._dcp.rounds import Rounds
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    parts = [DTensor.from_local(torch.randn(8), mesh, [Shard(0)]) for _ in range(tensors)]
    state = {"model": {f"w{number}": part for number, part in enumerate(parts)}}
    run, ended, before = Rounds._run, [], 0

    def noted(self: Rounds, work: Any) -> None:
        run(self, work)
        ended.append(work.number)

    Rounds._run = noted
    for number in range(1, 4):
        before = of_thread(counter, "sf-dcp")
        dcp.save(state, directory)
        while len(ended) < number:
            time.sleep(0.001)  # then it waits again, see Completion
    found = of_thread(counter, "sf-dcp") - before
    distributed.destroy_process_group()
    return found


def of_thread(counter: Counter, name: str) -> int:
    """Return the releases of a thread; 0 if it was not started."""
    threads = [each for each in threading.enumerate() if each.name == name]
    return sum(counter.of(int(each.native_id or 0)) for each in threads)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]))))
