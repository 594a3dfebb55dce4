"""Plain Python values as JSON, and back: of the same type, to the last bit. Containers of tensors are in ``tree``.

JSON has fewer types than Python. Other types become an object with one key that begins with ``$`` (``{"$bytes":
"base64"}``). Nothing in it is code: decoding builds values of the types named here and no others.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
import re
import struct
import sys
import uuid
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from typing import Any, NamedTuple

from resilio_hpc.ckpt.state import numpy_types, tensors
from resilio_hpc.core.errors import UsageError

MAX_KEY_DEPTH = 20
"""Of tuples and sets inside of each other."""
_EXACT_IN_JSON = 1 << 53
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON would join two of them to one character
SCALARS = frozenset({type(None), bool, int, float, str})
"""Types of what JSON has itself, nearly always."""
BUILTIN_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
}
"""What a defaultdict may make of nothing."""


class _Kind(NamedTuple):
    """How a type is written: its tag, the JSON node of a value, and the value of a node."""

    tag: str
    node_of: Callable[[Any], Any]
    value_of: Callable[[Any], Any]


def is_json_text(text: str) -> bool:
    """Return whether JSON holds this text as it is."""
    return text.isascii() or not _SURROGATE.search(text)


def are_json(values: Any, kinds: set[type]) -> bool:
    """Return whether each of these is its own JSON, as ``encode`` would make it. ``kinds``: their types.

    Fast for lists of millions of numbers, which are common.
    """
    if not kinds <= SCALARS:
        return False
    for kind in kinds & {int, float, str}:
        some = values if len(kinds) == 1 else [value for value in values if type(value) is kind]
        if kind is int and not -_EXACT_IN_JSON < min(some) <= max(some) < _EXACT_IN_JSON:
            return False
        if kind is float and not all(map(math.isfinite, some)):
            return False
        if kind is str and not all(map(is_json_text, some)):
            return False
    return True


def encode(value: Any, depth: int = 0) -> Any:
    """Return the JSON node of a plain value. Raises UsageError, without its place, for a value that cannot be held."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if is_json_text(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
    if kind is int:
        return value if -_EXACT_IN_JSON < value < _EXACT_IN_JSON else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is set or kind is frozenset or kind is tuple:
        if depth >= MAX_KEY_DEPTH:
            raise UsageError(f"tuples and sets are nested more than {MAX_KEY_DEPTH} deep")
        items = value if kind is tuple else _in_order(value)
        return {f"${kind.__name__}": [encode(item, depth + 1) for item in items]}
    known = _KINDS.get(kind)
    if known is not None:
        return {known.tag: known.node_of(value)}
    known = _RARE_KINDS.get(kind)
    if known is not None:
        node = known.node_of(value)
        if repr(known.value_of(node)) != repr(value):  # such as the name of a time zone
            raise UsageError(f"{value!r} cannot be held exactly")
        return {known.tag: node}
    return _encode_library_value(value)


def _in_order(values: Any) -> list[Any]:
    """Return a set's values in an order that is the same for equal sets, so that the same state has the same text."""
    kinds = set(map(type, values))
    return sorted(values) if kinds in ({int}, {str}) else sorted(values, key=repr)


def _encode_library_value(value: Any) -> Any:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        if type(value) is torch.Size:
            return {"$size": list(value)}
        if type(value) is torch.dtype:
            return {"$torch_dtype": str(value).removeprefix("torch.")}
        if type(value) is torch.device:
            return {"$device": str(value)}
    if numpy is not None:
        if isinstance(value, numpy.dtype):
            return {"$numpy_dtype": numpy_types.text_of(value)}
        if type(value) is numpy.str_:  # in an array numpy strips zeros off the end
            return {"$numpy_str": encode("".join(value))}  # str() strips them, too
        if type(value) is numpy.bytes_:
            return {"$numpy_bytes": _text(bytes(value))}
        if isinstance(value, numpy.generic) and type(value) is value.dtype.type:
            return {"$scalar": [numpy_types.text_of(value.dtype), _text(numpy_types.bytes_of(value))]}
    raise UsageError(f"a {name_of(type(value))} cannot be held; {_advice(value)}")


def name_of(kind: type) -> str:
    """Return a class's name for messages."""
    return f"{kind.__qualname__} ({kind.__module__}.{kind.__qualname__})"


