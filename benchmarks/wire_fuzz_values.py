"""Random values of any msgspec type, made from its description, so that new messages are fuzzed without being told.

Half of the values are such that they lead somewhere: nodes of the job, the epoch and round that are on, known kinds.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any, get_args

import msgspec
from msgspec import inspect

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.launch.protocol.node_list import NodeEntry, NodeList

NUMBERS = (-1, 0, 1, 2, 3, 7, 8, 127, 128, 65535, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-9, 1e9, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "x",
    "é" * 40,
    "a\nb\0c",
    "../../etc/passwd",
    "n" * 5000,
    "%s{}",
    "\u202e",
    "node[1-9]",
    "💥",
    "n[0-99999999999]",
    "n[1-9",
    "n[9-1]",
    "n[0-9][0-9][0-9][0-9][0-9][0-9]",
    "n0,n0,n0",
    "n[0-19999]",
    ":",
    "a:b:c",
    "h:99999",
    "h:65535",
    "n0\n",
    "A.b-c_9",
)
WORDS: dict[str, tuple[str, ...]] = {
    "kind": ("exit", "signal", "early_exit", "restore_failed", "spawn", "spawner_lost", "store_lost", "lease_ended"),
    "source": ("memory", "committed"),
    "signal": ("USR2", "TERM", "INT"),
    "incarnation": ("a", "b", "c"),
    "endpoint": ("127.0.0.1:1", "127.0.0.1:2"),
    "stage": ("committed", "failed"),
    "names": ("", "n0", "n[0-3]", "n0,n2", "n[1-3],n0"),
    "witness": ("0.0", "1.1", "4.2"),
    "topology": ("", "s0.s1.n1", "s0.n2", "..."),
}
MOSTLY = 0.85


class Values:
    """``nodes``, ``epoch`` and ``round`` may be changed at any time: what is drawn is mostly near them."""

    def __init__(self, rng: Random, nodes: tuple[str, ...] = ("n0", "n1", "n2", "n3")) -> None:
        self.rng = rng
        self.nodes = nodes
        self.epoch = 1
        self.round = 0
        self.now = 1000.0
        self._types: dict[Any, Any] = {}

    def message(self, union: Any) -> Any:
        """Return a valid message of one of the union's types."""
        return self._struct(self.rng.choice(get_args(union)), 0)

    def wrong_fields(self, union: Any) -> bytes:
        """Return a message's map in which a field is missing, unknown, of another type, or whose tag is."""
        rng = self.rng
        try:
            fields: dict[Any, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(self.message(union)))
        except msgspec.MsgspecError:  # a timestamp that is none
            fields = {"type": "Hello"}
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(list(fields))
            change = rng.randrange(5)
            if change == 0:
                del fields[name]
            elif change == 1:
                fields[rng.choice(["extra", "__class__", "", "type"])] = self._any(0)
            elif change == 2:
                fields[name] = self._any(0)
            elif change == 3:
                fields[rng.choice([1, None, b"x", True])] = fields.pop(name)
            else:
                fields["type"] = rng.choice(["Exec", "Hello", "", 1, None, "Beat", ["Hello"]])
            if not fields:
                break
        return msgspec.msgpack.encode(fields)

    # -- by type -----------------------------------------------------------------------------------------------

    def _struct(self, kind: Any, depth: int) -> Any:
        if kind not in self._types:
            self._types[kind] = inspect.type_info(kind)
        described = self._types[kind]
        if kind is NodeList:
            return self._node_list()
        values: dict[str, Any] = {}
        for field in described.fields:
            if not field.required and self.rng.random() < 0.4:
                continue
            values[field.name] = self._value(field.type, field.name, depth)
        try:
            return kind(**values)
        except (ValueError, ResilioError):  # it checks itself where it is made, and so where it is decoded
            return self._struct(kind, depth)

    def _node_list(self) -> NodeList:
        nodes = self.rng.sample(self.nodes, self.rng.randint(0, len(self.nodes)))
        return NodeList.of(
            [
                NodeEntry(node, self.rng.choice(["", node, "10.0.0.1"]), self.rng.choice([0, 1, 2, 20001]))
                for node in nodes
            ]
        )

    def _value(self, kind: Any, name: str, depth: int) -> Any:
        rng = self.rng
        if isinstance(kind, inspect.StructType):
            return self._struct(kind.cls, depth + 1)
        if isinstance(kind, inspect.UnionType):
            return self._value(rng.choice(kind.types), name, depth)
        if isinstance(kind, inspect.VarTupleType | inspect.ListType):
            items = (self._value(kind.item_type, name, depth + 1) for _ in range(rng.choice([0, 0, 1, 2, 5])))
            return tuple(items) if isinstance(kind, inspect.VarTupleType) else list(items)
        if isinstance(kind, inspect.TupleType):
            return tuple(self._value(item, name, depth + 1) for item in kind.item_types)
        if isinstance(kind, inspect.DictType):
            return {self._value(kind.key_type, name, depth + 1): self._value(kind.value_type, name, depth + 1)
                    for _ in range(rng.choice([0, 1, 3]))}  # fmt: skip
        if isinstance(kind, inspect.LiteralType):
            return rng.choice(kind.values)
        if isinstance(kind, inspect.EnumType):
            return rng.choice(list(kind.cls))
        scalar = {
            inspect.IntType: self._int, inspect.FloatType: self._float, inspect.StrType: self._text,
            inspect.BoolType: self._flag, inspect.NoneType: self._none, inspect.AnyType: self._free,
            inspect.BytesType: self._bytes,
        }[type(kind)]  # fmt: skip
        return scalar(kind, name)

    def _int(self, kind: Any, name: str) -> int:
        rng = self.rng
        near = {"epoch": self.epoch, "round": self.round, "known": self.round, "prepared": self.round}.get(name)
        if near is not None and rng.random() < MOSTLY:
            value = near + (rng.choice([-1, 1]) if rng.random() < 0.1 else 0)
        elif rng.random() < MOSTLY:
            value = rng.randint(0, 12)
        else:
            value = rng.choice(NUMBERS)
        low = kind.ge if kind.ge is not None else -(1 << 63)
        high = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else (1 << 64) - 1)
        return int(min(max(value, low), high))

    def _float(self, kind: Any, name: str) -> float:
        rng = self.rng
        if rng.random() < MOSTLY:
            return self.now + rng.uniform(-20, 20)
        value = rng.choice(FLOATS)
        bounded = kind.ge is not None or kind.le is not None
        if bounded and value != value:
            return 0.0
        return min(max(value, kind.ge if kind.ge is not None else value), kind.le if kind.le is not None else value)

    def _text(self, kind: Any, name: str) -> str:
        """Within the pattern where there is one: what does not fit is refused before any code sees it."""
        text = self._any_text(name)
        while kind.pattern is not None and not re.search(kind.pattern, text):
            text = self._any_text(name)
        return text

    def _any_text(self, name: str) -> str:
        rng = self.rng
        if rng.random() < MOSTLY:
            return rng.choice(WORDS.get(name, self.nodes))
        if rng.random() < 0.5:
            return f"new{rng.getrandbits(64):x}"
        return rng.choice(TEXTS)

    def _flag(self, kind: Any, name: str) -> bool:
        return self.rng.random() < 0.5

    def _none(self, kind: Any, name: str) -> None:
        return None

    def _bytes(self, kind: Any, name: str) -> bytes:
        return self.rng.randbytes(self.rng.randint(0, 40))

    def _free(self, kind: Any, name: str) -> Any:
        return self._any(0)

    def _any(self, depth: int) -> Any:
        """Anything that msgpack can say."""
        rng = self.rng
        choice = rng.randrange(9 if depth < 4 else 7)
        if choice == 7:
            return [self._any(depth + 1) for _ in range(rng.randint(0, 3))]
        if choice == 8:
            return {str(rng.randrange(5)): self._any(depth + 1) for _ in range(rng.randint(0, 3))}
        simple = (None, True, rng.choice(NUMBERS), rng.choice(FLOATS), rng.choice(TEXTS), b"\xff\x00", self._ext())
        return simple[choice]

    def _ext(self) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(
            self.rng.choice([-128, -1, 0, 5, 127]), self.rng.randbytes(self.rng.choice([0, 4, 8, 12]))
        )
