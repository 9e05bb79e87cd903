"""Objects of every kind that torch.save can store, and the comparison of two loaded graphs."""

import collections
import ctypes
import dataclasses
import datetime
import enum
import functools
import pathlib
import uuid
import warnings

import numpy as np
import torch
from hypothesis import strategies as st

LEGACY_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
NEW_DTYPES = [
    torch.complex32, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
DTYPES = LEGACY_DTYPES + NEW_DTYPES


# ---- classes that a user could have ------------------------------------------------


class SubTensor(torch.Tensor):
    """A subclass without __torch_dispatch__."""


class Slotted:
    __slots__ = ("left", "right")

    def __eq__(self, other):
        return (self.left, self.right) == (other.left, other.right)

    __hash__ = None


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Outer:
    class Inner:
        """Protocol 2 pickles a nested class through getattr."""


@dataclasses.dataclass
class Config:
    name: str
    weight: object = None
    extra: dict = dataclasses.field(default_factory=dict)


Pair = collections.namedtuple("Pair", ["first", "second"])


class Momentary:
    """An object whose state is tensors that exist only while the pickler reads them."""

    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        return {"copy": torch.full((1000,), self.value), "value": self.value}


class DictOfTensors(dict):
    pass


class ListOfTensors(list):
    pass


# ---- tensors -------------------------------------------------------------------------


def tensor_of(dtype, shape, seed=0):
    """Return a tensor with its own storage and bytes that depend on the seed."""
    tensor = torch.empty(shape, dtype=dtype)
    storage = tensor.untyped_storage()
    data = (np.arange(storage.nbytes(), dtype=np.uint64) * 37 + seed * 11 + 5) % 251
    if dtype == torch.bool:
        data %= 2
    if storage.nbytes():
        storage.copy_(torch.from_numpy(data.astype(np.uint8)).untyped_storage())
    return tensor


def bytes_of(storage):
    """Return a host storage's bytes. bytes(storage) would make a tensor for each byte."""
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)
SEEDS = st.integers(0, 1000)


@st.composite
def strided(draw, dtypes=tuple(DTYPES)):
    """Return a tensor of any dtype, or views and aliases of one storage."""
    base = tensor_of(draw(st.sampled_from(dtypes)), draw(SHAPES), draw(SEEDS))
    views = {
        "itself": lambda: base,
        "two objects, one storage": lambda: [base, base[...]],
        "slices": lambda: [base.reshape(-1)[1:], base.reshape(-1)[::2], base.reshape(-1)[:0]],
        "last first": lambda: (base.reshape(-1)[-1:], base),
        "transposed": lambda: base.permute(tuple(reversed(range(base.dim())))),
        "expanded": lambda: base.reshape(-1)[:1].expand(3, base.reshape(-1)[:1].numel()),
        "zero dimensions": lambda: base.reshape(-1)[0] if base.numel() else base,
        "overlapping": lambda: (
            base.as_strided((2, 2), (1, 1)) if base.untyped_storage().nbytes() >= 48 else base
        ),
        "twice": lambda: [base, base],
        "detached": lambda: {"a": base, "b": base.detach()},
    }
    return views[draw(st.sampled_from(sorted(views)))]()


@st.composite
def differentiable(draw):
    """Return parameters, tied and untied, leaves with requires_grad, and Buffers."""
    base = tensor_of(
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64])),
        draw(SHAPES),
        draw(SEEDS),
    )
    make = {
        "parameter": lambda: torch.nn.Parameter(base),
        "frozen": lambda: torch.nn.Parameter(base, requires_grad=False),
        "tied": lambda: (lambda p: [p, p, {"data": p.data}])(torch.nn.Parameter(base)),
        "two over one storage": lambda: [torch.nn.Parameter(base), torch.nn.Parameter(base)],
        "leaf": lambda: base.requires_grad_(),
        "with an attribute": lambda: with_attribute(torch.nn.Parameter(base)),
        "buffer": lambda: torch.nn.Buffer(base),
        "of a view": lambda: torch.nn.Parameter(base.reshape(-1)[1:]),
    }
    return make[draw(st.sampled_from(sorted(make)))]()


def with_attribute(tensor):
    tensor.tag = ["an attribute", tensor.detach()]
    return tensor


def quantized_channels(seed):
    return torch.quantize_per_channel(
        tensor_of(torch.float32, (2, 3), seed).nan_to_num(0.0, 1.0, -1.0).clamp(-9, 9),
        torch.tensor([0.1, 0.2], dtype=torch.float64),
        torch.tensor([0, 1]),
        0,
        torch.qint8,
    )


