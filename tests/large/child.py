"""One save of `large.py`, or loads of one file one after the other, in a process of its own.

    python child.py SAVING STATE DIVISOR LIMIT PATH [LOADING ...]

Without LOADING it saves. It prints a line of JSON for each case: `wrong` (a sentence, "" if the
result is right) or `error`, `seconds` and `peak_nbytes`. If a case takes LIMIT seconds, the process
prints the stack of each thread and ends. DIVISOR divides the sizes of all tensors; above one it
also lowers the size thresholds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import states
import ways


def peak_nbytes() -> int:
    """Return the most bytes that were resident, the pages of mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def report(limit: float, case: Callable[[], str]) -> None:
    """Run one case and print its outcome."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = time.monotonic()
    faulthandler.dump_traceback_later(limit, exit=True)
    found: dict[str, object] = {}
    try:
        found["wrong"] = case()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    faulthandler.cancel_dump_traceback_later()
    found |= {"seconds": time.monotonic() - start, "peak_nbytes": peak_nbytes()}
    print(json.dumps(found), flush=True)


def save(saving: str, state: states.State, path: str) -> str:
    """Make the state and save it; return what is wrong, or ""."""
    try:
        ways.SAVES[saving](states.make(state), path, state)
    except ways.WrongError as wrong:
        return str(wrong)
    return ""


def thresholds(divisor: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which small states cross the thresholds that large ones do."""
    if divisor == 1:
        return contextlib.nullcontext()
    sys.path.append(str(Path(__file__).parents[1] / "unit"))
    lowered: contextlib.AbstractContextManager[None] = importlib.import_module(
        "fix_limits"
    ).lowered()
    return lowered


def main() -> None:
    saving, name, divisor, limit, path, *loadings = sys.argv[1:]
    state = states.STATES[name].scaled(int(divisor))
    loads = ways.table_of(saving)
    ways.quiet()
    with thresholds(int(divisor)):
        if not loadings:
            report(float(limit), functools.partial(save, saving, state, path))
        for loading in loadings:
            report(float(limit), functools.partial(loads[loading], path, state))


if __name__ == "__main__":
    main()
