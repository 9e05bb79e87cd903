"""`forked` with callers of forked writers like those of Megatron-LM and nvidia-resiliency-ext."""

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import stillframe
import torch
from fix_waits import eventually, leased
from stillframe.dcp import forked


class Request(NamedTuple):
    """The fields of their AsyncRequest that matter here."""

    async_fn: Callable[..., None] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[..., None]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None


class TemporalAsyncCaller:
    """Replaces the second argument by the preloaded one and forks a process, as the original
    does."""

    def __init__(self) -> None:
        self.process: Any = None

    def schedule_async_call(self, async_req: Request) -> None:
        if async_req.async_fn is None:
            return
        arguments = list(async_req.async_fn_args)
        if async_req.preload_fn:
            arguments[1] = async_req.preload_fn()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=async_req.async_fn, args=arguments)
        self.process.start()


def write(go: Any, buckets: list[torch.Tensor], wanted: float, orphan: bool) -> None:
    """Exit with status 0 if every element is `wanted`, its value when the save was requested.

    orphan: Fork a process that outlives this one for a moment and keeps the memory mapped.
    """
    go.wait(60)
    if orphan and os.fork() == 0:
        time.sleep(0.05)
        os._exit(0)
    # Compares single elements, because torch's threads do not exist in a forked child.
    seen = {float(bucket[index]) for bucket in buckets for index in (0, 100_000, -1)}
    os._exit(0 if seen == {wanted} else 1)


class Reused:
    """A preload function like the original's: it copies the state into buffers that it reuses."""

    def __init__(self, state: list[torch.Tensor]) -> None:
        self.state = state
        self.buffers = [torch.empty_like(tensor) for tensor in state]

    def __call__(self) -> list[torch.Tensor]:
        for buffer, tensor in zip(self.buffers, self.state, strict=True):
            buffer.share_memory_().copy_(tensor)  # a child sees it too, as with pinned memory
        return self.buffers


def run(make: type[TemporalAsyncCaller], count: int) -> list[int]:
    """Start all writers before any of them reads; return their exit codes."""
    state = [torch.zeros(200_000) for _ in range(2)]
    preload, go = Reused(state), multiprocessing.get_context("fork").Event()
    callers = []
    for number in range(count):
        for tensor in state:
            tensor.fill_(number)
        caller = make()
        arguments = (go, None, float(number), number % 2 == 0)
        caller.schedule_async_call(Request(write, arguments, [], preload_fn=preload))
        callers.append(caller)
    go.set()
    for caller in callers:
        caller.process.join(60)
    return [caller.process.exitcode for caller in callers]


def test_slow_forked_writer_writes_the_state_it_was_given(engine):
    # Without `forked` the first two children read bytes of a later request and fail.
    assert run(TemporalAsyncCaller, 3) == [1, 1, 0]
    assert run(forked(TemporalAsyncCaller, engine=engine), 3) == [0, 0, 0]
    assert eventually(lambda: leased(engine) == 0)


def test_memory_of_a_killed_writer_is_returned(engine):
    caller = forked(TemporalAsyncCaller, engine=engine)()
    go = multiprocessing.get_context("fork").Event()
    state = [torch.ones(200_000)]
    caller.schedule_async_call(Request(write, (go, state, 1.0, False), []))
    del state
    assert leased(engine) > 0
    caller.process.kill()
    caller.process.join()
    assert eventually(lambda: leased(engine) == 0)


def test_a_request_without_a_function_starts_nothing(engine):
    caller = forked(TemporalAsyncCaller, engine=engine)()
    caller.schedule_async_call(Request(None, (), []))
    assert caller.process is None and type(caller).__name__ == "StillframeTemporalAsyncCaller"


def _check_tensor(tensor: torch.Tensor) -> None:
    os._exit(int(tensor[0]))


def test_hold_until_accepts_a_spawned_process(engine):
    taken = stillframe.snapshot({"w": torch.full((1000,), 7.0)}, engine=engine)
    process = multiprocessing.get_context("spawn").Process(
        target=_check_tensor, args=(taken.tree["w"],)
    )
    process.start()
    taken.hold_until(process)
    taken.release()
    process.join()
    assert process.exitcode == 7
    assert eventually(lambda: leased(engine) == 0)


def test_hold_until_is_refused_after_the_memory_was_returned(engine):
    from concurrent.futures import Future

    taken = stillframe.snapshot({"w": torch.ones(1000)}, engine=engine)
    taken.release()
    with pytest.raises(stillframe.StillframeError, match="gone back"):
        taken.hold_until(Future())
