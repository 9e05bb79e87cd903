"""Has all ranks stop at the same boundary of their training loops, without a collective.

A *boundary* is a call of `should_stop` or `save`, or the end of an optimizer's step: a rank can
stop there. Each rank counts its boundaries. One thread on each rank talks to the others through the
store of the process group, so a training step costs nothing:

    a rank that gets a signal  posts "asked"
    every rank                 makes its loop wait at its next boundary, and posts its counts
    rank 0                     posts the decision: the first boundary that no rank has passed
    every rank                 lets its loop go on to that boundary, and stops there

The thread posts a rank's counts. The training loop could not, because it may be inside a collective
with a rank that already waits at its boundary.

If rank 0 is silent, another rank decides. Only the first decision in the store counts
(`compare_set`), so no two ranks stop at different boundaries. A rank that does not answer in time
is left out. If such a rank has already passed the decided boundary when it answers, it ends and
saves nothing.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from stillframe._base import distributed, threads
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

NEVER = 1 << 62  # a number that no count reaches
_INTERVAL_S = 0.2  # the time between a rank's queries to the store; longer if there are many ranks
_MOST_QUERIES = 5000  # the most queries to the store in one second, by all ranks together
_MOST_WAIT_S = 5.0  # the longest wait for the answers of all ranks


class Counts(NamedTuple):
    """How many boundaries of each kind a rank has passed or reached.

    `next_boundary` returns a *limit* in the same form: the counts at which a rank stops.

    Attributes:
        stops: Calls of `should_stop`.
        steps: Ends of an optimizer's step.
        saves: Calls of `save`.
        registered: `steps` at the last call of `save`; -1 before the first call, and in a limit.
    """

    stops: int
    steps: int
    saves: int
    registered: int

    def reaches(self, limit: Counts) -> bool:
        """Return whether a rank with these counts has reached a limit."""
        return self.stops >= limit.stops or self.steps >= limit.steps or self.saves >= limit.saves


def next_boundary(counts: list[Counts]) -> Counts:
    """Return the first boundary that no rank has passed, from the counts of all ranks. A rank stops
    when any of its counts reaches the count of the same name in the result.

    The boundaries are the loop's calls of `should_stop`, if there were any. Otherwise they are its
    calls of `save`. If it has called `save` only once, to register what to save, the end of an
    optimizer's step is a boundary too. The first step after that call is an exception, because a
    second call of `save` could follow it.
    """
    stops = max(each.stops for each in counts)
    steps = max(each.steps for each in counts)
    saves = max(each.saves for each in counts)
    registered = max(each.registered for each in counts)
    by_steps = stops == 0 and saves < 2 and registered >= 0
    return Counts(
        stops + 1,
        max(steps + 1, registered + 2) if by_steps else NEVER,  # not the step after registering
        max(saves + 1, 2) if stops == 0 else NEVER,  # the first call of `save` only registers
        -1,
    )


class Agreement:
    """The ranks of one `preemption` block.

    Args:
        store: The store of the process group.
        rank, size: This rank, and how many there are.
        deadline_s: How long a preemption may take.
        on_stop: Called as `on_stop(signum, moment)` on the thread of this object, when this rank or
            another is asked to stop. It must make the training loop wait at its next boundary.
        counts: Returns this rank's counts.

    Attributes:
        limit: The boundary to stop at; None until the ranks have agreed.
        failed: Why this rank has no part in the agreement; None if it has.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        deadline_s: float,
        on_stop: Callable[[int, float], object],
        counts: Callable[[], Counts],
    ) -> None:
        # The store may have keys of earlier blocks. Each rank enters equally many blocks, so the
        # number of this block is the same on all ranks.
        number = store.add(f"stillframe/preemption/entered/{rank}", 1)
        self._prefix = f"stillframe/preemption/{number}"
        # A connection of its own, because a call that waits may block that of the process group.
        self._store = store.clone()
        self._rank, self._size = rank, size
        self._wait_s = min(_MOST_WAIT_S, deadline_s / 4)  # leaves most of the time to the saves
        self._on_stop, self._counts = on_stop, counts
        # Elements: (signal, moment), or None to end the thread. A signal handler may interrupt
        # `put` and call it too, which only this class of queues allows.
        self._asked: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._silent: set[int] = set()  # ranks that did not answer in time
        self.limit: Counts | None = None
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="sf-preempt-ranks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        threads.start(self._thread)

    def ask(self, signum: int, moment: float) -> None:
        """Ask all ranks to stop. `moment` is when signal `signum` came, by `time.monotonic()`."""
        self._asked.put((signum, moment))

    def leave(self, until: float | None) -> None:
        """End this rank's part. Wait for the other ranks until the moment `until`, or leave at once
        if it is None.

        The end of one rank may end the others, because torchrun then ends all of them, and because
        the store is in one of the processes.
        """
        self._asked.put(None)
        try:
            if until is None:
                # This rank reaches no more boundaries. Others may still wait for its counts.
                over = Counts(NEVER, NEVER, NEVER, -1)
                self._store.set(f"{self._prefix}/counts/{self._rank}", json.dumps(over))
                self._store.set(f"{self._prefix}/done/{self._rank}", "1")
            else:
                self._agree("done", "1", lambda _: "1", until - time.monotonic())
        except Exception as error:
            log.debug("stillframe: the ranks' store is gone: %s", error)

    # ---- the thread ----

    def _run(self) -> None:
        """Wait until a rank is asked to stop, agree with the others, and set `limit` or `failed`.
        Runs on the thread."""
        try:
            asked = self._wait_until_asked()
            if asked is None:
                return
            self._on_stop(*asked)
            mine = self._counts()
            answer = self._agree("counts", json.dumps(mine), _decide, self._wait_s)
            limit = Counts(*json.loads(answer))
            if mine.reaches(limit):
                self.failed = "this rank answered late, and has passed the boundary of the others"
            self.limit = limit
        except Exception as error:
            self.failed = f"the store of the process group failed: {error}"

    def _wait_until_asked(self) -> tuple[int, float] | None:
        """Wait until this or another rank is asked to stop. Return the signal and the moment, or
        None if this rank leaves the block.

        The clocks of two machines cannot be compared. So a rank posts how long ago the signal came.
        """
        asked_key = f"{self._prefix}/asked"
        interval_s = max(_INTERVAL_S, self._size / _MOST_QUERIES)
        while True:
            try:
                asked = self._asked.get(timeout=interval_s)
            except queue.Empty:
                if not self._store.check([asked_key]):
                    continue
                signum, since_s = json.loads(self._store.get(asked_key))
                return signum, time.monotonic() - since_s
            if asked is not None:
                signum, moment = asked
                self._store.set(asked_key, json.dumps((signum, time.monotonic() - moment)))
            return asked

    def _agree(
        self,
        name: str,
        mine: str,
        decide: Callable[[Mapping[int, str]], str],
        wait_s: float,
    ) -> str:
        """Post this rank's value `mine`, and return the decision that `decide` makes from the
        values of all ranks. In the store, the decision has the key `name`.

        Rank 0 decides when all ranks have answered or `wait_s` seconds have passed. If rank 0 has
        not decided after twice that time, another rank does. A rank that has failed to answer once
        is not waited for again.
        """
        name = f"{self._prefix}/{name}"
        self._store.set(f"{name}/{self._rank}", mine)
        keys = {rank: f"{name}/{rank}" for rank in range(self._size)}
        if self._rank != 0 and 0 not in self._silent and self._wait([name], 2 * wait_s):
            return str(self._store.get(name).decode())
        self._wait([key for rank, key in keys.items() if rank not in self._silent], wait_s)
        answers = {
            rank: self._store.get(key).decode()
            for rank, key in keys.items()
            if self._store.check([key])
        }
        if silent := keys.keys() - answers.keys() - self._silent:
            self._silent |= silent
            log.warning(
                "stillframe: no answer from rank %s: the others stop without it",
                ", ".join(map(str, sorted(silent))),
            )
        return str(self._store.compare_set(name, "", decide(answers)).decode())

    def _wait(self, keys: list[str], wait_s: float) -> bool:
        """Wait until the store has all keys; return False after `wait_s`."""
        return distributed.poll(lambda: self._store.check(keys), wait_s)


def _decide(answers: Mapping[int, str]) -> str:
    """Return the boundary to stop at, as JSON, from the counts that ranks have posted."""
    return json.dumps(next_boundary([Counts(*json.loads(each)) for each in answers.values()]))


def join(
    deadline_s: float, on_stop: Callable[[int, float], object], counts: Callable[[], Counts]
) -> Agreement | None:
    """Make an agreement with the other ranks of the default process group, and start its thread.
    Return None if there are no other ranks.

    Raises:
        StillframeError: The group has no store.
    """
    if not distributed.is_initialized() or dist.get_world_size() == 1:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except Exception as error:
        raise StillframeError(f"the ranks cannot agree where to stop: no store ({error})") from None
    made = Agreement(
        store,
        dist.get_rank(),
        dist.get_world_size(),
        deadline_s=deadline_s,
        on_stop=on_stop,
        counts=counts,
    )
    made.start()
    return made
