"""The tables of README and docs agree with the stored figures."""

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
    for name in tables.PAGES:
        assert "<!-- table " in (ROOT / name).read_text(), name


def test_another_figure_makes_another_table(tables, tmp_path, monkeypatch):
    text = (ROOT / tables.PAGES[0]).read_text()
    name = next(source for source, _ in tables.TABLES.values())
    document = json.loads((tables.RESULTS / name).read_text())
    for way in document["figures"]["busy"].values():
        for figure in way.values():
            figure["median"] += 7
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / name).write_text(json.dumps(document))
    assert tables.with_tables(text) != text
    assert tables.with_tables(tables.with_tables(text)) == tables.with_tables(text)


def test_kept_figures_have_statistics_and_no_single_values(tables):
    from common import Series

    kept = Series.of([1.0, 2.0, 3.0, 4.0, 100.0]).to_json()
    assert kept.pop("error") == pytest.approx(1.2533 * 1.4826 / 5**0.5)
    assert kept == {"median": 3.0, "min": 1.0, "max": 100.0, "n": 5}


def test_kept_figures_are_written_in_lines_that_fit(tables, tmp_path):
    from common import MOST_COLUMNS, write_json

    series = {"median": 1.25, "min": 1.0, "max": 2.5}
    document = {"times": [n / 7 for n in range(99)], "ways": {"a": {"s": series}, "b": {}}, "n": []}
    write_json(tmp_path / "x.json", document)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == document
    assert max(map(len, text.split("\n"))) <= MOST_COLUMNS
    assert '   "s": {"median": 1.25, "min": 1.0, "max": 2.5}\n' in text


def test_timeline_keeps_one_round_and_the_lost_time_of_all(tables):
    import timeline

    turns = [{"step_s": step, "lost_s": lost} for step, lost in ((2.0, 3.0), (1.0, 5.0))]
    kept = timeline.summary({"way": turns})["way"]
    assert kept["shown"] == turns[1]
    assert (kept["lost_s"]["median"], kept["lost_s"]["n"]) == (4.0, 2)


def test_benchmark_of_a_missing_package_is_left_out_with_a_sentence(
    tables, tmp_path, monkeypatch, capsys
):
    import dcp
    from dcp_ways import META

    monkeypatch.setattr("dcp_ways.find_spec", lambda name: None)
    assert dcp.main(["--ways", META, "--dir", str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert "torch_checkpointing is left out" in output and "pip install -r" in output


def test_each_way_of_many_ranks_has_a_column(tables):
    import dcp_table
    import dcp_ways

    assert dcp_table.TITLES.keys() == dcp_ways.ALL.keys()
