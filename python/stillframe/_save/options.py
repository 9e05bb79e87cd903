"""The options of engines and saves, with their types and checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, get_args

from stillframe import _core
from stillframe._base import cpus, safetensors, sizes
from stillframe._base.arguments import check_booleans
from stillframe._remote.mirror import MirrorUpload
from stillframe._save.report import SaveReport

WhenBusy = Literal["wait", "skip", "raise"]
Format = Literal["torch", "safetensors"]
OnDurable = Callable[[Any, SaveReport], object]  # gets the path as the user gave it, and the report
Size = int | str

DEFAULT_BLOCK = 16 << 20  # bytes
DEFAULT_IN_FLIGHT = 2  # saves
_DEFAULT_WRITERS = 2  # threads
_POOL_VARIABLE = "STILLFRAME_POOL_BYTES"  # the environment variable with the pool's cap
_PAGE = 4096  # bytes; a block is a multiple of it

# The largest values of options. A larger value is a mistake, and would overflow in the core.
_MOST_BLOCKS = 1 << 28
_MOST_WRITERS = 256
_MOST_IN_FLIGHT = 1 << 16

_MOST_COPIERS = 7  # more threads do not make a copy faster


class EngineOptions(TypedDict, total=False):
    """The options of `Engine`, as `configure` takes them."""

    pool_bytes: Size | None
    block_bytes: Size
    writer_threads: int | None
    max_in_flight: int
    when_busy: WhenBusy
    shared_memory: bool


class EngineStats(TypedDict):
    """The figures that `Engine.stats` returns and explains."""

    pool_bytes: int
    block_bytes: int
    committed_bytes: int
    leased_bytes: int
    retired_bytes: int
    saves_in_flight: int
    saves_total: int
    driver: str


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's options after the checks; `Engine` explains them.

    Attributes:
        pool_bytes: The cap; 0 if the user has set none.
    """

    pool_bytes: int
    block_bytes: int
    writer_threads: int
    max_in_flight: int
    when_busy: WhenBusy
    shared_memory: bool

    @classmethod
    def of(
        cls,
        pool_bytes: Size | None,
        block_bytes: Size,
        writer_threads: int | None,
        max_in_flight: int,
        when_busy: WhenBusy,
        shared_memory: bool,
    ) -> Limits:
        """Check an engine's options. Raise TypeError or ValueError if one makes no sense."""
        pool, option = _pool_cap_and_its_source(pool_bytes)
        block = sizes.parse(block_bytes, "block_bytes")
        if block % _PAGE:
            raise ValueError(f"block_bytes has to be a multiple of {_PAGE}, not {block_bytes}")
        if pool and pool < block:
            raise ValueError(
                f"{option} ({pool} bytes) is less than one block: give at least block_bytes"
                f" ({block} bytes)"
            )
        if pool // block > _MOST_BLOCKS:
            raise ValueError(
                f"{option} ({pool} bytes) is more than {_MOST_BLOCKS} blocks of {block} bytes: give"
                " larger block_bytes"
            )
        if when_busy not in get_args(WhenBusy):
            raise ValueError(
                f"when_busy has to be one of {', '.join(map(repr, get_args(WhenBusy)))}, not"
                f" {when_busy!r}"
            )
        if not isinstance(shared_memory, bool):
            raise TypeError(f"shared_memory has to be True or False, not {shared_memory!r}")
        writers = _DEFAULT_WRITERS if writer_threads is None else writer_threads
        return cls(
            pool,
            block,
            _checked_count(writers, "writer_threads", _MOST_WRITERS),
            _checked_count(max_in_flight, "max_in_flight", _MOST_IN_FLIGHT),
            when_busy,
            shared_memory,
        )


def nr_copiers() -> int:
    """Return how many threads may help with a large copy: one for each core except the caller's."""
    # The ranks of a machine share its cores. torchrun sets their number.
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(1, int(text)) if text.isdecimal() else 1
    other_cores = cpus.count() // ranks - 1
    return max(0, min(other_cores, _MOST_COPIERS))


def _checked_count(value: object, name: str, most: int) -> int:
    return sizes.bounded(sizes.require_int(value, name), name, 1, most)


