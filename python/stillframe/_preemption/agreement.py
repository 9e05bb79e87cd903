"""Has all ranks stop at the same boundary of their training loops, without a collective.

A *boundary* is a point at which a rank can stop: a call of `should_stop` or `save`, or the end of
an optimizer's step. Each rank counts its boundaries. One thread on each rank talks to the others
through the store of the process group, so a training step costs nothing:

    a rank that gets a signal  posts "asked"
    every rank                 makes its loop wait at its next boundary, and posts its counts
    rank 0                     posts the decision: the first boundary that no rank has passed
    every rank                 lets its loop go on to that boundary, and stops there

The training loop cannot post the counts: it may be inside a collective with a waiting rank.

If rank 0 is silent, another rank decides. The store keeps only the first decision, so all ranks
stop at the same boundary. A rank that does not answer in time is left out. If it answers after it
has passed the boundary, it ends and saves nothing.
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
_INTERVAL_S = 0.2  # the time between a rank's queries to the store, with few ranks
_MAX_QUERIES_PER_S = 5000  # to the store, by all ranks together
_MAX_WAIT_S = 5.0  # the longest wait for the answers of all ranks


class Counts(NamedTuple):
    """How many boundaries of each kind a rank has reached. A *limit* has the same fields: the
    counts at which a rank stops."""

    stops: int  # calls of `should_stop`
    steps: int  # ends of an optimizer's step
    saves: int  # calls of `save`
    steps_at_last_save: int  # -1 before the first call of `save`, and in a limit

    def reaches(self, limit: Counts) -> bool:
        """Return whether a rank with these counts has reached the boundary `limit`."""
        return self.stops >= limit.stops or self.steps >= limit.steps or self.saves >= limit.saves


def next_boundary(counts: list[Counts]) -> Counts:
    """Return the first boundary that no rank has passed, as a limit.

    The boundaries depend on what the loop has called so far:
    - `should_stop`: its calls
    - only `save`, more than once: its calls
    - only `save`, once: its calls, and the ends of optimizer steps. The first step after that call
      does not count, because a second call of `save` could follow.
    """
    stops = max(each.stops for each in counts)
    steps = max(each.steps for each in counts)
    saves = max(each.saves for each in counts)
    steps_at_last_save = max(each.steps_at_last_save for each in counts)
    next_step = next_save = NEVER
    loop_calls_should_stop = stops > 0
    if not loop_calls_should_stop:
        next_save = max(saves + 1, 2)  # not 1: the first call of `save` only registers
        loop_called_save_once = saves < 2 and steps_at_last_save >= 0
        if loop_called_save_once:
            # + 2: the first step after the call of `save` does not count.
            next_step = max(steps + 1, steps_at_last_save + 2)
    return Counts(stops + 1, next_step, next_save, -1)


class Agreement:
    """The ranks of one `preemption` block.

    Args:
        store: The store of the process group.
        deadline_s: How long a preemption may take.
        on_stop: Called as `on_stop(signum, moment)` on another thread when any rank is asked to
            stop. It must make the training loop wait at its next boundary.
        counts: Returns this rank's counts.
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
        # The store keeps the keys of earlier blocks. All ranks get the same number for this block.
        number = store.add(f"stillframe/preemption/entered/{rank}", 1)
        self._prefix = f"stillframe/preemption/{number}"
        self._store = store.clone()  # a call that waits blocks its connection
        self._rank, self._size = rank, size
        self._wait_s = min(_MAX_WAIT_S, deadline_s / 4)  # leaves most of the time to the saves
        self._on_stop, self._counts = on_stop, counts
        # Elements: (signal, moment), or None to end the thread. Only a SimpleQueue allows that a
        # signal handler interrupts `put` and calls `put`.
        self._requests: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._silent: set[int] = set()  # ranks that did not answer in time
        self.limit: Counts | None = None  # the boundary to stop at, once the ranks have agreed
        self.why_left_out: str | None = None  # set if this rank is left out
        self._thread = threading.Thread(target=self._run, name="sf-preempt-ranks", daemon=True)

    def start(self) -> None:
        threads.start(self._thread)

    def ask(self, signum: int, moment: float) -> None:
        """Ask all ranks to stop. `moment` is the `time.monotonic()` at which the signal came."""
        self._requests.put((signum, moment))

    def leave(self, until: float | None) -> None:
        """Wait until the moment `until` for the other ranks to leave; None: do not wait.

        The end of one rank may end the others: torchrun ends all, and one rank has the store.
        """
        self._requests.put(None)
        try:
            if until is None:
                # Other ranks may wait for this rank's counts. These say that it has left.
                left = Counts(NEVER, NEVER, NEVER, -1)
                self._store.set(f"{self._prefix}/counts/{self._rank}", json.dumps(left))
                self._store.set(f"{self._prefix}/done/{self._rank}", "1")
            else:
                # The ranks only wait for each other: there is nothing to decide.
                self._agree_on_decision("done", "1", lambda _: "1", until - time.monotonic())
        except Exception as error:
            log.debug("stillframe: the ranks' store is gone: %s", error)

    # ---- the thread ----

    def _run(self) -> None:
        """Wait until a rank is asked to stop, and agree with the others. Set `limit` or
        `why_left_out`."""
        try:
            asked = self._wait_for_stop_request()
            if asked is None:
                return
            self._on_stop(*asked)
            mine = self._counts()
            answer = self._agree_on_decision(
                "counts", json.dumps(mine), _decide_boundary, self._wait_s
            )
            limit = Counts(*json.loads(answer))
            if mine.reaches(limit):
                why = "this rank answered late, and has passed the boundary of the others"
                self.why_left_out = why
            self.limit = limit
        except Exception as error:
            self.why_left_out = f"the store of the process group failed: {error}"

    def _wait_for_stop_request(self) -> tuple[int, float] | None:
        """Wait until any rank is asked to stop. Return the signal and the moment, or None if this
        rank leaves the block."""
        asked_key = f"{self._prefix}/asked"
        interval_s = max(_INTERVAL_S, self._size / _MAX_QUERIES_PER_S)
        while True:
            try:
                asked = self._requests.get(timeout=interval_s)
            except queue.Empty:
                if not self._store.check([asked_key]):
                    continue
                signum, since_s = json.loads(self._store.get(asked_key))
                return signum, time.monotonic() - since_s
            if asked is not None:
                signum, moment = asked
                # Clocks of two machines differ, so post how long ago the signal came.
                self._store.set(asked_key, json.dumps((signum, time.monotonic() - moment)))
            return asked

    def _agree_on_decision(
        self,
        name: str,
        mine: str,
        decide: Callable[[Mapping[int, str]], str],
        wait_s: float,
    ) -> str:
        """Post this rank's value `mine`. Return the decision that one rank makes with `decide` from
        the values of all ranks, and posts under the key `name`.

        Rank 0 decides when all ranks have answered or `wait_s` seconds have passed. If it has not
        decided after twice that time, another rank does. Silent ranks are not waited for again.
        """
        decision_key = f"{self._prefix}/{name}"
        keys = {rank: f"{decision_key}/{rank}" for rank in range(self._size)}
        self._store.set(keys[self._rank], mine)
        expects_rank_0 = self._rank != 0 and 0 not in self._silent
        if expects_rank_0 and self._wait([decision_key], 2 * wait_s):
            return str(self._store.get(decision_key).decode())
        self._wait([key for rank, key in keys.items() if rank not in self._silent], wait_s)
        answers = {
            rank: self._store.get(key).decode()
            for rank, key in keys.items()
            if self._store.check([key])
        }
        silent = keys.keys() - answers.keys() - self._silent
        if silent:
            self._silent |= silent
            log.warning(
                "stillframe: no answer from rank %s: the others stop without it",
                ", ".join(map(str, sorted(silent))),
            )
        # An earlier decision of another rank stays, and is returned.
        return str(self._store.compare_set(decision_key, "", decide(answers)).decode())

    def _wait(self, keys: list[str], wait_s: float) -> bool:
        """Wait until the store has all keys. Return False after `wait_s`."""
        return distributed.poll(lambda: self._store.check(keys), wait_s)


def _decide_boundary(answers: Mapping[int, str]) -> str:
    """Return the boundary to stop at, from the counts of the ranks; both are JSON."""
    counts = [Counts(*json.loads(each)) for each in answers.values()]
    return json.dumps(next_boundary(counts))


def join(
    deadline_s: float, on_stop: Callable[[int, float], object], counts: Callable[[], Counts]
) -> Agreement | None:
    """Start an agreement with the other ranks of the default process group. Return None without
    other ranks. Raise StillframeError if the group has no store."""
    if not distributed.is_initialized() or dist.get_world_size() == 1:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except Exception as error:
        raise StillframeError(f"the ranks cannot agree where to stop: no store ({error})") from None
    started = Agreement(
        store,
        dist.get_rank(),
        dist.get_world_size(),
        deadline_s=deadline_s,
        on_stop=on_stop,
        counts=counts,
    )
    started.start()
    return started