def ragged(seed):
    return torch.nested.nested_tensor(
        [tensor_of(torch.float32, (2,), seed), tensor_of(torch.float32, (3,), seed)]
    )


SPECIAL = {
    "conj": lambda s: tensor_of(torch.complex64, (3,), s).conj(),
    "neg": lambda s: tensor_of(torch.complex64, (3,), s).conj().imag,
    "conj and base": lambda s: (lambda t: [t, t.conj(), t[1:].conj()])(
        tensor_of(torch.complex128, (3,), s)
    ),
    "conj parameter": lambda s: torch.nn.Parameter(tensor_of(torch.complex64, (3,), s).conj()),
    "sparse coo": lambda s: tensor_of(torch.int32, (3, 4), s).to_sparse(),
    "sparse, not coalesced": lambda s: torch.sparse_coo_tensor(
        [[0, 0], [1, 1]], tensor_of(torch.int32, (2,), s), (2, 3)
    ),
    "sparse csr": lambda s: tensor_of(torch.int32, (4, 4), s).to_sparse_csr(),
    "sparse csc": lambda s: tensor_of(torch.int32, (4, 4), s).to_sparse_csc(),
    "sparse bsr": lambda s: tensor_of(torch.int32, (4, 4), s).to_sparse_bsr((2, 2)),
    "sparse bsc": lambda s: tensor_of(torch.int32, (4, 4), s).to_sparse_bsc((2, 2)),
    "quantized": lambda s: torch.quantize_per_tensor(torch.arange(4.0) + s, 0.5, 3, torch.quint8),
    "quantized by channel": quantized_channels,
    "nested": ragged,
    "meta": lambda s: torch.empty(2, s % 5, device="meta"),
    "subclass": lambda s: tensor_of(torch.float32, (2, 2), s).as_subclass(SubTensor),
    "subclass with an attribute": lambda s: with_attribute(
        tensor_of(torch.float32, (2, 2), s).as_subclass(SubTensor)
    ),
    "tensor with an attribute": lambda s: with_attribute(tensor_of(torch.float32, (2,), s)),
    "untyped storage": lambda s: tensor_of(torch.uint8, (9,), s).untyped_storage(),
    "typed storage": lambda s: torch.storage.TypedStorage(
        wrap_storage=tensor_of(torch.float32, (4,), s).untyped_storage(),
        dtype=torch.float32,
        _internal=True,
    ),
    "inference tensor": lambda s: inference(s),
    "freed": lambda s: freed(s),
    "hooks, none left": lambda s: with_empty_hooks(s),
}


def inference(seed):
    with torch.inference_mode():
        return tensor_of(torch.float32, (3,), seed) * 1


def freed(seed):
    tensor = tensor_of(torch.float32, (0,), seed)
    tensor.untyped_storage().resize_(0)
    return tensor


def with_empty_hooks(seed):
    tensor = tensor_of(torch.float32, (3,), seed).requires_grad_()
    tensor.register_hook(print).remove()
    return tensor


@st.composite
def special(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in beta state", "prototype"
        return SPECIAL[draw(st.sampled_from(sorted(SPECIAL)))](draw(SEEDS))


# ---- other objects -----------------------------------------------------------------


def recursive(_seed):
    items = [1]
    items.append({"self": items, "pair": (items,)})
    return items


def recursive_object(seed):
    node = Config("node")
    node.weight = tensor_of(torch.float32, (2,), seed)
    node.extra["me"] = node
    return node


def slotted(seed):
    one = Slotted()
    one.left = tensor_of(torch.int64, (2,), seed)
    one.right = [one.left]
    return one


def metadata(seed):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        module[0].weight.fill_(seed)
    return module.state_dict()


def optimizer_state(seed):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1 + seed))
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": module.state_dict(), "optim": optimizer.state_dict(), "live": module}


def lightning_checkpoint(seed):
    """Return a checkpoint with the layout of Trainer.dump_checkpoint."""
    state = optimizer_state(seed)
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": state["model"],
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_model_score": torch.tensor(0.5),
                "best_model_path": "e=3.ckpt",
                "best_k_models": {},
                "kth_value": torch.tensor(float("inf")),
            }
        },
        "optimizer_states": [state["optim"]],
        "lr_schedulers": [{"base_lrs": [0.1], "_last_lr": [0.1], "verbose": False}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "layers": (1, 2)},
    }


