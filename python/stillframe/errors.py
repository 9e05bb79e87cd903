"""The errors of stillframe, all subclasses of `StillframeError`."""

from __future__ import annotations

from collections.abc import Sequence


class StillframeError(Exception):
    """The base of all errors that stillframe itself raises."""


class SaveError(StillframeError, OSError):
    """The operating system refused a step of a save. The file at the path is the old one.

    Attributes:
        errno: The system's error number.
        filename: The path as it was given.
        phase: The step that failed: "open", "lock", "allocate", "write", "sync", "rename", "sync
            directory", "stage", or "link" for a `last.ckpt` that is a link. If "sync directory"
            failed, the new file is complete and in place, but may not be durable.
    """

    def __init__(self, errno: int, strerror: str, filename: str, phase: str) -> None:
        super().__init__(errno, strerror, filename)
        self.phase = phase

    def __str__(self) -> str:
        return f"{super().__str__()} (while the save was in phase {self.phase!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror, self.filename, self.phase)


class TornSnapshotError(StillframeError):
    """A tensor changed between the call and its copy, outside the optimizer's step. The copy is
    *torn*: it may mix bytes from before and after the change. The old file is untouched.

    Attributes:
        tensors: Names of the tensors that share the changed storage.
    """

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.tensors)


class PoolExhaustedError(StillframeError):
    """Snapshots that the caller holds fill the pool. The call did not wait, because only the caller
    can free that memory."""


class BusyError(StillframeError):
    """`max_in_flight` saves are under way and the engine was told not to wait
    (`when_busy="raise"`)."""


class ForkError(StillframeError):
    """The engine, handle or snapshot was made before `fork()` and belongs to the parent process."""


class CorruptCheckpointError(StillframeError):
    """The file is truncated, empty, damaged, or not a PyTorch checkpoint."""
