"""Draws the figures of a run as a PNG next to its JSON.

Other scripts call it at their end. It can also be run by itself:

    python benchmarks/pictures.py vs_peers.json [limits.json ...]
    make pictures            the results in benchmarks/results, which README and docs show

A way to save has the same colour in every picture, and every bar shows its spread. Drawing needs
matplotlib (benchmarks/requirements.txt). Without it the figures are still saved, and a message says
what to install.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import format_seconds, format_size, write_json
from peers import DCP, DCP_STAGER, LIGHTNING, OURS, PEERS, TORCH, TORCH_NO_CRC

MISSING = (
    "no picture is drawn, because matplotlib is not installed: "
    "pip install -r benchmarks/requirements.txt, then python benchmarks/pictures.py {json}"
)
COLOURS = ("#7f9c6d", "#c3cad2", "#e0a458", "#7c98b3", "#52708f", "#c8352b")
MACHINE = "#9aa5b1"  # memcpy, raw reads and writes
WAY_COLOURS = {  # ours is the brightest
    TORCH: COLOURS[0],
    TORCH_NO_CRC: COLOURS[1],
    LIGHTNING: COLOURS[2],
    DCP: COLOURS[3],
    DCP_STAGER: COLOURS[4],
    OURS: COLOURS[5],
    "none": "#dfe3e8",
    "synchronous": COLOURS[0],  # Lightning's saving, which calls torch.save
    "lightning": COLOURS[2],
    "torch.load": COLOURS[0],  # a load has the colour of its save
    "torch.load(mmap=True)": COLOURS[1],
    "DCP load": COLOURS[3],
    "safetensors": "#8d7bb0",
    "stillframe.load": COLOURS[5],
    "memcpy": "#5d6873",
    "O_DIRECT reads, four threads": MACHINE,
}
LOOPS = {  # the scenarios of vs_peers.py that are training loops, and their titles
    "loop": "a training loop",
    "loop_large": "a training loop",
    "lightning_loop": "a Lightning training",
}
FITS = {  # the ways of lightning_fit.py that save, and their titles
    "synchronous": "synchronous",
    "lightning": "Lightning's asynchronous",
    "stillframe": "stillframe",
}
FORWARD, STEP, WAIT = "#e4e7eb", "#b8c0ca", "#3b4754"
# The parts of the time that a save costs, from left to right in its bar: metric and opacity.
LOST_PARTS = (("call_s", 1.0), ("gate_s", 0.65), ("slowdown_s", 0.35))


def save_and_draw(json_path: Path | None, document: dict[str, Any]) -> None:
    """Save a run's document as `json_path`, and its picture next to it; do nothing for None."""
    if json_path is not None:
        write_json(json_path, document)
        draw_document(json_path, document)


def draw_document(
    json_path: Path, document: dict[str, Any], out: Path | None = None
) -> Path | None:
    """Draw `document` into a PNG with the name of `json_path`, next to it or in the directory
    `out`.

    Return the PNG's path. Return None if there is nothing to draw, or if matplotlib is missing,
    which stderr reports.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        print(MISSING.format(json=json_path), file=sys.stderr)
        return None
    panels = _panels(document)
    if not panels:
        return None
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)  # rounded up
    width = 10.0 if "turns" in document else 6.4 * columns
    figure = Figure(figsize=(width, 4.0 * rows), layout="constrained")
    for number, (draw, arguments) in enumerate(panels):
        draw(figure.add_subplot(rows, columns, number + 1), *arguments)
    figure.suptitle(_title(document), fontsize=9, color="#555555")
    path = (out or json_path.parent) / json_path.with_suffix(".png").name
    figure.savefig(path, dpi=130)
    print(f"drawn as {path}", file=sys.stderr)
    return path


def _title(document: dict[str, Any]) -> str:
    facts = document.get("facts") or document["machine"]
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['filesystem']}; {facts['date'][:10]}"


def _panels(document: dict[str, Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return (function, its arguments after the axes) for each diagram of a document's picture.

    The keys of the document tell which script has made it.
    """
    panels: list[tuple[Any, tuple[Any, ...]]] = []
    if "seconds" in document:  # limits.json
        return [(_draw_rates, (document["seconds"], document["nbytes"]))]
    if "turns" in document:  # timeline.json
        return [(_draw_timeline, (document["turns"], document["state"]))]
    if "results" in document:  # lightning_fit.json
        return [(_draw_fits, each) for each in document["results"].items()]
    if "states" in document:  # restore.json
        return [(_draw_loads, (document["states"],)), (_draw_reads, (document["states"],))]
    figures = document["figures"]
    if "ranks" in document["settings"]:  # dcp.json has only a table
        return []
    titles = {
        "loop": document["settings"]["loop_state"],
        "loop_large": document["settings"]["state"],
        "lightning_loop": document["settings"]["transformer"],
    }
    for scenario, nbytes in titles.items():
        if scenario in figures:
            panels.append((_draw_lost_time, (figures[scenario], scenario, nbytes)))
    for scenario in ("busy", "idle"):
        if scenario in figures:
            nbytes = document["settings"]["state"]
            panels.append((_draw_saves, (figures[scenario], scenario, nbytes)))
    if document.get("bytes_over_time"):
        panels.append((_draw_bytes_over_time, (document["bytes_over_time"], figures["idle"])))
    if document.get("resident_nbytes"):
        panels.append((_draw_memory, (document["resident_nbytes"],)))
    return panels


