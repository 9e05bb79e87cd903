"""The CPUs of the process, which an OpenMP runtime may have taken from its main thread.

With OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY the runtime binds the main thread to one place,
often a single core: libgomp does so while torch is imported, others at the first parallel region.
Each thread started later inherits that place. Threads of ours would then share one core with the
training. So they get what the process had before:

- A mask that is wider when this module is imported than the place is that mask.
- Otherwise the runtime knows how many CPUs the process had. They are those of all its places, or
  all that the system grants, if the number fits.

A mask that the program sets itself afterwards (`os.sched_setaffinity`, `taskset -p`) differs from
the place. Then threads inherit, as they do without a runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stillframe import _core

_RUNTIME = re.compile(r"/.*/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


class Runtime(NamedTuple):
    """The answers of an OpenMP runtime.

    Attributes:
        places: The sets of CPUs that it binds threads to; empty if it binds none.
        number: How many CPUs the process had when the runtime was loaded.
    """

    places: list[set[int]]
    number: int


class Cpus(NamedTuple):
    """Where threads may run.

    Attributes:
        main: The main thread.
        ours: Threads of stillframe.
        bound: An OpenMP runtime bound the main thread.
    """

    main: set[int]
    ours: set[int]
    bound: bool


def before_binding(
    main: set[int],
    first: set[int],
    runtimes: list[Runtime],
    granted: Callable[[], set[int]],
) -> set[int] | None:
    """Return the CPUs the process had before a runtime bound its main thread.

    Args:
        main: The CPUs of the main thread now.
        first: The CPUs that it had when the package was imported.
        runtimes: All OpenMP runtimes that are loaded.
        granted: Returns the CPUs that the system gives to a thread that asks for all.

    Returns:
        None if no runtime bound it, or if the CPUs cannot be found out.
    """
    binding = [each for each in runtimes if main in each.places]
    if not binding:
        return None
    if main != first:
        return first if main < first else None  # the program set another mask
    # A runtime that was loaded later has counted only the place that an earlier one had bound us
    # to.
    runtime = max(binding, key=lambda each: each.number)
    listed = set().union(*runtime.places)
    if runtime.number <= len(main):
        return None
    if len(listed) == runtime.number:
        return listed
    if len(found := granted()) == runtime.number:
        return found
    return listed if len(listed) < runtime.number else None


def inspect() -> Cpus:
    """Return where threads may run, judging by the process as it is now."""
    main = _of_main_thread()
    wide = None
    if len(main) < os.sysconf("SC_NPROCESSORS_ONLN"):
        wide = before_binding(main, _first, _runtimes(), _granted)
    return Cpus(main, wide or main, wide is not None)


def spread() -> None:
    """Have threads that the core and `spread_thread` start run on all CPUs of the process."""
    global _known
    with contextlib.suppress(OSError):  # a sandbox: threads inherit
        if _known is None or _known.main != _of_main_thread():
            _known = inspect()
            _core.set_cpus(tuple(_known.ours if _known.bound else ()))


def count() -> int:
    """Return how many CPUs threads of the core run on, as `spread` found them."""
    if _known is not None:
        return len(_known.ours)
    with contextlib.suppress(OSError):  # a sandbox
        return len(_of_main_thread())
    return 1


def spread_thread(thread: threading.Thread) -> None:
    """Move a running thread of ours to the CPUs that `spread` found."""
    if _known is not None and _known.bound and thread.native_id is not None:
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it
            os.sched_setaffinity(thread.native_id, _known.ours)


def _of_main_thread() -> set[int]:
    return os.sched_getaffinity(os.getpid())


def _runtimes() -> list[Runtime]:
    paths = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if match := _RUNTIME.search(line):
                paths.add(match[0])
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError, AttributeError):  # not a runtime, or an old one
            found.append(_ask(ctypes.CDLL(path)))
    return found


def _ask(library: ctypes.CDLL) -> Runtime:
    places = []
    for number in range(library.omp_get_num_places()):
        ids = (ctypes.c_int * library.omp_get_place_num_procs(number))()
        library.omp_get_place_proc_ids(number, ids)
        places.append(set(ids))
    return Runtime(places, library.omp_get_num_procs())


def _granted() -> set[int]:
    """The CPUs of a thread that asks for all: the system leaves out those of other containers."""
    found: set[int] = set()

    def ask() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
            found.update(os.sched_getaffinity(0))

    asking = threading.Thread(target=ask, daemon=True)
    try:
        asking.start()
        asking.join()
    except RuntimeError:  # no thread to be had
        pass
    return found


_first: set[int] = _of_main_thread()
_known: Cpus | None = None  # the last result of inspect()
