"""States of everything that Python, numpy and torch offer, and whether two are the same to the last bit."""

from __future__ import annotations

import datetime
import enum
import io
import pathlib
import struct
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from resilio_hpc.ckpt.state.numpy_types import bytes_of

Pair = namedtuple("Pair", "a b")


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Point:
    x: int = 0


class Text(str):
    __slots__ = ()


class Odd:
    pass


def quantised() -> torch.Tensor:
    """One of torch's old kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch gives them up
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


REFUSED: dict[str, Any] = {
    "Pair": Pair(1, 2),
    "Color": Color.RED,
    "Level": Level.LOW,
    "Point": Point(),
    "Text": Text("a"),
    "Odd": Odd(),
    "function": lambda: 0,
    "type": int,
    "generator": (number for number in ()),
    "memoryview": memoryview(b"a"),
    "Generator": np.random.default_rng(1),
    "MaskedArray": np.ma.array([1]),
    "recarray": np.zeros(1, [("a", "f4")]).view(np.recarray),
    "dtype object": np.array([None]),
    "StringDType": np.array(["a"], dtype=np.dtypes.StringDType()),
    "defaultdict that makes": defaultdict(lambda: 0),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.zeros(2, device="meta"),
    "quantised": quantised(),
    "31": torch.zeros((1,) * 32),
}
"""By a word of the message: what a checkpoint cannot hold."""

CODES = "?bBhHiIlLqQefdgFDG"
simple_dtypes = st.one_of(
    st.sampled_from([np.dtype(code).newbyteorder(order) for code in CODES for order in "<>"]),
    st.integers(1, 5).map(lambda size: np.dtype(f"S{size}")),
    st.integers(1, 5).map(lambda size: np.dtype(f"<U{size}")),
    st.integers(1, 9).map(lambda size: np.dtype(f"V{size}")),
    st.sampled_from(["<M8[ns]", ">M8[D]", "<m8[25s]", "<m8"]).map(np.dtype),
)


@st.composite
def structures(draw: Any) -> Any:
    """Structured dtypes: aligned, with gaps, with fields in any order, nested, of arrays."""
    inner = st.one_of(simple_dtypes, st.just(np.dtype([("u", "i1"), ("v", "<f8")])))
    names = draw(st.lists(st.sampled_from(["a", "b", "ü", "x y"]), min_size=1, max_size=3, unique=True))
    formats = [draw(inner) for _ in names]
    formats = [(one, (2,)) if draw(st.booleans()) else one for one in formats]
    made = np.dtype({"names": names, "formats": formats}, align=draw(st.booleans()))
    if draw(st.booleans()):
        offsets = [made.fields[name][1] + 3 for name in names]
        made = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": made.itemsize + 5})
    return made


@st.composite
def numpy_arrays(draw: Any) -> Any:
    """Arrays of any dtype, bytes and layout."""
    dtype = draw(simple_dtypes | structures())
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    size = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    if dtype.kind == "U":
        data = np.array(draw(st.text(max_size=3)), dtype=dtype).tobytes() * int(np.prod(shape))
    made = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if size else np.zeros(shape, dtype)
    layout = draw(st.sampled_from(["c", "f", "reversed"]))
    if layout == "f":
        return np.asfortranarray(made)
    return made[::-1] if layout == "reversed" and made.ndim else made


TORCH_DTYPES = sorted(
    {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)


@st.composite
def torch_tensors(draw: Any) -> Any:
    """Tensors of any dtype and bytes, as a whole or as a view."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape, dtype=int))
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    if not count:
        return torch.empty(shape, dtype=torch.uint8).to(torch.float32)
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    return draw(views(whole))


@st.composite
def views(draw: Any, whole: torch.Tensor) -> Any:
    """The tensor, or a view of some of it."""
    found = whole
    for kind in draw(st.lists(st.sampled_from(["t", "flip", "slice", "conj", "neg", "expand"]), max_size=3)):
        if kind == "t" and found.ndim >= 2:
            found = found.transpose(0, 1)
        elif kind == "slice" and found.ndim:
            found = found[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))]
        elif kind == "conj" and found.is_complex():
            found = found.conj()
        elif kind == "neg" and found.dtype in (torch.float32, torch.float64, torch.complex64):
            found = torch._neg_view(found)
        elif kind == "expand":
            found = found.expand(2, *found.shape)
    return found