OBJECTS = {
    "numpy": lambda s: np.arange(s % 9, dtype=np.float32),
    "numpy, twice": lambda s: [np.full((2, 2), s)] * 2,
    "numpy, read-only and strided": lambda s: read_only(s),
    "numpy scalar": lambda s: np.float64(s),
    "numpy object array": lambda s: np.array([s, "text", None], dtype=object),
    "from numpy": lambda s: (lambda a: [a, torch.from_numpy(a), torch.from_numpy(a)])(
        np.arange(4.0) + s
    ),
    "named tuple": lambda s: Pair(tensor_of(torch.float32, (2,), s), "second"),
    "dataclass": lambda s: Config("name", tensor_of(torch.int8, (3,), s), {"a": 1}),
    "slots": slotted,
    "enum": lambda s: [Colour.RED, Colour.BLUE, Colour.RED],
    "nested class": lambda s: [Outer.Inner, vars(Outer.Inner()).copy()],
    "momentary": lambda s: [Momentary(s), Momentary(s + 1)],
    "recursive": recursive,
    "recursive object": recursive_object,
    "metadata": metadata,
    "optimizer": optimizer_state,
    "checkpoint": lightning_checkpoint,
    "dict subclass": lambda s: DictOfTensors(a=tensor_of(torch.float32, (2,), s)),
    "list subclass": lambda s: ListOfTensors([tensor_of(torch.float32, (2,), s)]),
    "defaultdict": lambda s: collections.defaultdict(list, {s: [s]}),
    "counter": lambda s: collections.Counter("abracadabra"),
    "deque": lambda s: collections.deque([1, tensor_of(torch.float32, (1,), s)], maxlen=4),
    "set": lambda s: {s, "one", (2, 3)},
    "frozenset": lambda s: frozenset({s, "one"}),
    "partial": lambda s: functools.partial(max, s, key=abs),
    "bytes": lambda s: [b"K\x00Q" * (s % 90), bytearray(b"M\x01\x00Q"), b""],
    "path": lambda s: pathlib.PurePosixPath("/a") / str(s),
    "date": lambda s: datetime.datetime(2024, 1, 1, microsecond=s),
    "uuid": lambda s: uuid.UUID(int=s),
    "torch things": lambda s: [
        torch.float32, torch.device("cpu"), torch.Size([s, 2]), torch.strided,
        torch.complex32, torch.per_tensor_affine,
    ],
    "generator state": lambda s: torch.Generator().manual_seed(s).get_state(),
    "random states": lambda s: [torch.get_rng_state(), np.random.RandomState(s).get_state()],
    "classes and functions": lambda s: [Config, torch.nn.Linear, len, print, np.mean],
    "tensors as keys": lambda s: (lambda t: {t: "a", "b": t})(tensor_of(torch.float32, (2,), s)),
    "module": lambda s: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()),
}  # fmt: skip


def read_only(seed):
    array = (np.arange(12) + seed).reshape(3, 4)[::2, ::-1]
    array.flags.writeable = False
    return array


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(),
    st.binary(max_size=40), st.sampled_from(["KKQ", "K\x00Q", "M\x01\x00Q", "\x80\x02.", "cpu"]),
)  # fmt: skip


