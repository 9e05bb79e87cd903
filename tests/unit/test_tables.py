"""The tables of README and docs are what the figures in the tree say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_way_of_a_comparison_has_its_colour(tables):
    import peers
    import pictures
    import restore
    import restore_process

    ways = {*peers.PEERS, *restore_process.WAYS, restore.RAW, restore.MEMCPY, *pictures.FITS}
    assert ways <= pictures.WAY_COLOURS.keys()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import tables

    yield tables
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def test_the_tables_are_what_the_figures_say():
    command = [sys.executable, str(ROOT / "benchmarks/tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_page_has_a_table(tables):
    for name in tables.PLACES:
        assert "<!-- table " in (ROOT / name).read_text(), name


def test_another_figure_makes_another_table(tables, tmp_path, monkeypatch):
    text = (ROOT / tables.PLACES[0]).read_text()
    name = next(source for source, _ in tables.TABLES.values())
    document = json.loads((tables.RESULTS / name).read_text())
    for way in document["figures"]["busy"].values():
        for figure in way.values():
            figure["median"] += 7
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / name).write_text(json.dumps(document))
    assert tables.written(text) != text
    assert tables.written(tables.written(text)) == tables.written(text)
