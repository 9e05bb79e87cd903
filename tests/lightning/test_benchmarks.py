"""The benchmarks of loads and fits, in their smallest form and in this process."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

import pytest
import stillframe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield
    # the scripts import modules with common names, such as "common"
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.mark.parametrize("saved_by", ["torch.save", "stillframe.save"])
def test_benchmark_measures_loads(saved_by, scripts, tmp_path):
    import restore
    import restore_process

    path, spec = str(tmp_path / "x.pt"), restore.Spec(200_000, "mlp", 2, 2)
    restore_process.prepare()
    restore_process.make(path, spec, saved_by)
    loads = [restore_process.load(path, way) for way in restore.WAYS]
    assert all(each.seconds > 0 for each in loads), loads
    assert restore_process.memcpy(path) > 0
    assert restore_process.verify(path) > 0


def test_benchmark_process_answers_until_it_fails(scripts):
    from common import BenchError
    from process import Worker

    def ask(module, *request):
        with Worker("it", importlib.import_module, module) as worker:
            return worker.ready().call(*request)

    assert ask("math", "sqrt", 4) == 2
    with pytest.raises(BenchError, match=r"^it: ValueError: .*\nTraceback"):
        ask("math", "sqrt", -1)
    with pytest.raises(BenchError, match=r"^it: its process died \(exit code 3\)$"):
        ask("os", "_exit", 3)
    late = pytest.raises(BenchError, match=r"^it: took more than 1 s")
    with late, Worker("it", importlib.import_module, "time") as worker:
        worker.ready()._limit_s = 1.0
        worker.call("sleep", 600)


def test_server_counts_the_bytes_of_objects_and_keeps_none(scripts):
    pytest.importorskip("obstore")
    import torch
    from s3_server import Server

    server = Server()
    options = {"key": "a", "secret": "b", "endpoint_url": server.endpoint(), "region": "eu"}
    for numel in (10, 9_000_000):  # in one request, and in parts
        url = "s3://bkt/run/a.pt"
        report = stillframe.save({"a": torch.ones(numel)}, url, storage_options=options)
        assert server.take("run/a.pt")["nbytes"] == report.nbytes
    with pytest.raises(KeyError):
        server.take("run/a.pt")


def test_every_measured_load_has_a_colour(scripts):
    import pictures
    import restore

    shown = [pictures._colour(each) for each in (*restore.WAYS, restore.RAW, restore.MEMCPY)]
    assert len(set(shown)) == len(shown)


def test_benchmark_measures_a_restart(scripts, tmp_path, lit):
    import restart

    path = tmp_path / "x.ckpt"
    restart.run(restart.MAKE, path, 1)
    for way in restart.WAYS:
        found = restart.run(way, path, 1)
        assert found["at"] > 0
        assert found["peak_nbytes"] >= 0


def test_lost_speed_of_a_fit_is_judged_with_its_error(scripts):
    import lightning_fit
    from common import Series

    def judged(ours):
        shares = {"synchronous": Series.of([0.20, 0.22, 0.24]), "stillframe": Series.of(ours)}
        return lightning_fit.judge({**shares, "lightning": Series.of([0.10, 0.11, 0.12])}, 0.02)

    assert judged([0.0, 0.001, 0.002]) == "ahead of both: met; <= 2%: met"
    assert judged([0.0, 0.01, 0.04]) == "ahead of both: met; <= 2%: within the error"
    assert judged([0.10, 0.11, 0.13]) == "ahead of both: within the error; <= 2%: MISSED"
    assert judged([0.15, 0.16, 0.17]) == "ahead of both: MISSED; <= 2%: MISSED"


def test_each_fit_is_compared_with_one_without_checkpoints_in_its_round(scripts, monkeypatch):
    import lightning_fit

    asked = []

    class Worker(contextlib.nullcontext):
        def __init__(self, name, make, *arguments):
            super().__init__(self)
            self.name = name

        def ready(self):
            return self

        def call(self, method, batch, steps, every):
            asked.append((self.name, steps, every))
            return {"steps_per_s": 10.0 - every / 5 * (self.name != "none"), "step_s": 1.0}

    monkeypatch.setattr(lightning_fit, "Worker", Worker)
    found = lightning_fit.run_state(10**6, [20, 5], 2, 3, Path("unused"))["every"]
    counted = asked[-2 * 4 * 3 :]
    turns = [counted[at : at + 3] for at in range(0, len(counted), 3)]
    ways = [*lightning_fit.WAYS, *lightning_fit.WAYS[1:], lightning_fit.WAYS[0]]
    assert [turn[0] for turn in turns] == [(way, 63, 0) for way in ways]
    assert all({every for _, _, every in turn} == {0, 5, 20} for turn in turns)
    for every, fits in found.items():
        shares = {way: [fit["lost"] for fit in each] for way, each in fits.items()}
        share = pytest.approx(every / 50)
        assert shares == {way: [share if way != "none" else 0.0] * 2 for way in lightning_fit.WAYS}
