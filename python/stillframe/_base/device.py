"""Questions to torch about CUDA: where a tensor lives, and the current stream.

Only `ensure_cuda_context` may initialise CUDA: after that, forked children of the process cannot
use CUDA.

CPU builds of torch lack the C function for the current stream. So Python asks for the stream's
handle, and passes it to the core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# A build of torch for AMD also calls its devices "cuda", but uses another driver.
_is_cuda = torch.version.cuda is not None

index_of: Callable[[torch.Tensor], int] = (
    torch._C.TensorBase.get_device if _is_cuda else lambda tensor: -1
)
"""Return n for a tensor on CUDA device n, and -1 for any other tensor."""

# Returns the handle of the current stream of a device; None in CPU builds of torch.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def device_number_of(device: torch.device) -> int:
    """Return 0 for host memory, n + 1 for CUDA device n, and -1 for any other device."""
    if device.type == "cpu":
        return 0
    if device.type == "cuda" and _is_cuda and device.index is not None:
        return device.index + 1
    return -1


# The getter of the property `is_cpu`: a call of it makes no Python frame.
on_host: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_cpu.__get__  # type: ignore[attr-defined]
"""Return whether a tensor is in host memory."""


def device_number_of_tensor(tensor: torch.Tensor) -> int:
    """Return `device_number_of` the device that a tensor is on."""
    return 0 if on_host(tensor) else device_number_of(tensor.device)


def address_of(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's bytes, in host or device memory."""
    return storage.data_ptr()


def has_cuda_device() -> bool:
    """Return whether there is a CUDA device, to which tensors can be loaded."""
    return _is_cuda and torch.cuda.is_available()


def cuda_device_of_location(location: str) -> torch.device | None:
    """Return the CUDA device that a location tag of torch names, such as "cuda" or "cuda:0". Return
    None if the tag names no CUDA device of this machine."""
    kind, _, number = location.partition(":")
    is_cuda_tag = kind == "cuda" and (number.isdecimal() or location == "cuda")
    if not is_cuda_tag or not has_cuda_device():
        return None
    index = int(number) if number else torch.cuda.current_device()
    return torch.device("cuda", index) if index < torch.cuda.device_count() else None


def current_stream(device: int) -> int:
    """Return the driver's handle of the calling thread's current stream on a device."""
    return int(_raw_stream(device))


def streams(devices: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the current stream of each device, as (device, handle)."""
    return tuple((device, current_stream(device)) for device in devices)


def capturing() -> bool:
    """Return whether the calling thread's current stream is capturing a CUDA graph."""
    if not _is_cuda or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def in_use() -> list[int]:
    """Return the devices that this process has used, the current one first."""
    if not _is_cuda or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    current = torch.cuda.current_device()
    others = [number for number in range(torch.cuda.device_count()) if number != current]
    return [number for number in (current, *others) if has_context(number)]


def ensure_cuda_context(number: int) -> None:
    """Have torch make its context on a device, unless the device has one. Raise RuntimeError if
    torch cannot use the device."""
    if number not in in_use():
        torch.empty(1, device=torch.device("cuda", number))
