"""The CPUs of the process, which an OpenMP runtime may have taken from its main thread.

With OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY the runtime binds the main thread to one
*place*. That is OpenMP's word for a set of CPUs, often a single core. libgomp does so while torch
is imported, other runtimes at the first parallel region. Each thread started later inherits the
place, so our threads would share one core with the training. They get the CPUs that the process had
before the binding:

- If the main thread had more CPUs when this module was imported, our threads get those.
- Otherwise the runtime knows how many CPUs the process had. If all its places together have that
  number of CPUs, our threads get them. If not, our threads get all CPUs that the system grants,
  provided that their number is right.

If the main thread's CPUs are not a place, the program has set them itself (`os.sched_setaffinity`,
`taskset -p`). Our threads then inherit them, as they do without a runtime.
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

# The path of a runtime's library (GNU, Intel or LLVM) in a line of /proc/self/maps.
_RUNTIME = re.compile(r"/.*/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


class Runtime(NamedTuple):
    """The answers of an OpenMP runtime.

    Attributes:
        places: The sets of CPUs that the runtime binds threads to; empty if it binds none.
        number: How many CPUs the process had when the runtime was loaded.
    """

    places: list[set[int]]
    number: int


class Cpus(NamedTuple):
    """Where threads may run: sets of CPU numbers.

    Attributes:
        main: The CPUs of the main thread.
        ours: The CPUs for stillframe's threads.
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
        None if no runtime bound the main thread, or if the CPUs cannot be found out.
    """
    binding = [each for each in runtimes if main in each.places]
    if not binding:
        return None
    if main != first:
        return first if main < first else None  # if it has other CPUs, the program has set them
    # A runtime that was loaded after the main thread had been bound has counted only the CPUs of
    # that place. So the largest number is right.
    runtime = max(binding, key=lambda each: each.number)
    listed = set().union(*runtime.places)
    if runtime.number <= len(main):
        return None  # the process had no CPUs but these
    if len(listed) == runtime.number:
        return listed
    if len(found := granted()) == runtime.number:
        return found
    # A user may have listed only some of the process's CPUs as places. If more are listed than the
    # process had, some of them belong to others.
    return listed if len(listed) < runtime.number else None


def inspect() -> Cpus:
    """Return where threads may run, judging by the process as it is now."""
    main = _of_main_thread()
    before = None
    if len(main) < os.sysconf("SC_NPROCESSORS_ONLN"):  # otherwise it has all CPUs
        before = before_binding(main, _first, _runtimes(), _granted)
    return Cpus(main, before or main, before is not None)


def spread() -> None:
    """Find the CPUs of the process. The threads that the core starts from now on run on them, and
    `spread_thread` uses them."""
    global _known
    with contextlib.suppress(OSError):  # in a sandbox that forbids it, threads inherit the CPUs
        if _known is None or _known.main != _of_main_thread():
            _known = inspect()
            _core.set_cpus(tuple(_known.ours if _known.bound else ()))


def count() -> int:
    """Return how many CPUs the core's threads may run on, as `spread` found."""
    if _known is not None:
        return len(_known.ours)
    with contextlib.suppress(OSError):  # a sandbox forbids the question
        return len(_of_main_thread())
    return 1


def spread_thread(thread: threading.Thread) -> None:
    """Move a running thread of ours to the CPUs that `spread` found."""
    if _known is not None and _known.bound and thread.native_id is not None:
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it
            os.sched_setaffinity(thread.native_id, _known.ours)


def _of_main_thread() -> set[int]:
    return os.sched_getaffinity(os.getpid())  # the process's id is that of its main thread


def _runtimes() -> list[Runtime]:
    """Return all OpenMP runtimes that this process has loaded."""
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
    """Return the answers of a runtime's library; AttributeError if it lacks a function."""
    places = []
    for number in range(library.omp_get_num_places()):
        ids = (ctypes.c_int * library.omp_get_place_num_procs(number))()
        library.omp_get_place_proc_ids(number, ids)
        places.append(set(ids))
    return Runtime(places, library.omp_get_num_procs())


def _granted() -> set[int]:
    """Return the CPUs that a thread gets if it asks for all. The system leaves out those that this
    container may not use. A new thread asks, because the answer becomes its own mask."""
    found: set[int] = set()

    def ask() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
            found.update(os.sched_getaffinity(0))

    asking = threading.Thread(target=ask, daemon=True)
    try:
        asking.start()
        asking.join()
    except RuntimeError:  # the system refused to start the thread
        pass
    return found


_first: set[int] = _of_main_thread()  # at the import of this module
_known: Cpus | None = None  # the last result of inspect()
