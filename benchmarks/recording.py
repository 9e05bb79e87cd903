"""Records the demo in a terminal, as the animated SVG of the quick start: `make recording`.

    python benchmarks/recording.py --out docs/assets/demo.svg [--size 300MB] [--steps N]

The demo runs in a pseudo-terminal, as for any user. A terminal emulator (pyte) turns its output
into screens, and one animated SVG shows them, faster than in reality. Without animation, or for
readers who prefer none, the SVG shows the last screen. Only the time is edited: the words and
figures are those of the run.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import NamedTuple

DEMO = Path(__file__).parents[1] / "examples/demo/demo.py"
COLUMNS, ROWS = 100, 70  # rows that stay empty are cut off
SHOWN_S = 12.0  # length of the animation
FRAMES_PER_S = 10
GLYPH, LINE, MARGIN = 8.4, 19, 18  # pixels: a letter's width, a line's height, the margin's width
BACKGROUND, FOREGROUND, DIM = "#1e2227", "#d5dae0", "#8a929c"
COLOURS = {
    "black": "#3b4048",
    "red": "#e0626c",
    "green": "#8fbf73",
    "brown": "#d9b26a",
    "blue": "#6ab0f3",
    "magenta": "#c58ade",
    "cyan": "#62c0ca",
    "white": "#d5dae0",
}
STYLE = """\
text{font:14px ui-monospace,Menlo,Consolas,'Liberation Mono',monospace;white-space:pre}
.b{font-weight:bold}
@keyframes shown{from,to{visibility:visible}}
@keyframes hidden{from,to{visibility:hidden}}
@media (prefers-reduced-motion:reduce){*{animation:none!important}}"""


class Run(NamedTuple):
    """Adjacent letters of a line that have the same style; the first is in `column`."""

    column: int
    text: str
    colour: str
    bold: bool


Line = tuple[Run, ...]
Screen = dict[int, Line]  # rows that are not empty


def record(command: list[str]) -> tuple[list[tuple[float, Screen]], float]:
    """Run the command in a pseudo-terminal.

    Returns:
        Each screen with the seconds after which it appeared, and how long the command took.

    Raises:
        SystemExit: The command failed.
    """
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    terminal_fd, command_fd = pty.openpty()  # the two ends of the pseudo-terminal
    fcntl.ioctl(command_fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=command_fd,
        stdout=command_fd,
        stderr=command_fd,
        env=environment,
        close_fds=True,
    )
    os.close(command_fd)
    screens: list[tuple[float, Screen]] = []
    while True:
        ready, _, _ = select.select([terminal_fd], [], [], 0.05)
        try:
            written = os.read(terminal_fd, 1 << 16) if ready else b""
        except OSError:  # the terminal's other end is closed: the command has ended
            break
        if written:
            stream.feed(written)
            sys.stderr.buffer.write(written)
            sys.stderr.buffer.flush()
            screens.append((time.monotonic() - started, _read_screen(screen)))
    os.close(terminal_fd)
    status = process.wait()
    if status != 0:
        sys.exit(f"recording.py: the command ended with status {status}")
    return screens, time.monotonic() - started


def _read_screen(screen: object) -> Screen:
    """Return the present rows of a pyte.Screen, without those that are empty."""
    found: Screen = {}
    for row in range(ROWS):
        line = _line(screen.buffer[row])  # type: ignore[attr-defined]
        if line:
            found[row] = line
    return found


def _line(cells: dict[int, object]) -> Line:
    """Return the runs of a row. A single space between letters of one style belongs to the run."""
    runs: list[Run] = []
    for column in range(COLUMNS):
        cell = cells[column]
        if cell.data == " ":  # type: ignore[attr-defined]
            continue
        style = (_colour(cell.fg), cell.bold)  # type: ignore[attr-defined]
        if runs:
            last = runs[-1]
            nr_spaces = column - (last.column + len(last.text))
            if (last.colour, last.bold) == style and nr_spaces <= 1:
                text = last.text + " " * nr_spaces + cell.data  # type: ignore[attr-defined]
                runs[-1] = last._replace(text=text)
                continue
        runs.append(Run(column, cell.data, *style))  # type: ignore[attr-defined]
    return tuple(runs)


def _colour(name: str) -> str:
    """Return the colour in CSS for pyte's name, which may also be six hexadecimal digits."""
    if name == "default":
        return FOREGROUND
    other = f"#{name}" if len(name) == 6 else FOREGROUND
    return COLOURS.get(name.removeprefix("bright"), other)


