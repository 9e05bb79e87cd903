"""Draws the figures of a run as a PNG beside its JSON; also on its own:

    python benchmarks/pictures.py vs_peers.json [limits.json ...]

matplotlib is needed for it (benchmarks/requirements.txt); without it the figures are saved and a
sentence says what to install.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peers import OURS, PEERS

MISSING = (
    "no picture is drawn, because matplotlib is not installed: "
    "pip install -r benchmarks/requirements.txt, then python benchmarks/pictures.py {json}"
)
COLOURS = ("#9aa5b1", "#c3cad2", "#e0a458", "#7c98b3", "#52708f", "#c8352b")  # ours stands out
PARTS = (("call_s", "call", 1.0), ("gate_s", "gate", 0.65), ("slowdown_s", "slower steps", 0.35))


def beside(json_path: Path, document: dict[str, Any]) -> Path | None:
    """Draws `document` into a PNG of the same name; None where there is nothing to draw, or
    matplotlib is missing (said on stderr)."""
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
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.0 * rows), layout="constrained")
    for number, (draw, arguments) in enumerate(panels):
        draw(figure.add_subplot(rows, columns, number + 1), *arguments)
    figure.suptitle(_title(document), fontsize=9, color="#555555")
    path = json_path.with_suffix(".png")
    figure.savefig(path, dpi=130)
    print(f"drawn as {path}", file=sys.stderr)
    return path


def _title(document: dict[str, Any]) -> str:
    facts = document["facts"]
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['filesystem']}; {facts['date'][:10]}"


def _panels(document: dict[str, Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    panels: list[tuple[Any, tuple[Any, ...]]] = []
    if "seconds" in document:  # limits.json
        return [(_rates, (document["seconds"], document["nbytes"]))]
    if "states" in document:  # restore.json
        return [(_loads, (document["states"],)), (_reads, (document["states"],))]
    figures = document["figures"]
    titles = {
        "loop": document["settings"]["loop_state"],
        "loop_large": document["settings"]["state"],
        "lightning_loop": document["settings"]["transformer"],
    }
    for scenario, nbytes in titles.items():
        if scenario in figures:
            panels.append((_lost_time, (figures[scenario], scenario, nbytes)))
    if document.get("bytes_over_time"):
        panels.append((_bytes_over_time, (document["bytes_over_time"],)))
    if document.get("resident_nbytes"):
        panels.append((_memory, (document["resident_nbytes"],)))
    return panels


def _names(found: Any) -> list[str]:
    return [peer for peer in PEERS if peer in found]


def _colour(peer: str) -> str:
    return COLOURS[list(PEERS).index(peer) % len(COLOURS)]


def _lost_time(axes: Any, figures: dict[str, Any], scenario: str, nbytes: float) -> None:
    """One bar a way to save: its call, its gate and what its save slowed the steps by."""
    peers = _names(figures)
    for row, peer in enumerate(peers):
        left = 0.0
        for metric, _, strength in PARTS:
            value = max(figures[peer][metric]["median"] * 1e3, 0.0)
            axes.barh(row, value, left=left, color=_colour(peer), alpha=strength)
            left += value
        lost = figures[peer]["lost_s"]["median"] * 1e3
        axes.annotate(
            f" {lost:.0f} ms", (max(left, 0.0), row), va="center", fontsize=9, annotation_clip=False
        )
    axes.set_yticks(range(len(peers)), peers)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms a save (dark to light: call, gate, slower steps)")
    axes.set_title(f"Lost time a save: {scenario}, {nbytes / 1e6:.0f} MB")
    _plain(axes)


def _bytes_over_time(axes: Any, curves: dict[str, Any]) -> None:
    """A line a way to save: bytes written so far; the dot is the moment when it has finished."""
    for peer in _names(curves):
        # Before the first sample after the call nothing is known: the logarithm begins there.
        points = [
            (t, n / 1e9)
            for t, n in zip(curves[peer]["times_s"], curves[peer]["nbytes"], strict=True)
            if t > 0
        ]
        times, written = zip(*points, strict=True)
        axes.plot(times, written, color=_colour(peer), label=peer, lw=2.4 if peer == OURS else 1.4)
        axes.plot(times[-1:], written[-1:], "o", color=_colour(peer))
    axes.set_xscale("log")
    axes.set_xlabel("seconds after the call (logarithmic)")
    axes.set_ylabel("GB written")
    axes.set_title("Bytes over time, main thread idle")
    axes.legend(fontsize=8)
    _plain(axes)


def _memory(axes: Any, resident: list[int]) -> None:
    axes.plot(range(1, len(resident) + 1), [n / 1e6 for n in resident], color=_colour(OURS))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("saves")
    axes.set_ylabel("MB of memory of the process")
    axes.set_title(f"Memory over {len(resident)} saves")
    _plain(axes)


def _rates(axes: Any, seconds: dict[str, Any], nbytes: float) -> None:
    found = {
        name: nbytes / series["median"] / 1e9
        for name, series in seconds.items()
        if series["median"] == series["median"]  # nan: the file system has no O_DIRECT
    }
    for row, rate in enumerate(found.values()):
        axes.barh(row, rate, color=COLOURS[3])
        axes.annotate(f" {rate:.2f}", (rate, row), va="center", fontsize=9)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("GB/s")
    axes.set_title(f"Raw limits, {nbytes / 1e6:.0f} MB")
    _plain(axes)


def _loads(axes: Any, states: dict[str, Any]) -> None:
    """A bar for each way, in each state and situation."""
    labels: list[str] = []
    ways = list(dict.fromkeys(way for each in states.values() for way in each["loads"]["cold"]))
    for state, figures in states.items():
        for situation, series in figures["loads"].items():
            for number, (way, found) in enumerate(series.items()):
                colour = COLOURS[ways.index(way) % len(COLOURS)]
                label = way if situation == "cold" and len(labels) < 3 else "_" + way  # once
                height = 0.8 / len(series)
                place = len(labels) + height * (number + 0.5) - 0.4
                rate = figures["nbytes"] / found["median"] / 1e9
                axes.barh(place, rate, height=0.9 * height, color=colour, label=label)
            labels.append(f"{state}, {situation}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.set_title("Loading, until every byte was used")
    axes.legend(fontsize=8, loc="lower right")
    _plain(axes)


def _reads(axes: Any, states: dict[str, Any]) -> None:
    """The rates of verify beside those of raw reads."""
    labels: list[str] = []
    for state, figures in states.items():
        for name, found in figures["reads"].items():
            if found["median"] == found["median"]:  # nan: the file system has no O_DIRECT
                rate = figures["nbytes"] / found["median"] / 1e9
                axes.barh(len(labels), rate, color=COLOURS[-1 if name == "verify" else 0])
                labels.append(f"{state}: {name}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.set_title("Reading every byte from the disk")
    _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(arguments: list[str]) -> int:
    """Draws each JSON named; 2 where one cannot be read or drawn."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for name in arguments:
        try:
            document = json.loads(Path(name).read_text())
            drawn = beside(Path(name), document)
        except (OSError, ValueError, KeyError) as error:
            print(f"pictures.py: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            drawn = None
        status = status if drawn else 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
