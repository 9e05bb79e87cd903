"""Nested calls and garbage collection during a call, also after an interrupt at any moment."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from stillframe._base import calls as _depth
from stillframe._base.calls import inside_call, no_garbage_collection


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    was = gc.isenabled()
    gc.enable()
    yield
    sys.settrace(None)
    gc.enable()
    if not was:
        gc.disable()


class BeforeLine:
    """Raise KeyboardInterrupt before the nth line that runs in `code` or in _depth."""

    def __init__(self, number: int, code: Any) -> None:
        self.left = number
        self.code = code

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not self.code and frame.f_code.co_filename != _depth.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted_everywhere(function: Any) -> int:
    """Run a function once for each line at which it can be interrupted; return their number."""
    number = 0
    while True:
        number += 1
        line = BeforeLine(number, function.__code__)
        sys.settrace(line)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if line.left > 0:
            return number - 1
        with inside_call() as nested:
            assert not nested, f"line {number}"
        with no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled(), f"line {number}"


def test_interrupted_call_is_no_longer_counted():
    def call() -> None:
        with inside_call() as nested:
            assert not nested
            str(nested)

    assert interrupted_everywhere(call) >= 8


def test_garbage_collection_is_enabled_again_after_an_interrupt():
    def call() -> None:
        with no_garbage_collection():
            str(gc.isenabled())

    assert interrupted_everywhere(call) >= 8


def test_call_inside_another_counts_as_nested_and_a_later_one_does_not():
    def inner() -> bool:
        with inside_call() as nested:
            return nested

    assert not inner()
    with inside_call() as outer:
        assert not outer
        assert inner()
        with inside_call() as same_frame:
            assert same_frame
        assert inner()
    assert not inner()
    assert _depth._frames.calls == []


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_restored_after_a_call(was_on):
    if not was_on:
        gc.disable()
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == was_on
    assert _depth._frames.no_garbage_collection == []
