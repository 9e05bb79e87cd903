"""`stillframe.trace`: the timeline is complete and correct, and delays nothing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import textwrap
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_processes import run_python
from stillframe import _core
from stillframe.testing import fault, held, slow

MIB = 1 << 20
STEPS_TID = 1 << 22  # the row of a thread's training steps has the thread's number plus this
TOLERANCE_US = 0.002  # the rounding of figures in decimal text


class Timeline:
    """A trace's file, parsed as strict JSON."""

    def __init__(self, path: Path) -> None:
        self.document = json.loads(path.read_text())
        self.events: list[dict[str, Any]] = self.document["traceEvents"]
        self.spans = [event for event in self.events if event["ph"] == "X"]
        self.rows = {
            event["tid"]: event["args"]["name"]
            for event in self.events
            if event["name"] == "thread_name"
        }
        self.order = {
            event["tid"]: event["args"]["sort_index"]
            for event in self.events
            if event["name"] == "thread_sort_index"
        }

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]

    def description_of(self, name: str) -> set[str]:
        return {self.rows[span["tid"]] for span in self.named(name)}

    def total(self, name: str, number: str = "bytes") -> int:
        return sum(span["args"][number] for span in self.named(name))

    def parents(self) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Return each span with the innermost span around it; fail if two spans of a row
        overlap."""
        found = []
        by_row = defaultdict(list)
        for span in self.spans:
            by_row[span["pid"], span["tid"]].append(span)
        for spans in by_row.values():
            spans.sort(key=lambda span: (span["ts"], -span["dur"]))
            around: list[dict[str, Any]] = []
            for span in spans:
                while around and end(around[-1]) <= span["ts"] + TOLERANCE_US:
                    around.pop()
                assert not around or end(span) <= end(around[-1]) + TOLERANCE_US, (span, around[-1])
                found.append((span, around[-1] if around else None))
                around.append(span)
        return found


def end(span: dict[str, Any]) -> float:
    return span["ts"] + span["dur"]


class Trained:
    """A model with AdamW whose state is deferred from the fourth step on."""

    def __init__(self, width: int = 512, layers: int = 4) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.width = width

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, self.width)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


def save_before_a_step(
    trained: Trained, path: Path, engine: stillframe.Engine
) -> stillframe.SaveReport:
    """Save, and delay the copies after the call until the step is at its gate."""
    begin = _core.trace_begin
    with contextlib.ExitStack() as copies, pytest.MonkeyPatch.context() as patched:
        injected = copies.enter_context(held("lane_copy"))
        handle = stillframe.async_save(trained.state(), path, engine=engine)
        while not injected.calls("lane_copy"):
            time.sleep(0.001)
        going_on = threading.Timer(0.01, copies.close)
        patched.setattr(_core, "trace_begin", lambda: (begin(), going_on.start())[0])
        trained.step()
        going_on.join()
    report = handle.result()
    assert report is not None
    return report


@pytest.fixture
def traced(tmp_path: Path) -> tuple[Timeline, list[stillframe.SaveReport], stillframe.trace]:
    """Trace three saves between steps, from the first to the last byte."""
    trained = Trained()
    trained.step(4)
    with (
        stillframe.trace(tmp_path / "t.json") as trace,
        stillframe.Engine(pool_bytes=64 * MIB, block_bytes=MIB) as engine,  # closes first
    ):
        reports = [
            save_before_a_step(trained, tmp_path / f"save{number}.pt", engine)
            for number in range(3)
        ]
    return Timeline(tmp_path / "t.json"), reports, trace


def test_rows_of_a_trace_have_names_and_the_steps_are_above_the_threads(traced):
    timeline, _, _ = traced
    assert {span["tid"] for span in timeline.spans} <= set(timeline.rows)
    assert (
        timeline.description_of("step")
        == timeline.description_of("optimizer")
        == {"training steps"}
    )
    for name in ("async_save", "plan", "admit", "capture", "samples", "gate"):
        assert timeline.description_of(name) == {"main thread"}, name
    assert timeline.description_of("copy") == {"main thread", "sfr-lane0"}
    for name in ("open", "block", "checksum", "tail", "sync"):
        assert timeline.description_of(name) <= {"sfr-writer0", "sfr-writer1"}, name
    assert (
        timeline.description_of("commit")
        == timeline.description_of("sync directory")
        == {"sfr-log"}
    )
    assert "sf-completion" in timeline.rows.values() or "sf-completion" not in {
        thread.name for thread in threading.enumerate()
    }
    above = [tid for tid, name in timeline.rows.items() if name == "training steps"]
    others = [order for tid, order in timeline.order.items() if tid not in above]
    assert all(timeline.order[tid] < min(others) for tid in above)


def test_spans_in_one_row_of_a_trace_are_nested(traced):
    timeline, _, _ = traced
    expected = {
        "plan": "async_save",
        "admit": "async_save",
        "capture": "async_save",
        "samples": "capture",
        "optimizer": "step",
        "checksum": "block",
        "sync": "tail",
        "sync directory": "commit",
    }
    parts: dict[int, float] = defaultdict(float)
    wholes: dict[int, float] = {}
    for span, parent in timeline.parents():
        if span["name"] in expected:
            assert parent is not None and parent["name"] == expected[span["name"]], span
        if span["name"] == "write":
            assert parent is not None and parent["name"] in ("block", "tail")
        if parent is not None:
            parts[id(parent)] += span["dur"]
            wholes[id(parent)] = parent["dur"]
            assert (
                parent["args"].get("save") == span["args"].get("save")
                or "save" not in (parent["args"])
            )
    assert parts
    for key, total in parts.items():
        assert total <= wholes[key] + 1000 * TOLERANCE_US


def test_bytes_and_counts_are_those_of_the_saves(traced):
    timeline, reports, trace = traced
    assert trace.error is None and trace.dropped == 0
    assert timeline.total("write") == sum(report.nbytes for report in reports)
    assert timeline.total("block") == timeline.total("copy")
    assert timeline.total("block") + timeline.total("tail") == timeline.total("write")
    assert timeline.total("capture") == sum(report.captured_nbytes for report in reports)
    for name in ("async_save", "plan", "open", "tail", "sync", "commit", "sync directory"):
        assert len(timeline.named(name)) == 3, name
    assert timeline.total("async_save", "tensors") == sum(report.num_tensors for report in reports)
    steps = sorted(timeline.named("step"), key=end)
    assert [span["args"]["number"] for span in steps] == [1, 2, 3]
    for before, step in itertools.pairwise(steps):  # forward and backward belong to the step
        assert abs(step["ts"] - end(before)) <= TOLERANCE_US
    assert len(timeline.named("optimizer")) == 3
    numbers = {span["args"]["save"] for span in timeline.named("commit")}
    assert len(numbers) == 3
    saves = [event for event in timeline.events if event["ph"] in "be"]
    assert trace.events == len(timeline.spans) + len(saves) // 2
    assert {event["id"] for event in saves} == numbers
    begins = [event for event in saves if event["ph"] == "b"]
    assert [event["args"]["file"] for event in begins] == ["save0.pt", "save1.pt", "save2.pt"]
    assert {event["args"]["state"] for event in begins} == {"durable"}


def test_timestamps_keep_all_digits(traced):
    timeline, _, _ = traced
    digits = {round(event["ts"] * 1000) % 1000 for event in timeline.spans}
    assert any(each >= 100 for each in digits)


def test_gate_span_has_the_length_that_the_report_says(tmp_path, monkeypatch):
    begin = _core.trace_begin

    def late():
        time.sleep(0.01)  # as if the machine were busy, before the clock is read
        return begin()

    monkeypatch.setattr(_core, "trace_begin", late)
    trained = Trained()
    trained.step(4)
    with (
        stillframe.trace(tmp_path / "t.json"),
        stillframe.Engine(pool_bytes=64 * MIB, block_bytes=MIB) as engine,
    ):
        # On a busy machine the copies may end before the step starts to wait for them.
        waited_s = [
            save_before_a_step(trained, tmp_path / "a.pt", engine).gate_wait_s for _ in range(5)
        ]
    gates = Timeline(tmp_path / "t.json").named("gate")
    assert max(waited_s) > 0
    assert sum(gate["dur"] for gate in gates) >= sum(waited_s) * 1e6


def test_a_pool_of_one_block_shows_the_waits_for_it(tmp_path):
    state = {f"t{i}": torch.zeros(MIB // 4) for i in range(8)}
    with (
        slow("pwrite", 0.005),
        stillframe.trace(tmp_path / "t.json"),
        stillframe.Engine(pool_bytes=MIB, block_bytes=MIB) as engine,
    ):
        stillframe.save(state, tmp_path / "a.pt", engine=engine)
    timeline = Timeline(tmp_path / "t.json")
    assert timeline.named("wait for block")
    assert timeline.named("copy storage")
    assert timeline.description_of("wait for block") == {"main thread"}


def test_save_under_way_is_traced_from_the_traces_begin(tmp_path):
    with contextlib.ExitStack() as write, stillframe.Engine() as engine:
        write.enter_context(held("fdatasync"))
        handle = stillframe.async_save([torch.ones(9)], tmp_path / "a.pt", engine=engine)
        with stillframe.trace(tmp_path / "t.json"):
            write.close()
            handle.result()
            stillframe.wait_all()
    events = Timeline(tmp_path / "t.json").events
    begin, over = (event for event in events if event["name"] == "save")
    assert begin["ts"] == 0 < over["ts"]


def test_trace_shows_failed_saves_and_escapes_names(tmp_path):
    name = 'a "b"\n\\é😀\udcff' + "x" * 40 + ".pt"
    with (
        fault("fdatasync", err=errno.EIO),
        stillframe.trace(tmp_path / "t.json"),
        stillframe.Engine() as engine,
    ):
        handle = stillframe.async_save({"a": 1}, tmp_path / name, engine=engine)
        assert isinstance(handle.exception(), stillframe.SaveError)
    timeline = Timeline(tmp_path / "t.json")
    (save,) = (event for event in timeline.events if event["ph"] == "b")
    assert save["args"]["state"] == "failed"
    assert save["args"]["file"].startswith('a "b"\n\\é😀?xxx')
    assert not timeline.named("commit")


def test_without_a_trace_nothing_is_recorded(tmp_path):
    trained = Trained(width=16)
    with stillframe.trace(tmp_path / "empty.json") as trace:
        pass
    trained.step(2)
    stillframe.save(trained.state(), tmp_path / "a.pt")
    assert trace.events == 0
    with stillframe.trace(tmp_path / "later.json") as trace:
        pass
    assert trace.events == 0
    assert Timeline(tmp_path / "later.json").spans == []
    assert _core.trace_begin() == 0


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [
        ("missing/t.json", FileNotFoundError, errno.ENOENT),
        (".", IsADirectoryError, errno.EISDIR),
        ("file/t.json", NotADirectoryError, errno.ENOTDIR),
        ("null", OSError, errno.EINVAL),
        ("pipe", OSError, errno.ENXIO),
    ],
)
def test_unwritable_path_raises_on_entry(tmp_path, name, error, code):
    (tmp_path / "file").write_text("")
    (tmp_path / "null").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    entered = False
    with pytest.raises(error, match="trace") as caught, stillframe.trace(tmp_path / name):
        entered = True
    assert not entered
    assert caught.value.errno == code
    assert caught.value.filename == str(tmp_path / name)
    with stillframe.trace(tmp_path / "good.json"):  # the failed trace has left nothing
        pass


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_invalid_path_is_refused(path):
    with pytest.raises(ValueError, match="cannot be the path of a trace"):
        stillframe.trace(path)


def test_number_is_refused_as_a_path():
    with pytest.raises(TypeError):
        stillframe.trace(3)


def test_two_traces_at_a_time_are_refused_and_the_first_goes_on(tmp_path):
    with stillframe.trace(tmp_path / "first.json") as first:
        second = stillframe.trace(tmp_path / "second.json")
        with pytest.raises(stillframe.StillframeError, match=r"first\.json"):
            second.__enter__()
        with pytest.raises(stillframe.StillframeError, match=r"first\.json"):
            first.__enter__()
        stillframe.save({"a": 1}, tmp_path / "a.pt")
    assert not (tmp_path / "second.json").exists()
    assert Timeline(tmp_path / "first.json").named("commit")
    with second:
        pass
    assert Timeline(tmp_path / "second.json").spans == []


def test_error_in_the_block_is_raised_and_the_file_is_complete(tmp_path):
    with pytest.raises(ZeroDivisionError), stillframe.trace(tmp_path / "t.json"):
        stillframe.save({"a": 1}, tmp_path / "a.pt")
        raise ZeroDivisionError
    assert Timeline(tmp_path / "t.json").named("sync")


def test_second_trace_has_no_events_of_the_first(tmp_path):
    trace = stillframe.trace(tmp_path / "t.json")
    with trace:
        stillframe.save({"a": 1}, tmp_path / "a.pt")
    assert trace.events > 0
    with trace:
        assert (trace.events, trace.dropped, trace.error) == (0, 0, None)


def test_a_full_disk_does_not_end_the_training_and_is_reported(tmp_path, caplog):
    # The first write has the empty document, the second one the events.
    with fault("pwrite", nth=2, err=errno.ENOSPC), stillframe.trace(tmp_path / "t.json") as trace:
        start = _core.trace_begin()
        _core.trace_end(_core.TRACE_GATE, start, 1, 0)
    assert trace.error is not None and trace.error.errno == errno.ENOSPC
    assert (trace.events, trace.dropped) == (0, 1)
    assert "not complete" in caplog.text and "1 events were dropped" in caplog.text
    assert Timeline(tmp_path / "t.json").spans == []


def test_steps_of_several_threads_have_rows_of_their_own(tmp_path):
    def train() -> None:
        Trained(width=16).step(3)

    with stillframe.trace(tmp_path / "t.json"):
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        train()
        for thread in threads:
            thread.join()
    timeline = Timeline(tmp_path / "t.json")
    timeline.parents()
    rows = defaultdict(list)
    for span in timeline.named("step"):
        rows[span["tid"]].append(span["args"]["number"])
    assert len(rows) == 3
    assert all(numbers == [1, 2, 3] for numbers in rows.values())
    assert all(tid >= STEPS_TID for tid in rows)


def test_a_forked_child_leaves_the_trace_alone_and_may_begin_its_own(tmp_path):
    code = """
    import os, json, stillframe
    with stillframe.trace("parent.json"):
        stillframe.save({"a": 1}, "before.pt")
        child = os.fork()
        if child == 0:
            stillframe.save({"a": 1}, "child.pt")
    if child == 0:  # it has left the parent's block
        with stillframe.trace("child.json"):
            stillframe.save({"a": 1}, "own.pt")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    run_python("-W", "ignore", "-c", textwrap.dedent(code), cwd=tmp_path, check=True)
    files = {
        name: [e["args"]["file"] for e in Timeline(tmp_path / name).events if e["ph"] == "b"]
        for name in ("parent.json", "child.json")
    }
    assert files == {"parent.json": ["before.pt"], "child.json": ["own.pt"]}


