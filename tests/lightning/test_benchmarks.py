"""The scripts that measure loads run, in their smallest form and in this process."""

from __future__ import annotations

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


class Requests:
    """What a measured process is asked, and what it answers."""

    def __init__(self, *requests):
        self.requests = [*requests, None]
        self.answers = []

    def recv(self):
        return self.requests.pop(0)

    def send(self, answer):
        self.answers.append(answer)


def test_loads_are_measured(scripts, tmp_path):
    import restore
    import restore_process

    path, spec = str(tmp_path / "x.pt"), restore.Spec(200_000, "mlp", 2, 2)
    connection = Requests(
        ("make", path, spec),
        *(("load", path, way) for way in restore.WAYS),
        ("memcpy", path),
        ("verify", path),
    )
    restore_process._serve(connection)
    made, *loads, memcpy, verify = connection.answers
    assert made == 0.0
    assert all(isinstance(each, restore.Load) and each.seconds > 0 for each in loads), loads
    assert memcpy > 0
    assert verify > 0


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
