"""`_core.Piece`: bytes of a save that is sent to a store, in memory of the pool."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import stillframe
import torch
from fix_waits import eventually, leased
from stillframe import StillframeError, _core
from stillframe._save.core_save import CoreSave
from stillframe._save.engine import submit
from stillframe._save.options import SaveOptions

MIB = 1 << 20
LONG_S = 60
STATE = {"w": torch.arange(MIB * 5 // 8, dtype=torch.float32), "step": 3}  # 2.5 MiB


@pytest.fixture
def engine() -> Iterator[stillframe.Engine]:
    with stillframe.Engine(pool_bytes=8 * MIB, block_bytes=MIB) as engine:
        yield engine


def stream(engine: stillframe.Engine, before_launch: Any = lambda save: None) -> CoreSave:
    """Start a save whose bytes come out as pieces; the pool has room for all of them."""
    made: list[CoreSave] = []

    def note(save: CoreSave) -> None:
        made.append(save)
        before_launch(save)

    submit(engine, STATE, "memory://a.pt", SaveOptions().for_stream("memory://a.pt", note))
    return made[0]


def rest_of(save: CoreSave) -> list[_core.Piece]:
    """Take all pieces that are left, and the end."""
    pieces = []
    while len(piece := save._ticket.next_piece()):
        pieces.append(piece)
    return [*pieces, piece]


def is_cancelled(save: CoreSave) -> bool:
    return save._ticket.cancel() and eventually(lambda: save.state == "cancelled")


def test_pieces_are_the_file_in_order(engine, tmp_path):
    stillframe.save(STATE, tmp_path / "a.pt")
    save = stream(engine)
    pieces, off = rest_of(save), 0
    for piece in pieces:
        assert piece.offset == off
        assert len(piece) == len(bytes(piece)) == memoryview(piece).nbytes
        off += len(piece)
    assert b"".join(pieces) == (tmp_path / "a.pt").read_bytes()
    assert len(pieces[-1]) == 0 and bytes(pieces[-1]) == b""
    assert not save.done()
    del piece, pieces
    assert save.result(LONG_S).nbytes == off
    assert len(save._ticket.next_piece()) == 0  # the end comes again
    assert leased(engine) == 0


def test_buffer_is_read_only(engine):
    save = stream(engine)
    piece = save._ticket.next_piece()
    view = memoryview(piece)
    assert view.readonly
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_char * 8).from_buffer(piece)
    del piece, view
    assert is_cancelled(save)


def test_copy_returns_bytes_of_the_piece(engine):
    save = stream(engine)
    piece, *_, end = rest_of(save)
    assert piece.copy(0, len(piece)) == bytes(piece)
    assert piece.copy(3, 10) == bytes(piece)[3:10]
    assert piece.copy(5, 5) == end.copy(0, 0) == b""
    for start, stop in ((-1, 2), (3, 2), (0, len(piece) + 1), (len(piece) + 1, len(piece) + 1)):
        with pytest.raises(ValueError, match="no such bytes"):
            piece.copy(start, stop)
    with pytest.raises(ValueError, match="no such bytes"):
        end.copy(0, 1)
    for wrong in ((), (1,), ("a", "b")):
        with pytest.raises(TypeError):
            piece.copy(*wrong)


def test_memory_returns_when_the_last_view_dies(engine):
    save = stream(engine)
    before = leased(engine)
    piece = save._ticket.next_piece()
    view = memoryview(piece)
    part = view[10:20]
    first = bytes(part)
    del piece
    assert leased(engine) == before
    view.release()
    assert leased(engine) == before and bytes(part) == first
    del part
    assert leased(engine) == before - MIB
    assert is_cancelled(save)
    assert leased(engine) == 0


def test_next_piece_returns_none_when_the_time_has_passed(engine):
    returned = []

    def before_launch(save: CoreSave) -> None:
        returned.extend(save._ticket.next_piece(timeout) for timeout in (0.0, -1.0, 0.01))

    save = stream(engine, before_launch)
    assert returned == [None, None, None]
    with pytest.raises(TypeError):
        save._ticket.next_piece("soon")
    assert len(save._ticket.next_piece(LONG_S)) > 0
    assert is_cancelled(save)


def test_cancelled_save_has_no_more_pieces_and_keeps_those_that_are_taken(engine):
    save = stream(engine)
    piece = save._ticket.next_piece()
    before = bytes(piece)
    assert save.cancel()
    for timeout in (None, 0.0):
        with pytest.raises(StillframeError):
            save._ticket.next_piece(timeout)
    assert bytes(piece) == before
    assert not save.done()
    del piece
    assert eventually(lambda: save.state == "cancelled")
    assert leased(engine) == 0


def test_save_to_a_file_has_no_pieces(engine, tmp_path):
    save = stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
    with pytest.raises(StillframeError):
        save._ticket.next_piece()
    save.result(LONG_S)


def test_piece_cannot_be_constructed_by_users():
    with pytest.raises(TypeError):
        _core.Piece()
