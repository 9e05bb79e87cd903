"""The CPUs of our threads, where an OpenMP runtime has bound the main thread to few of them.

With OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY the runtime binds the main thread to one
*place*: OpenMP's word for a set of CPUs, often a single core. Threads started later inherit the
place, so our threads would share that core with the training. Instead they get the first of these
sets that fits:

- the CPUs that the main thread had when this module was imported, if they were more;
- all places of the runtime, if they have as many CPUs as the runtime has counted at its start;
- all CPUs that the system grants, if their number is the one that the runtime has counted.

If the main thread's CPUs are not a place, the program has chosen them itself, for instance with
`taskset`. Our threads then inherit them.
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


class OpenMPRuntime(NamedTuple):
    """The report of an OpenMP runtime."""

    places: list[set[int]]  # the sets of CPUs that it binds threads to; empty if it binds none
    nr_cpus: int  # how many CPUs the process had when the runtime was loaded


class Cpus(NamedTuple):
    """Where threads may run: sets of CPU numbers."""

    main: set[int]  # for the main thread
    ours: set[int]  # for stillframe's threads
    bound: bool  # an OpenMP runtime has bound the main thread


def cpus_before_binding(
    main: set[int],
    first: set[int],
    runtimes: list[OpenMPRuntime],
    granted: Callable[[], set[int]],
) -> set[int] | None:
    """Return the CPUs that the process had before a runtime bound its main thread.

    Args:
        main: The CPUs of the main thread now.
        first: The CPUs of the main thread when the package was imported.
        runtimes: All OpenMP runtimes that are loaded.
        granted: Returns the CPUs that the system gives to a thread that asks for all.

    Returns:
        The CPUs; None if no runtime bound the main thread, or if the CPUs are unknown.
    """
    binding_runtimes = [each for each in runtimes if main in each.places]
    if not binding_runtimes:
        return None
    if main != first:
        was_narrowed = main < first  # to a part of the first CPUs; else the program chose others
        return first if was_narrowed else None
    runtime = max(binding_runtimes, key=lambda each: each.nr_cpus)
    if runtime.nr_cpus <= len(main):
        return None  # it was loaded after the binding, and has counted one place's CPUs only
    cpus_of_places = set().union(*runtime.places)
    if len(cpus_of_places) == runtime.nr_cpus:
        return cpus_of_places
    granted_cpus = granted()
    if len(granted_cpus) == runtime.nr_cpus:
        return granted_cpus
    # So the user has listed the places. They may have fewer CPUs than the process had. If they
    # have more, some belong to other processes, and the process's own CPUs are unknown (None).
    return cpus_of_places if len(cpus_of_places) < runtime.nr_cpus else None


def inspect() -> Cpus:
    """Return where threads may run now."""
    main = _cpus_of_main_thread()
    before = None
    has_all_cpus = len(main) >= os.sysconf("SC_NPROCESSORS_ONLN")
    if not has_all_cpus:
        before = cpus_before_binding(main, _first, _loaded_openmp_runtimes(), _granted_cpus)
    return Cpus(main=main, ours=before or main, bound=before is not None)


def spread() -> None:
    """Find the CPUs for our threads. The core starts its threads on these CPUs from now on."""
    global _known
    with contextlib.suppress(OSError):  # a sandbox forbids it; threads inherit the CPUs
        if _known is None or _known.main != _cpus_of_main_thread():
            _known = inspect()
            # With (), the core's threads inherit the CPUs.
            _core.set_cpus(tuple(_known.ours) if _known.bound else ())


def count() -> int:
    """Return how many CPUs the core's threads may run on, as `spread` found."""
    if _known is not None:
        return len(_known.ours)
    with contextlib.suppress(OSError):  # a sandbox forbids it
        return len(_cpus_of_main_thread())
    return 1


def spread_thread(thread: threading.Thread) -> None:
    """Move a running thread of ours to the CPUs that `spread` found."""
    if _known is not None and _known.bound and thread.native_id is not None:
        with contextlib.suppress(OSError):  # the thread has ended, or a sandbox forbids it
            os.sched_setaffinity(thread.native_id, _known.ours)


def _cpus_of_main_thread() -> set[int]:
    return os.sched_getaffinity(os.getpid())  # the process's id is that of its main thread


def _loaded_openmp_runtimes() -> list[OpenMPRuntime]:
    """Return all OpenMP runtimes that this process has loaded."""
    paths = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if match := _RUNTIME.search(line):
                paths.add(match[0])
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError, AttributeError):  # not a runtime, or an old one
            found.append(_query_openmp_runtime(ctypes.CDLL(path)))
    return found


def _query_openmp_runtime(library: ctypes.CDLL) -> OpenMPRuntime:
    """Return what a runtime's library reports. Raise AttributeError if it lacks a function."""
    places = []
    for number in range(library.omp_get_num_places()):
        ids = (ctypes.c_int * library.omp_get_place_num_procs(number))()
        library.omp_get_place_proc_ids(number, ids)
        places.append(set(ids))
    return OpenMPRuntime(places, library.omp_get_num_procs())


def _granted_cpus() -> set[int]:
    """Return the CPUs that a thread gets if it asks for all. The system leaves out CPUs that this
    container may not use."""
    found: set[int] = set()

    def ask() -> None:  # on a new thread, because it changes the thread's CPUs
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


_first: set[int] = _cpus_of_main_thread()  # at the import of this module
_known: Cpus | None = None  # the last result of `inspect`
