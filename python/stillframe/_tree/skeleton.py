"""The skeleton of an object: its pickle, and the storages of its tensors.

``torch.save`` pickles an object with every storage replaced by an id, then writes the storages one
by one. `build` makes the same pickle, and returns the addresses of the storages' bytes for the core
to write. *Plain* tensors are bytes with a shape, and need no code of a subclass.

Python's C pickler asks the *collector*, an object of C code, about each object. The collector
numbers the storages. It also writes the pickles of plain tensors without calling their methods,
which is the *fast path* (``csrc/python/skeleton/skeleton.c``).
"""

from __future__ import annotations

import _pickle
import copyreg
import functools
import io
import operator
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.nn import Parameter
from torch.storage import TypedStorage, UntypedStorage

from stillframe import _core
from stillframe._base import device as _device
from stillframe._tree import culprit
from stillframe._tree import keypaths as _keypaths

_PROTOCOL = 2
_MOST_ITEMSIZE = 16  # the size in bytes of the largest dtype's elements
SOURCE = struct.Struct("=QQII")  # struct sfr_source: addr, nbytes, lane, device

# (class, method, torch's own function). The fast path is correct unless somebody replaces one of
# these methods.
_REDUCERS = (
    (Tensor, "__reduce_ex__", Tensor.__reduce_ex__),
    (Tensor, "_reduce_ex_internal", Tensor._reduce_ex_internal),
    (Parameter, "__reduce_ex__", Parameter.__reduce_ex__),
)

# torch's functions that return the location tag of a host storage ("cpu") and of a CUDA storage
# ("cuda:0"), in torch's order. The function for CUDA is a `partial` with the argument "cuda".
_taggers = [tagger for _, tagger, _ in torch.serialization._package_registry]
_cuda_tagger = [tagger for tagger in _taggers if getattr(tagger, "args", ()) == ("cuda",)]
_TAGGERS = [torch.serialization._cpu_tag, *_cuda_tagger]

# Convert tensors to handles of torch's C shim, and handles back to tensors. The second conversion
# releases the handles.
_to_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
_from_handles = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs


@dataclass(slots=True)
class Skeleton:
    """The records of a save: the pickle, and the storages that it refers to.

    Attributes:
        data: The record ``data.pkl``, pickle protocol 2.
        storages: Storages in host memory or on CUDA devices; number ``i`` becomes the record
            ``data/i``. The list keeps their bytes at the addresses in ``rows``, unless somebody
            resizes a storage.
        numbers: The storages' numbers, by the addresses of the StorageImpls in the caller's tree.
            ``storages`` may have a copy in host memory instead of the caller's storage.
        rows: One ``struct sfr_source`` (24 bytes) for each storage, every lane 0.
        num_tensors: How many distinct tensor objects there are.
        fallbacks: Sentences for the report, about what made the save slower.
        devices: Numbers of the CUDA devices that have storages.
    """

    data: bytes
    storages: list[UntypedStorage]
    numbers: _core.Numbers
    rows: bytearray
    num_tensors: int
    fallbacks: list[str]
    devices: tuple[int, ...] = ()

    def names(self, index: int) -> list[str]:
        """Return key paths, such as ``optim.state.0.exp_avg``, of the tensors over storage
        ``index``. The path of the root is ``""``. Slow, because it parses ``data``."""
        return _keypaths.tensor_paths_over_storage(self.data, str(index))

    def lay_out(self, *, by_lane: bool = False) -> bytes | None:
        """Return the members of a flat file, see `flat.Flat.lay_out`. Return None for torch's
        format. Call it once, when the lanes in `rows` are final."""
        return None


class _Pickler(_pickle.Pickler):
    """The C pickler with a ``__dict__``, so that persistent_id can be an attribute.

    As a method, persistent_id would be in a reference cycle with the pickler, which would keep the
    saved object alive until the next garbage collection. The attribute is a method of the
    collector.
    """


def _persistent_id_of_storage(
    collector: _core.Collector, obj: Any
) -> tuple[str, Any, str, str, int]:
    """Return the persistent id of a storage object, as ``torch.save`` makes it."""
    if isinstance(obj, TypedStorage):
        storage = obj._untyped_storage
        dtype = obj.dtype
        storage_type = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call]
        numel = obj._size()  # type: ignore[no-untyped-call]
    else:
        storage = obj
        dtype = torch.uint8
        storage_type = torch.serialization.normalize_storage_type(  # type: ignore[no-untyped-call]
            type(obj)
        )
        numel = storage.nbytes()
    device = storage.device
    addr = 0 if str(device) == "meta" else _device.address_of(storage)  # "meta" has no bytes
    number = collector.add_storage(
        storage, storage._cdata, _device.device_number_of(device), addr, dtype
    )
    # A storage that was loaded under FakeTensorMode has the device of its file here.
    fake_device = getattr(obj, "_fake_device", None)
    location = str(fake_device) if fake_device is not None else _location(storage)
    return ("storage", storage_type, str(number), location, numel)


