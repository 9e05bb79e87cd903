"""Random saves, loads, removes, waits and cancels, compared with a model of each path's contents.

The machine draws the engine (pool, blocks, writers, slots), slow calls, trees, and the order of
calls; hypothesis reduces a failure to the few calls that matter. The model also knows how each save
has ended. The promises and the order of submission then give the contents of every path, at every
load and at the end.

``STILLFRAME_CAMPAIGN_SECONDS`` continues with new examples for that time (``make campaign``).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import fix_graphs
import pytest
import stillframe
import torch
from fix_graphs import assert_same
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from stillframe.testing import fault, slow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its prototypes

CAMPAIGN_S = float(os.environ.get("STILLFRAME_CAMPAIGN_SECONDS", "0"))
NAMES = st.sampled_from(["a.pt", "b.pt", "c.pt"])
BLOCK = 16 << 10
SLOW_CALLS = ("pwrite", "fdatasync", "rename", "lane_copy", "capture_copy", "open")
FAULTS = {"pwrite": errno.ENOSPC, "fdatasync": errno.EIO, "rename": errno.EACCES}


@st.composite
def states(draw: st.DrawFn) -> Any:
    """Draw a tree with tensors of no bytes up to several times the pool."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 1000, BLOCK, BLOCK + 1, 9 * BLOCK]), max_size=4))
    value = draw(st.integers(0, 255))
    tensors = [torch.full((n,), value, dtype=torch.uint8) for n in sizes]
    return {"tensors": tensors, "tree": draw(fix_graphs.trees(fix_graphs.SAFE_LEAVES))}