def _pool_cap_and_its_source(given: Size | None) -> tuple[int, str]:
    """Return the pool's cap in bytes, and the name of the argument or variable that gave it. The
    cap is 0 if neither is set."""
    if given is not None:
        return sizes.parse(given, "pool_bytes"), "pool_bytes"
    text = os.environ.get(_POOL_VARIABLE, "").strip()
    cap = sizes.parse(text, _POOL_VARIABLE) if text else 0
    return cap, _POOL_VARIABLE


def format_of(path: object) -> Format:
    """Return "safetensors" if a file's name ends in ".safetensors", else "torch"."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    is_flat = isinstance(text, str) and text.endswith(safetensors.SUFFIX)
    return "safetensors" if is_flat else "torch"


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How one save is made.

    Attributes:
        overlap, durable, check_mutation, on_durable: See `async_save`.
        follow_link: Write through a symbolic link rather than replace it.
        create_parents: Make missing parent directories.
        ordered: The save has an entry in the log and takes a slot. Without them, its file is
            renamed as soon as it is synced.
        format, metadata: See `async_save`.
        wait_for_slot: Wait for a slot, whatever the engine's `when_busy` says.
        stream: The bytes are sent to a store (`remote.py`); there is no file.
        shown: The path in messages and the report; None for the path as the user gave it.
        before_launch: Called with the save's handle before the launch.
        mirror: The upload to a mirror that follows the save.
    """

    overlap: bool = True
    durable: bool = True
    check_mutation: bool = False
    on_durable: OnDurable | None = None
    follow_link: bool = True
    create_parents: bool = False
    wait_for_slot: bool = False
    ordered: bool = True
    format: Format = "torch"
    metadata: Mapping[str, str] | None = None
    stream: bool = False
    shown: str | None = None
    before_launch: Callable[[Any], object] | None = None
    mirror: MirrorUpload | None = None

    def __post_init__(self) -> None:
        check_booleans(
            overlap=self.overlap, durable=self.durable, check_mutation=self.check_mutation
        )
        if self.on_durable is not None and not callable(self.on_durable):
            raise TypeError(
                f"on_durable has to be callable, not {type(self.on_durable).__name__}: it is"
                " called as on_durable(path, report)"
            )
        if self.format not in get_args(Format):
            raise ValueError(
                f"format has to be one of {', '.join(map(repr, get_args(Format)))}, not"
                f" {self.format!r}"
            )
        if self.metadata is not None:
            self._check_metadata(self.metadata)

    def _check_metadata(self, metadata: object) -> None:
        if self.format != "safetensors":
            raise ValueError("metadata= is for format='safetensors': put it into the saved object")
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata has to be a dict of strings, not {type(metadata).__name__}")
        for text in (*metadata, *metadata.values()):
            if not isinstance(text, str):
                raise TypeError(f"metadata has to hold strings only, not {type(text).__name__}")

    def for_stream(self, shown: str, before_launch: Callable[[Any], object]) -> SaveOptions:
        """Return these options for the inner save, which stages the bytes of an object."""
        return replace(
            self,
            # Deferred tensors must be adjacent in a stream. Then tensors of a safetensors file may
            # not be aligned, so all of them are copied during the call.
            overlap=self.overlap and self.format == "torch",
            on_durable=None,
            wait_for_slot=True,
            ordered=False,
            stream=True,
            shown=shown,
            before_launch=before_launch,
        )

    def flags(self, *, nested: bool, when_busy: WhenBusy) -> int:
        """Return the core's flags for these options, combined into one number.

        Args:
            nested: The thread is inside another of our calls; see `calls.py`.
            when_busy: The engine's option of this name.
        """
        waits = self.wait_for_slot or when_busy == "wait"
        return (
            (_core.SAVE_DURABLE if self.durable else 0)
            | (_core.SAVE_CHECK_BYTES if self.check_mutation else 0)
            | (_core.SAVE_NESTED if nested else 0)
            | (0 if self.ordered else _core.SAVE_UNORDERED)
            | (_core.SAVE_STREAM if self.stream else 0)
            | (0 if waits else _core.SAVE_NO_WAIT)
        )