def _location(storage: UntypedStorage) -> str:
    location: str = torch.serialization.location_tag(storage)
    return location


def _samples() -> list[tuple[Tensor, int, int, int, Any]]:
    """Return tensors of several kinds. Each comes with the address of its TensorImpl, its dispatch
    keys, the address of its StorageImpl, and a handle of torch's C shim."""
    real = torch.empty(1, device="cpu", dtype=torch.float32)
    negated = torch._neg_view(real)
    conjugated = torch.empty(1, device="cpu", dtype=torch.complex64).conj()
    tensors = [real, negated, conjugated, torch.empty(1, device="meta")]
    return [
        (
            tensor,
            tensor._cdata,
            torch._C._dispatch_keys(tensor).raw_repr(),
            tensor.untyped_storage()._cdata,
            handle,
        )
        for tensor, handle in zip(tensors, _to_handles(tensors), strict=True)
    ]


def _learn_tensor_offsets() -> bool:
    """Let the C code find at which offsets in torch's objects the fast path has to read. Return
    False if it finds none in this torch, so that the fast path is impossible."""
    samples = _samples()
    try:
        return _core.learn_words(samples)
    finally:
        handles = [sample[-1] for sample in samples]
        _from_handles(handles)  # releases the handles


def _dispatch_key_bits(*names: str) -> int:
    """Return the bits of a set of dispatch keys, as `raw_repr` returns them."""
    sets = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    return functools.reduce(operator.or_, (each.raw_repr() for each in sets))


# The dispatch keys that plain tensors may have.
_USUAL_KEYS = _dispatch_key_bits(
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    "ADInplaceOrView",
)


def _memory_kind_of(tensor: Tensor) -> int:
    """Return where the bytes of a tensor are: 0 for host memory, 1 for a CUDA device.

    Return -1 for any other device, and for tensors that are not plain: sparse, nested, quantized,
    conjugated, negated, named, wrapped, or all zeros without memory. The C code uses the result for
    all tensors with the same dispatch keys.
    """
    if torch._C._dispatch_keys(tensor).raw_repr() & ~_USUAL_KEYS:
        return -1
    if tensor.is_cpu:
        return 0
    return 1 if tensor.is_cuda else -1


def _make_torch_types(**replacements: Any) -> _core.TorchTypes:
    """Return what the C code needs from torch: classes, functions and dtypes.

    Args:
        **replacements: Items to use instead of those below. `dtypes` are pairs of dtype and name.
    """
    attributes = torch._C.TensorBase.__dict__
    dtypes = [
        (dtype, name)
        for dtype, name in torch.storage._dtype_to_storage_type_map().items()
        if not name.startswith("Q")  # quantized tensors carry more than a storage
    ]
    parts: dict[str, Any] = {
        "tensor": Tensor,
        "parameter": Parameter,
        "typed_storage": TypedStorage,
        "storage_classes": torch._storage_classes,
        "getstate": object.__getstate__,
        "untyped_storage": attributes["untyped_storage"],
        "data_ptr": torch._C.StorageBase.__dict__["data_ptr"],
        "nbytes": torch._C.StorageBase.__dict__["nbytes"],
        "where": _memory_kind_of,
        "storage_tuple": _persistent_id_of_storage,
        "location": _location,
        "device_index": _device.index_of,
        "from_handles": _from_handles,
        "requires_grad": attributes["requires_grad"],
        "backward_hooks": attributes["_backward_hooks"],
        "dtypes": dtypes,
    }
    parts.update(replacements)
    sample = torch.empty(_MOST_ITEMSIZE, dtype=torch.uint8, device="cpu")
    parts["dtypes"] = [
        (dtype, name, dtype.itemsize, sample.view(dtype)) for dtype, name in parts["dtypes"]
    ]
    return _core.TorchTypes(**parts)


def _plain_byte_dtypes() -> list[tuple[torch.dtype, str]]:
    """Return the dtypes whose elements are plain bytes, with their names."""
    names = "bool bfloat16 float16 float32 float64 complex32 complex64 complex128"
    names += " int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e4m3fn float8_e4m3fnuz"
    names += " float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    dtypes = [(name, getattr(torch, name, None)) for name in names.split()]
    return [(dtype, name) for name, dtype in dtypes if dtype is not None]


