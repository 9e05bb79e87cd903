"""Sends the files that other libraries save to an open `stillframe.checkpoint`.

Hugging Face's libraries write a checkpoint with `torch.save` and with safetensors' `save_file`. A
block of `redirect_saves_to` replaces both functions. A call with a path in the checkpoint's
directory goes to stillframe. Every other call, in any thread, goes to the original function.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

# Where the libraries look up the functions: (module, attribute).
_NAMES = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("peft.utils.save_and_load", "safe_save_file"),
)

_SAFETENSORS = ".safetensors"


class Files(Protocol):
    """An open `stillframe.checkpoint`."""

    @property
    def path(self) -> str | os.PathLike[str]: ...

    def save(self, obj: object, name: str) -> object: ...

    def save_safetensors(
        self, tensors: Any, name: str, metadata: dict[str, str] | None = None
    ) -> object: ...


class _SaveRedirection:
    """The open checkpoints that get files, and the functions that were replaced."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # (real path, checkpoint) for each block. Calls read this tuple without the lock, so `open`
        # and `close` replace it.
        self.open_checkpoints: tuple[tuple[str, Files], ...] = ()
        # For each replaced function: module, attribute, original function, our function.
        self.replaced: list[tuple[Any, str, Any, Any]] = []

    def open(self, files: Files) -> tuple[str, Files]:
        """Add an entry for `files`, and return it for `close`. The first replaces the functions."""
        entry = os.path.realpath(files.path), files
        with self.lock:
            self.open_checkpoints = (*self.open_checkpoints, entry)
            if len(self.open_checkpoints) == 1:
                self._replace_save_functions()
        return entry

    def close(self, entry: tuple[str, Files]) -> None:
        """Remove an entry. The last one restores the functions."""
        with self.lock:
            self.open_checkpoints = tuple(e for e in self.open_checkpoints if e is not entry)
            if not self.open_checkpoints:
                self._restore()

    def find(self, path: Any) -> tuple[Files, str] | None:
        """Return the checkpoint that `path` is in, and the file's name there. Otherwise None."""
        if not isinstance(path, str | os.PathLike):
            return None
        # Resolve links in the directory only, because the file may be a link that is replaced.
        parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        file = os.path.join(os.path.realpath(parent), name)
        for directory, files in self.open_checkpoints:
            if file.startswith(directory + os.sep):
                return files, os.path.relpath(file, directory)
        return None

    def _replace_save_functions(self) -> None:
        for module_name, name in _NAMES:
            module = sys.modules.get(module_name)
            original = getattr(module, name, None)
            if original is not None:
                ours = _save(original) if name == "save" else _wrap_save_file(original)
                self.replaced.append((module, name, original, ours))
                setattr(module, name, ours)

    def _restore(self) -> None:
        while self.replaced:
            module, name, original, ours = self.replaced.pop()
            # If other code has wrapped our function, the wrapper has to stay.
            if getattr(module, name) is ours:
                setattr(module, name, original)


_redirection = _SaveRedirection()


@contextlib.contextmanager
def redirect_saves_to(files: Files) -> Iterator[None]:
    """Send `torch.save` and safetensors' `save_file` to `files` for paths in its directory."""
    entry = _redirection.open(files)
    try:
        yield
    finally:
        _redirection.close(entry)


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `torch.save` that writes files of open checkpoints through stillframe.

    A call with more arguments, such as the pickle module, goes to torch's own writer.
    """

    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
        found = None if args or kwargs else _redirection.find(f)
        if found is not None:
            files, name = found
            if not name.endswith(_SAFETENSORS):  # torch decides about a pickle of such a name
                files.save(obj, name)
                return None
        return original(obj, f, *args, **kwargs)

    return save


def _wrap_save_file(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `save_file` that writes files of open checkpoints through stillframe.

    A call with arguments that are unknown here goes to the original function.
    """

    @functools.wraps(original)
    def save_file(
        tensors: Any,
        filename: Any,
        metadata: dict[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = None if args or kwargs else _redirection.find(filename)
        if found is not None:
            files, name = found
            if name.endswith(_SAFETENSORS):
                files.save_safetensors(tensors, name, metadata)
                return None
        return original(tensors, filename, metadata, *args, **kwargs)

    return save_file


def _reset_in_forked_child() -> None:
    """In a forked child, forget the open checkpoints, whose files belong to the parent."""
    global _redirection
    inherited, _redirection = _redirection, _SaveRedirection()
    inherited.open_checkpoints = ()
    inherited._restore()


os.register_at_fork(after_in_child=_reset_in_forked_child)