def _ways_in(found: Any) -> list[str]:
    """Return the ways to save that `found` has figures of, in the order of the table's columns."""
    return [peer for peer in PEERS if peer in found]


def _colour(peer: str) -> str:
    """Return the colour of a way to save."""
    return WAY_COLOURS[peer]


def _draw_lost_time(axes: Any, figures: dict[str, Any], scenario: str, nbytes: float) -> None:
    """Draw one bar for each way, of three parts: the call, the gate, and the slowdown of steps."""
    peers = _ways_in(figures)
    for row, peer in enumerate(peers):
        left = 0.0
        for metric, opacity in LOST_PARTS:
            part_ms = max(figures[peer][metric]["median"] * 1e3, 0.0)
            axes.barh(row, part_ms, left=left, color=_colour(peer), alpha=opacity)
            left += part_ms
        lost = figures[peer]["lost_s"]["median"] * 1e3
        error = figures[peer]["lost_s"]["error"] * 1e3
        axes.errorbar(lost, row, xerr=error, color="#222222", capsize=3, lw=1.2)
        axes.annotate(
            f"  {lost:.0f} ± {error:.0f} ms",
            (max(left, lost + error, 0.0), row),
            va="center",
            fontsize=9,
            annotation_clip=False,
        )
    axes.set_yticks(range(len(peers)), peers)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms a save, ± standard error (dark to light: call, wait, slower steps)")
    axes.set_title(f"Lost time a save: {LOOPS[scenario]}, {format_size(nbytes)}")
    _hide_frame(axes)


def _draw_bytes_over_time(axes: Any, curves: dict[str, Any], ends: dict[str, Any]) -> None:
    """Draw a line for each way: the bytes written so far, in one round.

    A dot above the line is the median end of all rounds, and the bar through it their spread.
    """
    for row, peer in enumerate(reversed(_ways_in(curves))):
        points = list(zip(curves[peer]["times_s"], curves[peer]["nbytes"], strict=True))
        # A way that writes in its call has its first point at the call's end: dashed until then.
        axes.plot((0, points[0][0]), (0, points[0][1] / 1e9), "--", color=_colour(peer), lw=1)
        times, written = zip(*((t, n / 1e9) for t, n in points), strict=True)
        axes.plot(times, written, color=_colour(peer), label=peer, lw=2.4 if peer == OURS else 1.4)
        level = written[-1] * (1.05 + 0.07 * row)  # each dot at another height
        _draw_end(axes, ends[peer]["finished_s"], level, _colour(peer))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds after the call; dots: the end, all rounds")
    axes.set_ylabel("GB written")
    axes.set_title("Bytes over time, main thread idle")
    axes.legend(fontsize=8, loc="center right")
    _hide_frame(axes)


def _draw_end(axes: Any, found: dict[str, Any], level: float, colour: str) -> None:
    """Draw a dot at the median of `found`, with a bar for the spread and a label."""
    middle = found["median"]
    spread = ((middle - found["min"],), (found["max"] - middle,))
    axes.errorbar(middle, level, xerr=spread, fmt="o", color=colour, capsize=3, lw=1.4)
    axes.annotate(f"  {middle:.2f} s", (found["max"], level), va="center", fontsize=8)


def _draw_saves(axes: Any, figures: dict[str, Any], scenario: str, nbytes: float) -> None:
    """Draw two bars for each way, to the end of the call and of the save: medians, with spread."""
    peers = _ways_in(figures)
    most = max(figures[peer]["finished_s"]["max"] for peer in peers)
    for row, peer in enumerate(peers):
        for metric, shift, opacity in (("call_s", -0.2, 1.0), ("finished_s", 0.2, 0.5)):
            found = figures[peer][metric]
            middle, at = found["median"], row + shift
            axes.barh(at, middle, height=0.36, color=_colour(peer), alpha=opacity)
            spread = ((middle - found["min"],), (found["max"] - middle,))
            axes.errorbar(middle, at, xerr=spread, color="#222222", capsize=2, lw=1)
            label = format_seconds(middle)
            if metric == "finished_s":
                label += ", durable" if peer == OURS else ", not synced"
            axes.annotate(f"  {label}", (found["max"], at), va="center", fontsize=8)
    axes.set_yticks(range(len(peers)), peers)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * most)
    axes.set_xlabel("seconds (dark: the call blocks; light: finished; lines: all rounds)")
    axes.set_title(f"{format_size(nbytes)}, main thread {scenario}")
    _hide_frame(axes)