@pytest.mark.parametrize("leave", ["os._exit(3)", "os.kill(os.getpid(), 9)", "sys.exit(3)"])
def test_a_process_that_ends_inside_the_block_leaves_a_valid_file(tmp_path, leave):
    code = f"""
    import os, sys, time, stillframe
    with stillframe.trace("t.json"):
        stillframe.save({{"a": 1}}, "a.pt")
        while '"name":"commit"' not in open("t.json").read():  # written ten times a second
            time.sleep(0.01)
        {leave}
    """
    done = run_python("-c", textwrap.dedent(code), cwd=tmp_path)
    assert done.returncode == (-9 if "kill" in leave else 3)
    assert Timeline(tmp_path / "t.json").named("commit")


def test_saves_that_finish_at_exit_are_in_the_trace_of_a_daemon_thread(tmp_path):
    code = """
    import threading, time, stillframe
    inside, forever = threading.Event(), threading.Event()
    def run():
        with stillframe.trace("t.json"):
            inside.set()
            forever.wait()
    threading.Thread(target=run, daemon=True).start()
    inside.wait()
    stillframe.async_save({"a": 1}, "a.pt")
    """
    run_python("-c", textwrap.dedent(code), cwd=tmp_path, check=True)
    timeline = Timeline(tmp_path / "t.json")
    assert [event["args"]["state"] for event in timeline.events if event["ph"] == "b"] == [
        "durable"
    ]


@pytest.mark.parametrize("kind", [-1, 0, 1000])
def test_unknown_kind_of_span_is_refused(kind):
    with pytest.raises(ValueError, match="no such kind"):
        _core.trace_end(kind, 1, 0, 0)