@st.composite
def python_objects(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return OBJECTS[draw(st.sampled_from(sorted(OBJECTS)))](draw(SEEDS))


@st.composite
def trees(draw, leaves=None):
    """Draw nested containers in which any leaf or branch may occur more than once."""
    if leaves is None:
        leaves = st.one_of(strided(), strided(), differentiable(), special(), python_objects())
    nodes = draw(st.lists(st.one_of(leaves, leaves, PLAIN), min_size=1, max_size=6))
    for _ in range(draw(st.integers(0, 5))):
        parts = draw(st.lists(st.sampled_from(range(len(nodes))), max_size=5))
        kind = draw(st.sampled_from(["list", "tuple", "dict", "ordered", "pair", "config"]))
        children = [nodes[i] for i in parts]
        if kind == "list":
            node = children
        elif kind == "tuple":
            node = tuple(children)
        elif kind == "dict":
            node = {f"key{i}": child for i, child in enumerate(children)}
        elif kind == "ordered":
            node = collections.OrderedDict((i, child) for i, child in enumerate(children))
            node._metadata = {"version": 1}
        elif kind == "pair":
            node = Pair(children[:1], children)
        else:
            node = Config("name", children)
        nodes.append(node)
    return nodes


SAFE_LEAVES = st.one_of(strided(), differentiable(), special())


# ---- comparison -----------------------------------------------------------------------


class Comparison:
    """Walks two graphs together. Objects and storages must correspond one to one."""

    def __init__(self):
        self.forth = {}
        self.back = {}
        self.kept = []  # keeps all visited objects alive, so that ids stay unique

    def pair(self, kind, a, b, path):
        """Record that a and b correspond; return False if that was known."""
        self.kept.append((a, b))
        known = (kind, a) in self.forth
        assert self.forth.setdefault((kind, a), b) == b, f"{path}: other sharing"
        assert self.back.setdefault((kind, b), a) == a, f"{path}: other sharing"
        return not known

    def compare(self, a, b, path="root"):
        assert type(a) is type(b), f"{path}: {type(a)} is not {type(b)}"
        if isinstance(a, (type(None), bool, int, complex, str, bytes, type, enum.Enum)):
            assert a == b or a != a, f"{path}: {a!r} is not {b!r}"
            return
        if isinstance(a, float):
            assert a == b or (a != a and b != b), f"{path}: {a!r} is not {b!r}"
            return
        self.kept.append((a, b))
        if a is not b and not self.pair("object", id(a), id(b), path):
            return
        if isinstance(a, torch.Tensor):
            self.tensors(a, b, path)
        elif isinstance(a, torch.UntypedStorage):
            self.storages(a, b, path)
        elif isinstance(a, torch.storage.TypedStorage):
            assert a.dtype == b.dtype, path
            self.storages(a._untyped_storage, b._untyped_storage, path)
        elif isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.flags.writeable) == (b.dtype, b.shape, b.flags.writeable)
            if a.dtype == object:
                self.compare(a.tolist(), b.tolist(), path)
            else:
                self.compare(a.tobytes(), b.tobytes(), path)
        else:
            self.objects(a, b, path)

    def storages(self, a, b, path):
        assert a.device == b.device, path
        assert a.nbytes() == b.nbytes(), path
        self.kept.append((a, b))
        if a.device.type == "meta":
            return
        if a.data_ptr() and not self.pair("storage", a._cdata, b._cdata, path):
            return
        assert bytes_of(a) == bytes_of(b), f"{path}: other bytes"

    def tensors(self, a, b, path):
        names = ["dtype", "layout", "device", "requires_grad", "is_leaf", "is_nested"]
        for name in names if a.is_nested else [*names, "shape"]:
            assert getattr(a, name) == getattr(b, name), f"{path}: other {name}"
        assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg()), path
        self.compare(vars(a), vars(b), path + ".__dict__")
        self.compare(a._backward_hooks, b._backward_hooks, path + "._backward_hooks")
        if type(a).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return  # its parts are in its __dict__
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.contents(a, b, path)

    def contents(self, a, b, path):
        if a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced(), path
            parts = ("_indices", "_values")
        elif a.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = ("crow_indices", "col_indices", "values")
        elif a.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = ("ccol_indices", "row_indices", "values")
        elif a.is_nested:
            parts = ("values", "_nested_tensor_size", "_nested_tensor_strides")
        else:
            assert a.stride() == b.stride(), f"{path}: other stride"
            assert a.storage_offset() == b.storage_offset(), f"{path}: other offset"
            if a.device.type != "meta":
                self.storages(a.untyped_storage(), b.untyped_storage(), path)
            if not a.is_quantized:
                return
            assert a.qscheme() == b.qscheme(), path
            parts = ("q_scale", "q_zero_point")
            if a.qscheme() == torch.per_channel_affine:
                parts = ("q_per_channel_scales", "q_per_channel_zero_points")
        for part in parts:
            self.compare(getattr(a, part)(), getattr(b, part)(), f"{path}.{part}")

    def objects(self, a, b, path):
        if isinstance(a, (set, frozenset)):
            assert a == b, path
        elif isinstance(a, (list, tuple, collections.deque)):
            assert len(a) == len(b), path
            for i, (one, other) in enumerate(zip(a, b, strict=True)):
                self.compare(one, other, f"{path}[{i}]")
        elif isinstance(a, dict):
            self.compare(list(a), list(b), f"{path}.keys")
            self.compare(list(a.values()), list(b.values()), f"{path}.values")
        for name in (n for c in type(a).__mro__ for n in getattr(c, "__slots__", ()) or ()):
            if isinstance(a, Slotted):
                self.compare(getattr(a, name), getattr(b, name), f"{path}.{name}")
        if isinstance(getattr(a, "__dict__", None), dict):
            self.compare(vars(a), vars(b), f"{path}.__dict__")
        elif not isinstance(a, (list, tuple, dict, set, frozenset, collections.deque, Slotted)):
            assert a == b or repr(a.__reduce_ex__(2)) == repr(b.__reduce_ex__(2)), path


def assert_same(a, b):
    Comparison().compare(a, b)


def outcome(function, *args, **kwargs):
    """Return a call's outcome: ("returned", value), or type and message of its exception."""
    try:
        return ("returned", function(*args, **kwargs))
    except Exception as error:
        return (type(error), str(error))


def assert_same_outcome(a, b):
    if a[0] == "returned" == b[0]:
        assert_same(a[1], b[1])
    else:
        assert a == b