def as_from_torch_save(obj: Any) -> Any:
    """Return the object that torch.load returns for a file of torch.save."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class Training:
    """A model whose state is deferred, because it has made four steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(96, 96)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for _ in range(4):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 96)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class SavesLoadsAndRemoves(RuleBasedStateMachine):
    """`log` lists the submissions: (name, handle, wanted) for a save, (name,) for a remove."""

    def __init__(self) -> None:
        super().__init__()
        self.open = contextlib.ExitStack()
        self.directory = Path(self.open.enter_context(tempfile.TemporaryDirectory()))
        self.log: list[tuple[Any, ...]] = []
        self.engine: stillframe.Engine | None = None

    @initialize(
        nr_blocks=st.integers(1, 4),
        writers=st.integers(1, 3),
        in_flight=st.integers(1, 4),
        busy=st.sampled_from(["wait", "wait", "skip", "raise"]),
        delays=st.dictionaries(st.sampled_from(SLOW_CALLS), st.sampled_from([0.0005, 0.003])),
    )
    def begin(
        self, nr_blocks: int, writers: int, in_flight: int, busy: str, delays: dict[str, float]
    ) -> None:
        for call, seconds in delays.items():
            self.open.enter_context(slow(call, seconds))
        self.options = {
            "pool_bytes": nr_blocks * BLOCK,
            "block_bytes": BLOCK,
            "writer_threads": writers,
            "max_in_flight": in_flight,
            "when_busy": busy,
        }
        self.engine = stillframe.Engine(**self.options)
        self.training = Training()
        # so the last save of the log succeeded
        stillframe.save(0, self.directory / "first", durable=False)

    # ---- calls ----

    def submit(self, name: str, obj: Any, **options: Any) -> Any:
        wanted = as_from_torch_save(obj)
        try:
            handle = stillframe.async_save(
                obj, self.directory / name, engine=self.engine, **options
            )
        except stillframe.BusyError:
            assert self.options["when_busy"] == "raise"
            return None
        if handle.state == "skipped":
            assert self.options["when_busy"] == "skip" and handle.result() is None
            return None
        self.log.append((name, handle, wanted))
        return handle

    @rule(name=NAMES, tree=states(), overlap=st.booleans(), durable=st.booleans())
    def save_a_tree(self, name: str, tree: Any, overlap: bool, durable: bool) -> None:
        self.submit(name, tree, overlap=overlap, durable=durable)

    @rule(name=NAMES, check=st.booleans(), step=st.booleans())
    def save_the_training_and_go_on(self, name: str, check: bool, step: bool) -> None:
        self.submit(name, self.training.state(), check_mutation=check)
        if step:
            self.training.step()

    @rule(name=NAMES, call=st.sampled_from(sorted(FAULTS)), nth=st.integers(1, 3))
    def save_with_a_fault(self, name: str, call: str, nth: int) -> None:
        with fault(call, nth=nth, err=FAULTS[call]):
            handle = self.submit(name, {"x": torch.zeros(3 * BLOCK)})
            self.settle()
        assert handle is None or handle.done()

    @rule()
    def step(self) -> None:
        self.training.step()

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        stillframe.remove(self.directory / name)
        self.log.append((name,))

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        handles = [entry[1] for entry in self.log if len(entry) == 3]
        if handles:
            handle = handles[which % len(handles)]
            ended = handle.done() and handle.state
            accepted = handle.cancel()
            if ended:
                assert accepted == (ended == "cancelled")
            elif accepted:
                with pytest.raises(CancelledError):
                    handle.result(60)

    @rule(which=st.integers(0, 100), staged=st.booleans())
    def wait(self, which: int, staged: bool) -> None:
        handles = [entry[1] for entry in self.log if len(entry) == 3]
        if handles:
            handle = handles[which % len(handles)]
            with contextlib.suppress(stillframe.SaveError, CancelledError):
                if staged:
                    handle.wait_staged(60)
                else:
                    handle.result(60)

    @rule(name=NAMES, verify=st.booleans())
    def load(self, name: str, verify: bool) -> None:
        nr = len(self.log)
        try:
            found = stillframe.load(self.directory / name, weights_only=False, verify=verify)
        except FileNotFoundError:
            found = None
        wanted = self.contents(nr).get(name)
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            assert_same(found, wanted)

    @rule(nbytes=st.integers(1, 5 * BLOCK))
    def warm_up(self, nbytes: int) -> None:
        assert self.engine is not None
        self.engine.warm_up(nbytes)

    @rule()
    def trim(self) -> None:
        assert self.engine is not None
        self.engine.trim()

    @rule()
    def look_at_the_figures(self) -> None:
        assert self.engine is not None
        stats = self.engine.stats()
        assert stats["leased_bytes"] <= stats["committed_bytes"] <= stats["pool_bytes"]
        assert stats["saves_in_flight"] <= self.options["max_in_flight"]

    @rule()
    def another_engine(self) -> None:
        assert self.engine is not None
        self.engine.close()
        assert self.engine.stats()["committed_bytes"] == 0
        self.engine = stillframe.Engine(**self.options)

    @rule()
    def everything_has_ended(self) -> None:
        assert self.engine is not None
        self.settle()
        contents = self.contents(len(self.log))
        assert sorted(os.listdir(self.directory)) == sorted([*contents, "first"])
        for name in ("a.pt", "b.pt", "c.pt"):
            assert stillframe.exists(self.directory / name) == (name in contents)
        for name, wanted in contents.items():
            assert_same(torch.load(self.directory / name, weights_only=False), wanted)
        stats = self.engine.stats()
        assert stats["leased_bytes"] == stats["saves_in_flight"] == 0

    # ---- the model ----

    def settle(self) -> None:
        while True:
            try:
                return stillframe.wait_all(60)
            except stillframe.SaveError as error:
                assert error.errno in FAULTS.values()

    def contents(self, nr: int) -> dict[str, Any]:
        """Return the content of each name after the first `nr` entries of the log."""
        held: dict[str, Any] = {}
        good = True  # whether the last save of any name succeeded
        for entry in self.log[:nr]:
            if len(entry) == 3:
                name, handle, wanted = entry
                try:
                    error = handle.exception(60)
                except CancelledError as cancelled:
                    error = cancelled
                good = error is None
                if good:
                    held[name] = wanted
                    report = handle.result()
                    assert report.peak_pool_bytes <= self.options["pool_bytes"]
                else:
                    assert isinstance(error, stillframe.SaveError | CancelledError), error
            elif good:
                held.pop(entry[0], None)
        return held

    def teardown(self) -> None:
        try:
            if self.engine is not None:
                self.everything_has_ended()
                self.engine.close()
        finally:
            self.open.close()


def some(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def test_every_path_has_the_content_that_the_order_of_calls_implies():
    run_state_machine_as_test(SavesLoadsAndRemoves, settings=some(25))


@pytest.mark.skipif(not CAMPAIGN_S, reason="make campaign asks for it")
@pytest.mark.timeout(CAMPAIGN_S + 600)
def test_random_campaign_finds_no_violation():
    end = time.monotonic() + CAMPAIGN_S
    while time.monotonic() < end:
        run_state_machine_as_test(SavesLoadsAndRemoves, settings=some(100))