def _advice(value: Any) -> str:
    """Return what to save instead. A class is code, which no checkpoint holds."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_asdict"):
        return "save its _asdict()"
    if hasattr(kind, "__dataclass_fields__"):
        return "save dataclasses.asdict() of it"
    if hasattr(kind, "__members__"):  # of an Enum
        return "save its value or its name"
    if callable(value) and not isinstance(value, type):
        return "give what it returns"
    base = next((base for base in kind.__mro__[1:] if base in BUILTIN_TYPES.values()), None)
    if base is not None:
        return f"save {base.__name__}() of it"
    return "save tensors, arrays and plain values, or give it state_dict() and load_state_dict()"


# -- reading -----------------------------------------------------------------------------------------------------------


def decode(tag: str, node: Any, whole: Callable[[Any], Any]) -> Any:
    """Return the value of ``{tag: node}``; ``whole`` decodes the contents of sets.

    Raises KeyError for a tag of no plain value, ValueError or TypeError for a node that ``encode`` does not make.
    """
    if tag == "$set":
        return set(map(whole, node))
    if tag == "$frozenset":
        return frozenset(map(whole, node))
    return _DECODERS[tag](node)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _data(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _string(node: Any) -> str:
    """Return the str of a node that ``encode`` made."""
    if isinstance(node, dict):
        return bytes.fromhex(node["$str"]).decode("utf-8", "surrogatepass")
    if type(node) is not str:
        raise ValueError("no text")
    return node


def _number(node: Any) -> int:
    if isinstance(node, dict):
        return int(node["$int"], 16)
    if type(node) is not int:
        raise ValueError("no whole number")
    return node


def _stream_node(stream: BytesIO) -> list[Any]:
    return [_text(stream.getvalue()), stream.tell()]


def _stream(node: list[Any]) -> BytesIO:
    stream = BytesIO(_data(node[0]))
    stream.seek(_number(node[1]))
    return stream


def _moment_node(moment: Any) -> list[Any]:
    return [moment.isoformat(), moment.fold]


def _moment(kind: Any) -> Callable[[list[Any]], Any]:
    return lambda node: kind.fromisoformat(node[0]).replace(fold=node[1])


def _torch_size(node: list[int]) -> Any:
    import torch

    return torch.Size(node)


def _torch_device(name: str) -> Any:
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _numpy_str(node: Any) -> Any:
    import numpy

    return numpy.str_(_string(node))


def _numpy_bytes(node: str) -> Any:
    import numpy

    return numpy.bytes_(_data(node))


def _slice(node: list[Any]) -> slice:
    return slice(*(None if part is None else _number(part) for part in node))


def _slice_part(cut: slice) -> list[Any]:
    parts = (cut.start, cut.stop, cut.step)
    if any(part is not None and type(part) is not int for part in parts):
        raise UsageError("a slice of anything but whole numbers cannot be held")
    return [encode(part) for part in parts]


def _paths(kind: Any) -> _Kind:
    return _Kind(f"${kind.__name__}", lambda path: encode(str(path)), lambda node: kind(_string(node)))


_KINDS: dict[type, _Kind] = {
    bytes: _Kind("$bytes", _text, _data),
    bytearray: _Kind("$bytearray", _text, lambda text: bytearray(_data(text))),
    complex: _Kind(
        "$complex",
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
        lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    ),
    BytesIO: _Kind("$bytesio", _stream_node, _stream),
    range: _Kind(
        "$range", lambda r: [encode(n) for n in (r.start, r.stop, r.step)], lambda node: range(*map(_number, node))
    ),
    slice: _Kind("$slice", _slice_part, _slice),
    Fraction: _Kind(
        "$fraction",
        lambda value: [encode(value.numerator), encode(value.denominator)],
        lambda node: Fraction(*map(_number, node)),
    ),
    type(...): _Kind("$ellipsis", lambda _: 0, lambda _: ...),
}
_RARE_KINDS: dict[type, _Kind] = {  # each value is read back as a check
    type(pathlib.Path()): _Kind("$path", lambda path: encode(str(path)), lambda node: pathlib.Path(_string(node))),
    pathlib.PurePosixPath: _paths(pathlib.PurePosixPath),
    pathlib.PureWindowsPath: _paths(pathlib.PureWindowsPath),
    Decimal: _Kind("$decimal", str, Decimal),
    uuid.UUID: _Kind("$uuid", str, uuid.UUID),
    datetime.date: _Kind("$date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: _Kind("$datetime", _moment_node, _moment(datetime.datetime)),
    datetime.time: _Kind("$time", _moment_node, _moment(datetime.time)),
    datetime.timedelta: _Kind(
        "$timedelta",
        lambda span: [span.days, span.seconds, span.microseconds],
        lambda node: datetime.timedelta(*node),
    ),
}
CLASSES: list[Any] = [
    BytesIO, pathlib.PosixPath, Decimal, Fraction, range, slice, uuid.UUID, datetime.date, datetime.datetime,
    datetime.time, datetime.timedelta, datetime.timezone,
]  # fmt: skip
"""Those that torch does not make by itself where it loads without code, and a checkpoint can hold."""
_DECODERS: dict[str, Callable[[Any], Any]] = {
    **{kind.tag: kind.value_of for kind in (*_KINDS.values(), *_RARE_KINDS.values())},
    "$str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "$int": lambda text: int(text, 16),
    "$float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "$size": _torch_size,
    "$torch_dtype": lambda name: tensors.torch_dtype(name),
    "$device": _torch_device,
    "$numpy_dtype": lambda text: numpy_types.dtype_of(text),
    "$numpy_str": _numpy_str,
    "$numpy_bytes": _numpy_bytes,
    "$scalar": lambda node: numpy_types.scalar_of(node[0], _data(node[1])),
}
