"""Writes the tables of README and docs from the figures in benchmarks/results: `make tables`.

    python benchmarks/tables.py           writes them into the pages
    python benchmarks/tables.py --check   writes nothing; exit status 1 if a page is out of date

In a page each table is between the comments `<!-- table NAME -->` and `<!-- end of table -->`. The
links to pictures are written in the same way, for each picture whose figures are in the tree.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_table
import odds
import restore_process
from common import format_size, format_times
from peers import LIGHTNING, OURS, TORCH
from pictures import FITS
from restore import SITUATIONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    "docs/figures.md",
    "docs/guarantees.md",
    "docs/quickstart.md",
    "docs/remote.md",
)
WAYS = {TORCH: "`torch.save`", LIGHTNING: "Lightning's `AsyncCheckpointIO`", OURS: "stillframe"}
LOADS = {
    restore_process.OURS: "`stillframe.load`",
    restore_process.TORCH: "`torch.load`",
    restore_process.MMAP: "`torch.load(mmap=True)`",
    restore_process.DCP: "DCP",
}
ENDS = {TORCH: ", not synced", LIGHTNING: ", not synced", OURS: ", durable"}


def time_format(*, spread: bool) -> Callable[[dict[str, Any]], str]:
    """Return a function that formats a figure's median, with smallest and largest if `spread`."""

    def format_time(figure: dict[str, Any]) -> str:
        more = [figure["min"], figure["max"]] if spread else []
        return format_times([figure["median"], *more])

    return format_time


def format_memory(figure: dict[str, Any]) -> str:
    """Format a figure of extra memory; noise below zero is shown as zero."""
    return f"{max(figure['median'], 0.0):.1f} x the state"


def saves(document: dict[str, Any], *, spread: bool) -> list[str]:
    """Return the table of what a save costs, from the document of a run of vs_peers.py.

    spread: Show the smallest and largest value too.
    """
    facts, settings = document["facts"], document["settings"]
    format_time = time_format(spread=spread)
    rows = [
        ("busy", "call_s", "main thread busy: the call blocks", format_time),
        ("busy", "finished_s", "finished after", format_time),
        ("busy", "stall_s", "longest stall of the main thread", format_time),
        ("idle", "call_s", "main thread idle: the call blocks", format_time),
        ("idle", "finished_s", "finished after", format_time),
        ("beside", "call_s", "a Python thread computes as well: the call blocks", format_time),
        ("beside_two", "call_s", "two of them: the call blocks", format_time),
        ("idle", "extra_rss", "extra memory", format_memory),
    ]
    lines = [
        f"{format_size(settings['state'])} of model and AdamW in 1,200 tensors;"
        f" {facts['cores']} cores ({facts['cpu']}), {facts['filesystem']}, no GPU; torch"
        f" {facts['torch'].split('+')[0]}, Lightning {facts['lightning']}; medians of"
        f" {settings['rounds']} rounds, {facts['date'][:10]}:",
        "",
        "| | " + " | ".join(WAYS.values()) + " |",
        "|---|" + "---|" * len(WAYS),
    ]
    for scenario, metric, title, format_figure in rows:
        cells = []
        for way in WAYS:
            figure = document["figures"].get(scenario, {}).get(way, {}).get(metric)
            cell = "-" if figure is None else format_figure(figure)
            if metric == "finished_s" and figure is not None:
                cell += ENDS[way]
            if way == OURS and not spread:
                cell = f"**{cell}**"
            cells.append(cell)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def loads(document: dict[str, Any]) -> list[str]:
    """Return the table of the seconds until every byte of a load has been used."""
    as_time = time_format(spread=True)
    lines = [f"| | {' | '.join(LOADS.values())} |", "|---|" + "---|" * len(LOADS)]
    for state, figures in document["states"].items():
        for situation, title in SITUATIONS.items():
            found = figures["loads"][situation]
            cells = [as_time(found[way]) if way in found else "-" for way in LOADS]
            lines.append(f"| {state}: {title} | " + " | ".join(cells) + " |")
    return lines


def lost_time(document: dict[str, Any]) -> list[str]:
    """Return the table of the time that a training loop loses by a save."""
    found = document["figures"]["loop"]
    ways = [way for way in WAYS if way in found]
    ways += [way for way in found if way not in WAYS]
    cells = [format_lost_time(found[way]["lost_s"]) for way in ways]
    titles = [WAYS.get(way, way) for way in ways]
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), f"| {' | '.join(cells)} |"]


