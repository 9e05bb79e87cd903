"""A Python that has imported large modules, and forks a process for each program to run.

    python warm_python.py SOCKET MODULE ...

Importing torch takes two seconds of processor time, and Lightning six. A process that is forked
here begins with the modules, runs a program as `python` would, and ends as a Python process ends:
with its exit handlers and the interpreter's finalisation. `fix_processes.py` sends requests to
the socket: a JSON object, with the descriptors of stdin, stdout and stderr. The answer is the
number of the new process, whose parent is the sender: see `fork`.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import socket
import sys
import time
import types
from typing import Any

MOST_BYTES = 1 << 20  # of a request


def fork() -> int:
    """Fork a process whose parent is the nearest subreaper above this process.

    Returns:
        The number of the new process; 0 in it.
    """
    reads, writes = os.pipe()
    between = os.fork()
    if between:
        os.close(writes)
        os.waitpid(between, 0)
        number = int(os.read(reads, 20))
        os.close(reads)
        return number
    between = os.getpid()
    number = os.fork()
    if number:
        os.write(writes, b"%d" % number)
        os._exit(0)
    os.close(reads)
    os.close(writes)
    while os.getppid() == between:  # until the process in between has ended
        time.sleep(0.0005)
    return 0


def serve(server: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Returns in these processes, with the request. Exits when the
    sender has closed its end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(server, MOST_BYTES, 3)
        if not data:
            os._exit(0)
        if number := fork():
            for each in descriptors:
                os.close(each)
            server.send(b"%d" % number)
            continue
        server.close()
        for target, each in enumerate(descriptors):
            os.dup2(each, target)
            os.close(each)
        return json.loads(data)


def new_stream(old: io.TextIOWrapper, descriptor: int) -> io.TextIOWrapper:
    """Return a standard stream like `old` for another file: the old one may know, for example, that
    its file can seek."""
    mode = "wb" if descriptor else "rb"
    buffer = os.fdopen(descriptor, mode, 0 if old.write_through else -1, closefd=False)
    return io.TextIOWrapper(
        buffer,
        old.encoding,
        old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


def become(request: dict[str, Any]) -> types.CodeType:
    """Make this process look as if Python had just been started for the request, except for the
    modules that it has. Return the program's code."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.stdin = sys.__stdin__ = new_stream(sys.stdin, 0)
    sys.stdout = sys.__stdout__ = new_stream(sys.stdout, 1)
    sys.stderr = sys.__stderr__ = new_stream(sys.stderr, 2)
    kind, *arguments = request["arguments"]
    main = types.ModuleType("__main__")
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    if kind == "-c":
        program, *arguments = arguments
        sys.argv, first, name = ["-c", *arguments], "", "<string>"
    elif kind == "-m":
        module, *arguments = arguments
        sys.argv, first, name = [module, *arguments], os.getcwd(), "<string>"
        program = f"__import__('runpy')._run_module_as_main({module!r})"  # as `python -m` does
    else:
        sys.argv, first, name = [kind, *arguments], os.path.dirname(os.path.abspath(kind)), kind
        main.__file__, main.__cached__ = kind, None
        with open(kind, encoding="utf-8") as file:
            program = file.read()
    path = [each for each in request["env"].get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [first, *path, *PATH]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    return compile(program, name, "exec")


if __name__ == "__main__":
    given = {os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    PATH = [each for each in sys.path[1:] if each not in given]
    for each in sys.argv[2:]:
        importlib.import_module(each)
    gc.freeze()  # a collection in a forked process does not write to the modules' memory
    code = become(serve(socket.socket(fileno=int(sys.argv[1]))))
    # The last statement, so that the program ends as the main program of a process does.
    exec(code, vars(sys.modules["__main__"]))