def _draw_fits(axes: Any, nbytes: str, result: dict[str, Any]) -> None:
    """Draw the share of steps per second that checkpoints cost: medians with standard errors."""
    for index, fits in enumerate(result["every"].values()):
        for number, way in enumerate(FITS):
            lost, error = (100 * fits[way]["lost"][name] for name in ("median", "error"))
            at = index + 0.26 * (number - 1)  # three bars next to each other, around `index`
            label = FITS[way] if index == 0 else "_" + way  # with "_" it is not in the legend
            axes.bar(at, lost, width=0.24, color=_colour(way), label=label)
            axes.errorbar(at, lost, yerr=error, color="#222222", capsize=3, lw=1.2)
    axes.axhline(0, color="#222222", lw=0.8)
    axes.set_xticks(range(len(result["every"])), [f"every {n} steps" for n in result["every"]])
    axes.set_ylabel("% of the training's speed lost, ± standard error")
    axes.set_title(f"{format_size(float(nbytes))} of state, a Lightning training")
    axes.legend(fontsize=8)
    _hide_frame(axes)


# ---- the timeline ------------------------------------------------------------------------------


def _draw_timeline(axes: Any, turns: dict[str, dict[str, Any]], nbytes: int) -> None:
    """Draw two rows of bars for each way: the training thread, and the work in the background.

    Time zero is the call.
    """
    chosen = {way: each["shown"] for way, each in turns.items()}
    step = max(each["step_s"] for each in chosen.values())
    # From 1.6 steps before the call to 9 steps after it, or to some time after our save's end.
    left, right = -1.6 * step, max(9 * step, 1.15 * chosen[OURS]["ended_s"])
    for row, (way, found) in enumerate(chosen.items()):
        _draw_training(axes, row, way, found)
        _draw_background(axes, row + 0.36, way, found, right)
        axes.annotate(
            _lost_label(turns[way]["lost_s"]),
            (right, row),
            xytext=(6, -4),
            textcoords="offset points",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    axes.axvline(0, color="#222222", lw=0.8)
    axes.annotate(" the save begins", (0, -0.28), ha="left", fontsize=8)
    axes.set_xlim(left, right)
    axes.set_ylim(len(chosen) - 0.35, -0.5)
    axes.set_yticks([row + 0.1 for row in range(len(chosen))], list(chosen))
    axes.set_xlabel("seconds")
    axes.set_title(f"A save of {format_size(nbytes)} in a training", pad=22)
    _draw_legend(axes)
    _hide_frame(axes)


def _lost_label(lost: dict[str, float]) -> str:
    """Return the text for a lost time: milliseconds, or that noise hides it."""
    middle, least, most = (lost[name] * 1e3 for name in ("median", "min", "max"))
    if most - least > 2 * abs(middle):
        return "lost time:\nwithin the noise"
    return f"{middle:.0f} ms lost\n({least:.0f} to {most:.0f})"


def _draw_bar(axes: Any, row: float, height: float, begin: float, end: float, **style: Any) -> None:
    axes.barh(row, end - begin, left=begin, height=height, **style)


def _draw_training(axes: Any, row: int, way: str, found: dict[str, Any]) -> None:
    """Draw the training thread: the call, forward and backward, steps, and waits over them."""
    for name, begin, end in found["spans"]:
        if name == "call":
            _draw_bar(axes, row, 0.34, begin, end, color=_colour(way))
        else:
            colour = STEP if name == "optimizer.step()" else FORWARD
            _draw_bar(axes, row, 0.34, begin, end, color=colour, edgecolor="white", lw=0.7)
    for begin, end in _background_spans(found, "wait"):
        if end - begin > 1e-4:  # a shorter wait would be invisible
            _draw_bar(axes, row, 0.34, begin, end, color=WAIT)


def _background_spans(found: dict[str, Any], name: str) -> Iterator[tuple[float, float]]:
    """Return the (begin, end) of each span of one kind of background work."""
    times = found["background"].get(name, [])  # begins and ends alternate
    return zip(times[::2], times[1::2], strict=True)


def _draw_background(axes: Any, row: float, way: str, found: dict[str, Any], right: float) -> None:
    """Draw the work in the background: copying dark, writing lighter.

    Ways other than ours record no spans. They get one bar, from the call's return to the end.

    Args:
        right: The time at which the picture ends. A longer bar is cut there, and its label has an
            arrow.
    """
    colour = _colour(way)
    opacities = {"copy": 1.0, "write": 0.5, "sync": 0.25}
    for name, opacity in opacities.items():
        for begin, end in _background_spans(found, name):
            if end > 0:  # time zero is the call; what ends before belongs to an earlier save
                begin = max(begin, 0.0)
                _draw_bar(axes, row, 0.2, begin, end, color=colour, alpha=opacity, lw=0)
    ended = found["ended_s"]
    if not found["background"] and ended > found["call_s"]:
        end = min(ended, right)
        _draw_bar(axes, row, 0.2, found["call_s"], end, color=colour, alpha=0.5, lw=0)
    label, at = f" finished after {ended:.2f} s, not synced", ended
    if way == OURS:
        label = f" durable after {ended:.2f} s"
    elif way == DCP:
        label = f" file synced after {ended:.2f} s"
    if ended > right:
        label, at = f"{label} \u2192", found["call_s"] + 0.01
    axes.annotate(label, (at, row), va="center", fontsize=7.5, color="#222222")


def _draw_legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    shown = (
        (FORWARD, "forward, backward"),
        (STEP, "optimizer.step()"),
        (WAIT, "wait before the step"),
        ("#777777", "the call; below it, in the background: copying, writing"),
    )
    patches = [Patch(color=colour, label=label) for colour, label in shown]
    axes.legend(
        handles=patches,
        fontsize=8,
        frameon=False,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.99),  # above the axes
        ncols=4,
    )


