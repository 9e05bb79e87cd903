"""What was read of some tensors, as far as that can be told without reading all of it.

Most writes show in a tensor's version, and one that puts other memory under it in its address.
Writes through `.data` show in neither: most of those change what they write to all over, so a few
elements of each tensor, spread evenly, are kept and compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ELEMENTS = 16  # kept of each tensor, and the last one


class Stamp:
    """Of tensors in host memory. Two are equal where nothing is seen to have been written in
    between."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [(id(each), each.data_ptr(), each._version) for each in tensors]
        some: dict[torch.dtype, list[Tensor]] = {}
        with torch.no_grad():
            for each in tensors:
                if each.numel():
                    some.setdefault(each.dtype, []).append(_sample(each))
            # As bytes: NaN is like itself.
            self._samples = [torch.cat(each).view(torch.uint8) for each in some.values()]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stamp)
            and self._known == other._known
            and all(map(torch.equal, self._samples, other._samples))
        )

    __hash__ = None  # type: ignore[assignment]


def _sample(tensor: Tensor) -> Tensor:
    """A view of some elements."""
    span = tensor.numel() - 1
    if not tensor.is_contiguous():
        span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    step = max(span // _ELEMENTS, 1)
    return tensor.as_strided((span // step + 1,), (step,), tensor.storage_offset())
