"""`forked`: gives each forked writer of Megatron-LM or nvidia-resiliency-ext a snapshot to write.

Without it, the forked process writes from buffers that the next save uses again, so a slow writer
mixes both states. A snapshot is kept until its writer has ended or died.
"""

from __future__ import annotations

from typing import Any, TypeVar

from stillframe._save.engine import Engine
from stillframe._snapshot.snapshot import snapshot

Caller = TypeVar("Caller")


def forked(caller_class: type[Caller], *, engine: Engine | None = None) -> type[Caller]:
    """Return a subclass of `caller_class` that gives forked writers snapshots.

        StillframeCaller = stillframe.dcp.forked(TemporalAsyncCaller)

    Args:
        caller_class: `TemporalAsyncCaller` of Megatron-LM or of nvidia-resiliency-ext, or a class
            with the same interface. Its `schedule_async_call(request)` takes a named tuple with
            `async_fn`, `async_fn_args` and `preload_fn`. `async_fn_args[1]` has the tensors; if
            `preload_fn` is given, `preload_fn()` returns them. The caller's `process` is the forked
            process.
        engine: The engine whose pool is used, `stillframe.default_engine()` by default.

    Returns:
        The subclass to use instead. Its `schedule_async_call` raises what `stillframe.snapshot`
        raises.
    """

    class StillframeCaller(caller_class):  # type: ignore[valid-type, misc]
        def schedule_async_call(self, async_req: Any) -> None:
            if async_req.async_fn is None:
                super().schedule_async_call(async_req)
                return
            arguments = list(async_req.async_fn_args)
            if async_req.preload_fn:
                arguments[1] = async_req.preload_fn()
            with snapshot(arguments[1], shared=True, engine=engine) as taken:
                arguments[1] = taken.tree
                request = async_req._replace(preload_fn=None, async_fn_args=tuple(arguments))
                super().schedule_async_call(request)
                taken.hold_until(self.process)

    StillframeCaller.__name__ = f"Stillframe{caller_class.__name__}"
    return StillframeCaller