def fits(document: dict[str, Any]) -> list[str]:
    """Return the table of the share of a Lightning training's speed that checkpoints cost."""
    titles = {**FITS, "none": "none against none"}
    (result,) = document["results"].values()  # of the only state
    lines = [f"| | {' | '.join(titles.values())} |", "|---|" + "---|" * len(titles)]
    for every, found in result["every"].items():
        cells = []
        for way in titles:
            lost = found[way]["lost"]
            cells.append(f"{100 * lost['median']:.1f} ± {100 * lost['error']:.1f} %")
        lines.append(f"| a checkpoint every {every} steps | {' | '.join(cells)} |")
        longest = [found[way]["longest_s"]["median"] for way in titles]
        lines.append(f"| its longest step | {' | '.join(format_times([x]) for x in longest)} |")
    return lines


def format_lost_time(figure: dict[str, Any]) -> str:
    """Format the median of a lost time with its standard error."""
    return f"{figure['median'] * 1e3:.0f} ± {figure['error'] * 1e3:.0f} ms"


def remote(document: dict[str, Any]) -> list[str]:
    """Return the tables of what saves to an object store cost, for each size and latency."""
    facts = document["facts"]
    lines = [
        f"{facts['cores']} cores ({facts['cpu']}), no GPU; torch {facts['torch'].split('+')[0]},"
        f" Lightning {facts['lightning']}, s3fs {facts['s3fs']}, obstore {facts['obstore']}; an S3"
        f" server on loopback; medians of {document['settings']['rounds']} rounds,"
        f" {facts['date'][:10]}:",
        "",
    ]
    for size, result in document["results"].items():
        for latency, ways in result["saves"].items():
            lines += [
                f"| {size}, {latency} added to each request | {' | '.join(ways)} |",
                "|---|" + "---|" * len(ways),
            ]
            for metric, title, format_figure in (
                ("call_s", "the call blocks", time_format(spread=False)),
                ("finished_s", "acknowledged after", time_format(spread=False)),
                ("loop_lost_s", "lost time of a training", format_lost_time),
                ("extra_rss", "extra memory", format_memory),
            ):
                cells = [format_figure(figures[metric]) for figures in ways.values()]
                lines.append(f"| {title} | {' | '.join(cells)} |")
            lines.append("")
    return lines[:-1]  # without the empty line after the last table


PICTURES = {  # name of the file of results and of the picture -> caption
    "saves": "Saves with a busy main thread and an idle one: the call, and until it has finished",
    "bytes_over_time": "Bytes written over time, with an idle main thread",
    "lost_time": "Lost time a save, in a training loop",
    "lightning_fit": "The share of a Lightning training's speed that checkpoints take",
    "restore": "Loads, and reading every byte",
}


def pictures() -> list[str]:
    """Return links to the pictures that `make pictures` draws from the figures in the tree."""
    lines = []
    for name, caption in PICTURES.items():
        if (RESULTS / f"{name}.json").exists():
            lines += [f"![{caption}](assets/{name}.png)", ""]
    return lines[:-1]  # without the empty line after the last picture


def recording() -> list[str]:
    """Return a link to the recording that `make recording` makes, if it is in the tree."""
    if not (ROOT / "docs/assets/demo.svg").exists():
        return []
    return ["![`make demo`, recorded in a terminal](assets/demo.svg)"]


# Tables that need no file of results.
COMPUTED = {"pictures": pictures, "recording": recording, "odds": odds.table}


def not_measured(source: str) -> list[str]:
    """Return the text in place of a table whose file of results, `source`, is not in the tree."""
    script = source.removesuffix(".json")
    where = "" if script == "remote" else " --dir DIR"
    command = f"python benchmarks/{script}.py{where} --json benchmarks/results/{source}"
    return [f"Not measured since the script was changed: `{command}`, then `make tables`."]


# name -> (file of results, function that makes the table from it)
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "saves": ("saves.json", lambda document: saves(document, spread=False)),
    "saves with their spread": ("saves.json", lambda document: saves(document, spread=True)),
    "many ranks": ("dcp.json", dcp_table.page),
    "loads": ("restore.json", loads),
    "lost time": ("lost_time.json", lost_time),
    "fits": ("lightning_fit.json", fits),
    "remote": ("remote.json", remote),
}


def with_tables(text: str) -> str:
    """Return the text of a page with its tables made from the present figures."""

    def table(found: re.Match[str]) -> str:
        name = found[1]
        if name in COMPUTED:
            lines = COMPUTED[name]()
        else:
            source, make = TABLES[name]
            path = RESULTS / source
            lines = make(json.loads(path.read_text())) if path.exists() else not_measured(source)
        return "\n".join([f"<!-- table {name} -->", *lines, "<!-- end of table -->"])

    return re.sub(r"<!-- table ([^\n]+?) -->\n.*?<!-- end of table -->", table, text, flags=re.S)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    check = parser.parse_args(argv).check
    different = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        new_text = with_tables(text)
        if new_text != text:
            different.append(name)
            if not check:
                page.write_text(new_text)
    if check and different:
        print(f"make tables would change {', '.join(different)}", file=sys.stderr)
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