def _draw_memory(axes: Any, resident: list[int]) -> None:
    axes.plot(range(1, len(resident) + 1), [n / 1e6 for n in resident], color=_colour(OURS))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("saves")
    axes.set_ylabel("MB of memory of the process")
    axes.set_title(f"Memory over {len(resident)} saves")
    _hide_frame(axes)


def _draw_rates(axes: Any, seconds: dict[str, Any], nbytes: float) -> None:
    """Draw the rate of each raw operation of limits.py; `seconds` has the times for `nbytes`."""
    rates = {
        name: nbytes / series["median"] / 1e9
        for name, series in seconds.items()
        if not math.isnan(series["median"])  # nan: the file system has no O_DIRECT
    }
    for row, rate in enumerate(rates.values()):
        axes.barh(row, rate, color=MACHINE)
        axes.annotate(f" {rate:.2f}", (rate, row), va="center", fontsize=9)
    axes.set_yticks(range(len(rates)), list(rates))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("GB/s")
    axes.set_title(f"Raw limits, {nbytes / 1e6:.0f} MB")
    _hide_frame(axes)


def _draw_loads(axes: Any, states: dict[str, Any]) -> None:
    """Draw the rate of each way to load, for each state and situation of restore.py."""
    labels: list[str] = []
    in_legend: set[str] = set()
    for state, figures in states.items():
        for situation, series in figures["loads"].items():
            for number, (way, found) in enumerate(series.items()):
                # matplotlib leaves a label with "_" out of the legend
                label = "_" + way if way in in_legend else way
                in_legend.add(way)
                # The bars of one label are next to each other, 0.8 high in all, around the label.
                height = 0.8 / len(series)
                level = len(labels) + height * (number + 0.5) - 0.4
                rate = figures["nbytes"] / found["median"] / 1e9
                axes.barh(level, rate, height=0.9 * height, color=_colour(way), label=label)
            labels.append(f"{state}, {situation}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.set_title("Loading, until every byte was used")
    axes.legend(fontsize=8, loc="lower right")
    _hide_frame(axes)


def _draw_reads(axes: Any, states: dict[str, Any]) -> None:
    """Draw the rates of verify and of raw reads."""
    labels: list[str] = []
    for state, figures in states.items():
        for name, found in figures["reads"].items():
            if not math.isnan(found["median"]):  # nan: the file system has no O_DIRECT
                rate = figures["nbytes"] / found["median"] / 1e9
                axes.barh(len(labels), rate, color=_colour(OURS) if name == "verify" else MACHINE)
                labels.append(f"{state}: {name}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.set_title("Reading every byte from the disk")
    _hide_frame(axes)


def _hide_frame(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(arguments: list[str]) -> int:
    """Draw the picture of each named JSON, next to it or in the directory of --out.

    Return 2 if one of them cannot be drawn.
    """
    out = None
    if arguments[:1] == ["--out"]:
        out, arguments = Path(arguments[1]), arguments[2:]
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for name in arguments:
        try:
            document = json.loads(Path(name).read_text())
            if not _panels(document):
                print(f"{name} has no picture", file=sys.stderr)
                continue
            drawn = draw_document(Path(name), document, out)
        except (OSError, ValueError, KeyError) as error:
            print(f"pictures.py: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            drawn = None
        if drawn is None:
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