moments = st.datetimes() | st.datetimes(timezones=st.just(datetime.timezone(datetime.timedelta(minutes=-90))))
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    st.tuples(st.binary(max_size=5), st.integers(0, 9)).map(lambda pair: stream(*pair)),
    st.text(max_size=5).map(lambda text: pathlib.PurePosixPath(text.replace("\0", ""))),
    st.sampled_from([pathlib.Path("a/b"), pathlib.Path("/"), pathlib.PureWindowsPath("c:\\x"), ..., np.str_("a\0")]),
    st.tuples(st.integers(), st.integers(), st.integers(1, 9)).map(lambda triple: range(*triple)),
    st.tuples(st.none() | st.integers(), st.none() | st.integers(), st.none()).map(lambda triple: slice(*triple)),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.dates(),
    moments,
    st.times(),
    st.timedeltas(),
    st.sampled_from([torch.Size([2, 0]), torch.bfloat16, torch.qint8, torch.device("cuda", 1), torch.device("cpu")]),
    (simple_dtypes | structures()),
    st.binary(max_size=4).map(lambda data: np.bytes_(data + b"\0")),
    st.text(max_size=3).map(np.str_),
    simple_dtypes.map(lambda dtype: np.zeros(1, dtype)[0]),
    st.floats(width=32).map(np.float32),
    structures().map(lambda dtype: (np.ones if numeric(dtype) else np.zeros)(1, dtype)[0]),
)
keys = st.one_of(
    st.text(max_size=3),
    st.sampled_from(["$tuple", "$", "$state", "0", "", "parameters"]),
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.binary(max_size=2),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.none(),
    st.frozensets(st.integers(), max_size=2),
)
hashable = st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3) | st.tuples(st.integers(), st.text())
leaves = plain | numpy_arrays() | torch_tensors() | st.frozensets(hashable, max_size=3) | st.sets(hashable, max_size=3)


def numeric(dtype: Any) -> bool:
    """Can it hold ones?"""
    return all(np.dtype(dtype[name].base).kind in "biufc" for name in dtype.names)


def containers(inner: Any) -> Any:
    """Of these values."""
    dicts = st.dictionaries(keys, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    factories = st.sampled_from([None, int, list, dict])
    return st.one_of(
        lists,
        lists.map(tuple),
        st.tuples(lists, st.none() | st.integers(3, 5)).map(lambda pair: deque(*pair)),
        dicts,
        dicts.map(OrderedDict),
        st.tuples(factories, dicts).map(lambda pair: defaultdict(*pair)),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    )


states = st.recursive(leaves, containers, max_leaves=25)


def stream(data: bytes, at: int) -> io.BytesIO:
    """At a place of it, or behind its end."""
    made = io.BytesIO(data)
    made.seek(at)
    return made


def same(one: Any, other: Any) -> bool:
    """Are they of the same types, with the same bits, in the same order?"""
    if isinstance(one, np.dtype) and isinstance(other, np.dtype):
        return one == other and one.itemsize == other.itemsize and one.isalignedstruct == other.isalignedstruct
    if isinstance(one, np.generic) and isinstance(other, np.generic):  # C's long and long long are one dtype
        return one.dtype == other.dtype and bytes_of(one) == bytes_of(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and raw(one) == raw(other)
    if isinstance(one, dict):
        if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
            return False
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple | deque):
        lengths = (len(one), getattr(one, "maxlen", None)) == (len(other), getattr(other, "maxlen", None))
        return lengths and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue() and one.tell() == other.tell()
    if isinstance(one, Decimal | Fraction | uuid.UUID | datetime.date | datetime.time):
        return repr(one) == repr(other)
    return bool(one == other)


def raw(array: Any) -> bytes:
    """Return the bytes of an array, those between the fields of a structure too, where numpy's copies have any."""
    made: bytes = array.view(f"V{array.itemsize}").tobytes()
    return made


def bits(tensor: torch.Tensor) -> bytes:
    """Of its elements in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = (plain.view(torch.uint8) if plain.itemsize == 1 else plain).contiguous().reshape(-1)
    return bytes(plain.as_strided(plain.shape, (1,)).view(torch.uint8).numpy()) if plain.numel() else b""
