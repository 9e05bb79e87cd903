"""Plain tensors rebuilt over copies of their storages: `Collector.copies` and the bridge."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import stillframe
import torch
from stillframe import _core
from stillframe._tree import skeleton

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch before 2.11 makes no tensors over given memory"
)


def copied(
    tensors: list[torch.Tensor], collector: _core.Collector | None = None
) -> tuple[_core.Collector, bytearray, list[int]]:
    """Return a collector that has found the tensors, and the bytes of their storages."""
    collector = collector or skeleton.tree_collector()
    assert collector.collect(tensors) == []
    memory, offsets = bytearray(), []
    for storage in collector.finish()[0]:
        offsets.append(len(memory))
        memory += bytes(storage.tolist())
        memory += bytes(-len(memory) % 64)
    return collector, memory, offsets


def made(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    collector, memory, offsets = copied(tensors)
    news, _, left = collector.copies(memory, offsets, True)
    assert left == []
    return [news[id(tensor)] for tensor in tensors]


def test_views_of_a_storage_are_views_of_one_copy():
    base = torch.arange(24.0)
    views = [base[5:9], base[20:], base, base.view(4, 6).t(), base[3:3], base[::7]]
    for order in (views, views[::-1]):
        news = made(order)
        assert all(map(torch.equal, news, order))
        assert len({new.untyped_storage()._cdata for new in news}) == 1
        assert news[0].untyped_storage().nbytes() == 96
        layouts = [(new.storage_offset(), new.stride()) for new in news]
        assert layouts == [(old.storage_offset(), old.stride()) for old in order]
        assert not any(new._is_view() for new in news)


def test_the_memory_lives_as_long_as_a_storage_over_it():
    collector, memory, offsets = copied([torch.ones(4), torch.zeros(2, 3)])
    before = sys.getrefcount(memory)
    news, firsts, _ = collector.copies(memory, offsets, True)
    assert sys.getrefcount(memory) == before + 1  # one reference for all of them
    last = firsts[0]
    assert last is not None
    view = last[1:]
    news.clear()
    firsts.clear()
    del last
    assert sys.getrefcount(memory) == before + 1
    assert view.tolist() == [1.0, 1.0, 1.0]
    box = [view]
    del view
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert sys.getrefcount(memory) == before


@pytest.mark.parametrize("offset", [-2, 49, 65, 1 << 62])
def test_a_copy_that_is_not_within_the_memory_is_refused(offset):
    collector, _, _ = copied([torch.ones(4)])
    memory = bytearray(64)
    before = sys.getrefcount(memory)
    with pytest.raises(ValueError, match="not within the memory"):
        collector.copies(memory, [offset], True)
    assert sys.getrefcount(memory) == before


def test_wrong_arguments_are_refused():
    collector, memory, offsets = copied([torch.ones(4)])
    with pytest.raises(ValueError, match="an offset for each storage"):
        collector.copies(memory, [], True)
    with pytest.raises(BufferError):
        collector.copies(bytes(memory), offsets, True)
    with pytest.raises(TypeError):
        collector.copies(memory, ["0"], True)
    unfinished = skeleton.tree_collector()
    with pytest.raises(ValueError, match="after finish"):
        unfinished.copies(memory, [], True)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: 1 / 0, ZeroDivisionError),
        (list, SystemError),
        (lambda: None, SystemError),
    ],
)
def test_a_bridge_that_fails_keeps_nothing(answer, error):
    def take(handles: list[Any]) -> Any:
        assert len(torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(handles)) == 1
        return answer()

    types = skeleton._make_torch_types(dtypes=skeleton._plain_byte_dtypes(), from_handles=take)
    collector = _core.Collector(types, True, True, True, True)
    collector, memory, offsets = copied([torch.ones(4)], collector)
    before = sys.getrefcount(memory)
    with pytest.raises(error):
        collector.copies(memory, offsets, True)
    assert sys.getrefcount(memory) == before


def test_tensor_that_cannot_be_made_is_left_out_and_reported():
    floats = torch.arange(4.0)
    other = floats.view(torch.int32)
    empty = torch.empty(0, 3)
    odd = torch.empty(0, dtype=torch.int32)
    odd.set_(torch.zeros(7, dtype=torch.uint8).untyped_storage(), 0, (1,), (1,))
    shrunk = torch.zeros(8)
    shrunk.untyped_storage().resize_(16)
    tensors = [floats, other, empty, odd, shrunk]
    collector, memory, offsets = copied(tensors)
    news, firsts, left = collector.copies(memory, offsets, True)
    assert list(news) == [id(floats)]
    expected = [(id(other), 0), (id(empty), 1), (id(odd), 2), (id(shrunk), 3)]
    assert [(id(tensor), number) for tensor, number in left] == expected
    assert [first is None for first in firsts] == [False, True, True, True]


def test_everything_is_left_out_if_torch_cannot_make_tensors():
    collector, memory, offsets = copied([torch.ones(4), torch.zeros(2)])
    news, firsts, left = collector.copies(memory, offsets, False)
    assert (news, firsts) == ({}, [None, None])
    assert [number for _, number in left] == [0, 1]


def test_collector_leaves_all_but_plain_tensors_to_the_caller():
    with_attribute = torch.ones(2)
    with_attribute.note = "x"
    conj = torch.ones(2, dtype=torch.complex64).conj()
    sparse = torch.eye(2).to_sparse()
    meta = torch.empty(3, device="meta")
    others: list[Any] = [{}, [], (1,), with_attribute, conj, sparse, meta, object()]
    collector = skeleton.tree_collector()
    plain = torch.ones(1)
    met = collector.collect([plain, 1, None, "x", *others, plain, 2.0, True, b""])
    assert list(map(id, met)) == list(map(id, others))
    assert len(collector.finish()[0]) == 1


def test_requires_grad_is_kept():
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    tensors = [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), frozen]
    news = made(tensors)
    assert [type(new) for new in news] == [type(old) for old in tensors]
    assert [new.requires_grad for new in news] == [True, True, False]
    assert all(new.is_leaf for new in news)


def test_a_tensor_that_sees_more_of_a_storage_than_was_copied_is_left_out():
    first = torch.arange(8.0)
    collector = skeleton.tree_collector()
    assert collector.collect([first]) == []
    storage = first.untyped_storage()
    storage.resize_(64)  # between two tensors of one tree, as a __getstate__ may do
    longer = torch.empty(0).set_(storage, 0, (16,), (1,))
    assert collector.collect([longer]) == []
    collector.finish()
    news, _, left = collector.copies(bytearray(32), [0], True)
    assert list(news) == [id(first)]
    assert [(id(tensor), number) for tensor, number in left] == [(id(longer), 0)]


def test_too_deep_nesting_raises_recursion_error():
    nested: list[Any] = []
    for _ in range(100_000):  # far more than a stack has room for
        nested = [nested]
    try:
        with pytest.raises(RecursionError, match="while a tree is walked"):
            stillframe.snapshot(nested)
        with pytest.raises(RecursionError, match="while a tree is made again"):
            _core.rebuilt(nested, {}, id)
    finally:
        while nested:  # one by one, because freeing them recurses too
            nested = nested.pop()