# ---- the picture ---------------------------------------------------------------------------------


def svg_of(screens: list[tuple[float, Screen]], seconds: float, typed: str) -> str:
    """Return the SVG that shows `screens`, the output of a command that took `seconds`.

    A line of text is in it once for each span of time in which it is visible.

    Args:
        typed: The command line, which is shown above.
    """
    last = screens[-1][1]
    rows = 2 + max(row for _, screen in screens for row in screen)
    width, height = COLUMNS * GLYPH + 2 * MARGIN, (rows + 1) * LINE + 2 * MARGIN
    speed = SHOWN_S / seconds
    shown = [
        _text(0, (Run(0, "$ ", DIM, False), Run(2, typed, FOREGROUND, True)), ""),
        _text(rows, (Run(0, f"{seconds:.0f} s, shown in {SHOWN_S:.0f}", DIM, False),), ""),
    ]
    for row in range(rows):
        for line, begin, end in _stretches(screens, row, speed):
            if not line:
                continue
            # A line of the last screen is visible without animation, and hidden until it appears.
            # Any other line is hidden without animation, and shown while it was on the screen.
            is_on_last_screen = end is None and line == last.get(row)
            if is_on_last_screen:
                css = f"animation:hidden {begin:.1f}s" if begin else ""
            else:
                assert end is not None
                css = f"visibility:hidden;animation:shown {end - begin:.1f}s {begin:.1f}s"
            shown.append(_text(row + 1, line, css))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
            f' viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{html.escape(typed)}, recorded in a terminal</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
            *shown,
            "</svg>\n",
        ]
    )


def _stretches(
    screens: list[tuple[float, Screen]], row: int, speed: float
) -> list[tuple[Line, float, float | None]]:
    """Return (content, begin, end) for each span of time in which a row has one content.

    Times are seconds of the animation, rounded down to a frame. None as the end means the end of
    the animation.

    Args:
        speed: Seconds of the animation for each second of `screens`.
    """
    stretches: list[tuple[Line, float, float | None]] = []
    for at, screen in screens:
        line = screen.get(row, ())
        now = int(at * speed * FRAMES_PER_S) / FRAMES_PER_S
        if stretches:
            last_line, begin, _ = stretches[-1]
            if last_line == line:
                continue
            stretches[-1] = (last_line, begin, now)
        stretches.append((line, now, None))
    # If a row changes several times within a frame, only the last content is visible.
    return [(line, begin, end) for line, begin, end in stretches if begin != end]


def _text(row: int, line: Line, css: str) -> str:
    """Return the SVG element of one line in `row`; `css` is its style, or ""."""
    y = MARGIN + (row + 0.75) * LINE
    style = f' style="{css}"' if css else ""
    return f'<text y="{y:.1f}"{style}>{"".join(map(_span, line))}</text>'


def _span(run: Run) -> str:
    weight = ' class="b"' if run.bold else ""
    return (
        f'<tspan x="{MARGIN + run.column * GLYPH:.1f}" textLength="{len(run.text) * GLYPH:.1f}"'
        f' fill="{run.colour}"{weight}>{html.escape(run.text, quote=False)}</tspan>'
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the SVG")
    parser.add_argument("--size", help="bytes of the demo's checkpoints (default: the demo's)")
    parser.add_argument("--steps", help="steps of each of its runs (default: the demo's)")
    options = parser.parse_args()
    arguments = []
    if options.size:
        arguments.append(f"--size={options.size}")
    if options.steps:
        arguments.append(f"--steps={options.steps}")
    screens, seconds = record([sys.executable, str(DEMO), *arguments])
    typed = "make demo"
    if arguments:
        typed += f" ARGS='{' '.join(arguments)}'"
    options.out.write_text(svg_of(screens, seconds, typed))
    print(f"{options.out}: {len(screens)} screens", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
