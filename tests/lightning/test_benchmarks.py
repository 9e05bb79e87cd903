"""The scripts that measure loads run, in their smallest form and in this process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:  # names as plain as "common" and "machine"
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def test_loads_are_measured(scripts, tmp_path):
    import restore
    import restore_process

    path, spec = str(tmp_path / "x.pt"), restore.Spec(200_000, "mlp", 2, 2)
    restore_process.prepare()
    restore_process.make(path, spec)
    loads = [restore_process.load(path, way) for way in restore.WAYS]
    assert all(each.seconds > 0 for each in loads), loads
    assert restore_process.memcpy(path) > 0
    assert restore_process.verify(path) > 0


def test_a_process_answers_until_it_fails(scripts):
    from common import BenchError
    from process import Worker

    def ask(module, *request):
        with Worker("it", importlib.import_module, module, limit_s=10.0) as worker:
            return worker.ready().call(*request)

    assert ask("math", "sqrt", 4) == 2
    with pytest.raises(BenchError, match=r"^it: ValueError: .*\nTraceback"):
        ask("math", "sqrt", -1)
    with pytest.raises(BenchError, match=r"^it: its process died \(exit code 3\)$"):
        ask("os", "_exit", 3)
    with pytest.raises(BenchError, match=r"^it: took more than 10 s"):
        ask("time", "sleep", 600)


def test_what_is_measured_beside_the_loads_has_a_colour_too(scripts):
    import pictures
    import restore

    shown = [pictures._colour(each) for each in (*restore.WAYS, restore.RAW, restore.MEMCPY)]
    assert len(set(shown)) == len(shown)


def test_a_restart_is_measured(scripts, tmp_path, lit):
    import restart

    path = tmp_path / "x.ckpt"
    restart.run(restart.MAKE, path, 1)
    for way in restart.WAYS:
        found = restart.run(way, path, 1)
        assert found["at"] > 0
        assert found["peak_nbytes"] >= 0
