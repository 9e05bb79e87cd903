"""Computes a fingerprint of tensors that detects most writes without reading every byte.

Most writes change a tensor's version counter, and replacing its memory changes its address. Writes
through `.data` change neither. Most of those change the whole tensor, so a few elements of each
tensor, spread evenly, are kept and compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ELEMENTS = 16  # intervals between the elements that are kept of each tensor


class Fingerprint:
    """A fingerprint of tensors in host memory.

    Two fingerprints are equal if no write between them was detected.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [(id(each), each.data_ptr(), each._version) for each in tensors]
        some: dict[torch.dtype, list[Tensor]] = {}
        with torch.no_grad():
            for each in tensors:
                if each.numel():
                    some.setdefault(each.dtype, []).append(_sample(each))
            # Compared as bytes, so that NaN equals itself.
            self._samples = [torch.cat(each).view(torch.uint8) for each in some.values()]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and self._known == other._known
            and all(map(torch.equal, self._samples, other._samples))
        )

    __hash__ = None  # type: ignore[assignment]


def _sample(tensor: Tensor) -> Tensor:
    """Return a view of a few evenly spread elements."""
    span = tensor.numel() - 1
    if not tensor.is_contiguous():
        span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    step = max(span // _ELEMENTS, 1)
    return tensor.as_strided((span // step + 1,), (step,), tensor.storage_offset())
