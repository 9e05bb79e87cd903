"""States of real sizes, filled with a pattern that differs at each position of each tensor.

The pattern is `base + number`: `base` is the same 4 MiB of random 64-bit words everywhere, and the
number differs for every 4 MiB of every tensor. So a tensor is filled and compared in pieces, and no
second copy of the state is ever needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KB, MB, GB = 1000, 1000**2, 1000**3
MIB = 1 << 20
_PIECE = 4 * MIB  # bytes of the pattern
_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float64)
_PIECES_PER_TENSOR = 1 << 16  # more than any tensor has
_VALUES = {"epoch": 3, "global_step": 7, "optimizer_states": [], "lr_schedulers": []}
# The version of Lightning that the checkpoint claims to be of, the oldest that the tests support.
_VERSION = "2.4.0"


@dataclass(frozen=True)
class State:
    """The tensors of a checkpoint.

    Attributes:
        sizes: Bytes of each tensor, in the order of the pickle.
        trained: How many of the first tensors belong to an AdamW that has taken steps, so that
            saves may defer them. A multiple of three: each parameter brings two moments.
    """

    sizes: tuple[int, ...]
    trained: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def scaled(self, divisor: int) -> State:
        """Return the same with smaller tensors: multiples of 8 bytes."""
        return State(tuple(max(8, size // divisor // 8 * 8) for size in self.sizes), self.trained)


def _uneven(size: int, number: int) -> int:
    """Return `size` or a little more, so that the records' headers are at different offsets
    modulo 64."""
    return size + 8 * (number % 8)


STATES = {
    "1.1 GiB first": State((1100 * MIB + 24, 3 * MIB, 1000)),
    "2 x 600 MiB": State((600 * MIB, 600 * MIB + 40, 5 * MIB)),
    "260 MiB": State((260 * MIB, 1000, 2 * MIB)),
    "2 x 150 MiB": State((150 * MIB + 8, 150 * MIB, 1000)),
    "30 deferred": State((*(8 * MIB,) * 30, 1200 * MIB, 1000), trained=30),
    "4.4 GB in 200": State(tuple(_uneven(22 * MB, i) for i in range(200))),
    "past 4 GiB": State((2 * MIB, 4200 * MIB, *(_uneven(1000, i) for i in range(20)), 8 * MIB)),
    "5.2 GB in 52": State(tuple(_uneven(100 * MB, i) for i in range(52))),
    "9 GB mixed": State(
        (
            3 * GB,
            *(_uneven(500 * MB, i) for i in range(8)),
            *(_uneven(20 * MB, i) for i in range(100)),
            *(_uneven(8 * KB, i) for i in range(500)),
        )
    ),
    "70,000 small": State((*(64 + 8 * (i % 100) for i in range(70_000)), 3 * MIB)),
}


class Pattern:
    """Fills and compares tensors."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(20261123)
        words = (-(1 << 62), 1 << 62, (_PIECE // 8,))
        self._base = torch.randint(*words, dtype=torch.int64, generator=generator)
        self._sum = torch.empty_like(self._base)

    def fill(self, tensor: torch.Tensor, number: int) -> None:
        """Write the pattern of tensor `number` into a contiguous tensor."""
        with torch.no_grad():
            for piece, words in enumerate(_words(tensor).split(len(self._base))):
                words.copy_(self._expected(number, piece, len(words)))

    def first_difference(self, tensor: torch.Tensor, number: int) -> int | None:
        """Return the first byte at which a tensor differs; None if it is right."""
        for piece, words in enumerate(_words(tensor).split(len(self._base))):
            expected = self._expected(number, piece, len(words))
            if not torch.equal(words, expected):
                word = int((words != expected).nonzero()[0])
                return piece * _PIECE + 8 * word
        return None

    def _expected(self, number: int, piece: int, nr_words: int) -> torch.Tensor:
        what = number * _PIECES_PER_TENSOR + piece + 1
        return torch.add(self._base[:nr_words], what, out=self._sum[:nr_words])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as 64-bit words."""
    return tensor.detach().view(-1).view(torch.uint8).view(torch.int64)


def make(state: State) -> dict[str, Any]:
    """Return the tree that is saved, its tensors filled."""
    pattern = Pattern()
    tensors = _trained(state) if state.trained else []
    tensors += [_empty(number, state) for number in range(len(tensors), len(state.sizes))]
    for number, tensor in enumerate(tensors):
        pattern.fill(tensor, number)
    return _tree(tensors, _VALUES)


def make_target(state: State) -> dict[str, Any]:
    """Return a tree like that of `make` for `into=`, with wrong values everywhere."""
    tensors = [_empty(number, state).zero_() for number in range(len(state.sizes))]
    return _tree(tensors, {**_VALUES, "epoch": -1, "global_step": -1})


def find_wrong(tree: dict[str, Any], state: State) -> str:
    """Return what is wrong with a loaded tree; "" where all is right."""
    wrong = [f"{name} is {tree.get(name)!r}" for name in _VALUES if tree.get(name) != _VALUES[name]]
    return "; ".join([*wrong, *wrong_tensors(tree["state_dict"], state)])


def wrong_tensors(tensors: dict[str, torch.Tensor], state: State) -> list[str]:
    """Return a sentence about wrong tensors, in a list; empty where all are right."""
    if len(tensors) != len(state.sizes):
        return [f"there are {len(tensors)} tensors, and there were {len(state.sizes)}"]
    pattern, wrong = Pattern(), []
    for number, nbytes in enumerate(state.sizes):
        tensor = tensors[_name(number)]
        if tensor.nbytes != nbytes or tensor.dtype is not _dtype(number, state):
            wrong.append(f"{_name(number)} is {tensor.dtype} of {tensor.nbytes} bytes")
        elif (at := pattern.first_difference(tensor, number)) is not None:
            wrong.append(f"{_name(number)} differs from byte {at} on")
    return [f"{len(wrong)} of {len(state.sizes)} tensors: {wrong[0]}"] if wrong else []


def _tree(tensors: list[torch.Tensor], values: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that Lightning accepts too."""
    named = {_name(number): tensor for number, tensor in enumerate(tensors)}
    return {"state_dict": named, **values, "pytorch-lightning_version": _VERSION}


def _name(number: int) -> str:
    return f"t{number:05d}"


def _dtype(number: int, state: State) -> torch.dtype:
    trained = number < state.trained
    return torch.float32 if trained else _DTYPES[number % len(_DTYPES)]


def _empty(number: int, state: State) -> torch.Tensor:
    dtype = _dtype(number, state)
    return torch.empty(state.sizes[number] // dtype.itemsize, dtype=dtype)


def _trained(state: State) -> list[torch.Tensor]:
    """Return an optimizer's parameters and moments, after as many steps as saves must observe."""
    sizes = state.sizes[: state.trained // 3]
    parameters = [torch.nn.Parameter(torch.zeros(size // 4)) for size in sizes]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(5):
        optimizer.step()
    _kept.append(optimizer)
    moments = [
        optimizer.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")
    ]
    return [each.detach() for each in parameters] + moments


# optimizers of returned states, which own their storages as long as they live
_kept: list[Any] = []