make_tensors = True
"""Whether C code makes the tensors of a snapshot, if torch has the function for it (since 2.11).
Tests set it to False."""

# No mode that is active during the import may change the sample tensors.
with (
    torch._C.DisableTorchFunction(),
    torch._C._DisableTorchDispatch(),
    pyfunctorch.temporarily_clear_interpreter_stack(),
):
    _words_found = _learn_tensor_offsets()
    _types = _make_torch_types()
    # For trees, which may have dtypes that torch has no storage class for.
    _tree_types = _make_torch_types(dtypes=_plain_byte_dtypes())
_UNKNOWN_TORCH = (
    "This torch keeps its tensors in a way that is not known here, so each was asked to describe"
    " itself, as torch.save does, which is slower."
)


def _has_active_transforms() -> bool:
    """Return whether torch's dispatch modes or function transforms are active."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _fast_path_is_allowed() -> bool:
    """Return whether no mode, transform or other code changes how tensors are pickled."""
    if torch._C._len_torch_function_stack() or _has_active_transforms():
        return False
    if Tensor in copyreg.dispatch_table or Parameter in copyreg.dispatch_table:
        return False
    if Tensor.__getstate__ is not object.__getstate__:
        return False
    if Parameter.__getstate__ is not object.__getstate__:
        return False
    return all(getattr(cls, name) is original for cls, name, original in _REDUCERS)


def _has_default_location_tags() -> tuple[bool, bool]:
    """Return whether host storages and whether CUDA storages get torch's own location tags. They do
    not if other code has registered a tagger before torch's."""
    taggers = [tagger for _, tagger, _ in torch.serialization._package_registry[:2]]
    is_host_default = taggers[:1] == _TAGGERS[:1]
    are_both_default = taggers == _TAGGERS
    return is_host_default, are_both_default


def tree_collector() -> _core.Collector:
    """Return a collector for `stillframe._tree.walk`, which disables function modes itself and
    needs no location tags."""
    return _core.Collector(
        _tree_types,
        fast_path=not _has_active_transforms(),
        plain_cpu=True,
        plain_cuda=True,
        any_dtypes=True,
    )


def _pickle_object(obj: object, collector: _core.Collector) -> bytes:
    """Return the pickle of ``obj``. A number stands for each plain tensor until `Collector.splice`
    puts the tensor's own pickle there."""
    buffer = io.BytesIO()
    pickler = _Pickler.__new__(_Pickler)
    # Set before __init__, which reads the attribute.
    pickler.persistent_id = collector.persistent_id  # type: ignore[method-assign]
    pickler.__init__(buffer, _PROTOCOL)  # type: ignore[misc]
    pickler.dump(obj)
    return buffer.getvalue()


def build(obj: object) -> Skeleton:
    """Pickle ``obj`` as ``torch.save`` does, and find its storages.

    torch copies storages that are neither in host memory nor on a CUDA device, with a sentence in
    ``fallbacks``.

    Raises:
        Exception: The same as ``torch.save`` for ``obj``.
    """
    plain_cpu, plain_cuda = _has_default_location_tags()
    collector = _core.Collector(
        _types, fast_path=_fast_path_is_allowed(), plain_cpu=plain_cpu, plain_cuda=plain_cuda
    )
    try:
        pickle = _pickle_object(obj, collector)
    except MemoryError:
        raise  # the search for the culprit would need memory
    except Exception as error:
        culprit.note(error, obj)
        raise
    # `elsewhere` has the numbers of the storages that are on devices of other kinds.
    storages, numbers, rows, elsewhere, num_tensors, devices = collector.finish()
    data = collector.splice(pickle)
    fallbacks = _fetch(storages, rows, elsewhere)
    if not _words_found:
        fallbacks.append(_UNKNOWN_TORCH)
    return Skeleton(data, storages, numbers, rows, num_tensors, fallbacks, devices)


def _fetch(storages: list[UntypedStorage], rows: bytearray, elsewhere: list[int]) -> list[str]:
    """Replace the storages with the numbers ``elsewhere`` by copies in host memory. Return a
    sentence for each device."""
    counts: dict[str, int] = {}
    for index in elsewhere:
        device = str(storages[index].device)
        copy = storages[index].cpu()  # type: ignore[no-untyped-call]
        storages[index] = copy
        SOURCE.pack_into(rows, index * SOURCE.size, copy.data_ptr(), copy.nbytes(), 0, 0)
        counts[device] = counts.get(device, 0) + 1
    return [describe_copied_storages(count, device) for device, count in counts.items()]


def describe_copied_storages(count: int, device: str) -> str:
    storages = "storage" if count == 1 else "storages"
    return f"{count} {storages} on {device} copied to host memory by torch during the call"
