"""A list of nodes in its encoded form: run-length coded, since every agent gets it.

Four thousand nodes named in a row, with as many slots each, take about a hundred bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.hostlist import compress, expand

Value = TypeVar("Value")
MAX_NODES = 20_000
HOST_NAME = r"^[A-Za-z0-9_]([A-Za-z0-9._-]{0,253}[A-Za-z0-9_])?\Z"
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_is_host_name = re.compile(HOST_NAME).match


class NodeEntry(NamedTuple):
    """One node: its name, the address under which others reach it, and a number with the meaning of the list."""

    node: str
    address: str
    number: int


class NodeList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs of nodes. ``names``: a host list in order; the others are (count, value) runs.

    An address "": the node's name.
    """

    names: str = ""
    addresses: tuple[tuple[Length, str], ...] = ()
    numbers: tuple[tuple[Length, Number], ...] = ()

    def __post_init__(self) -> None:
        """Refuse, when it is decoded, a node list whose parts do not fit each other."""
        try:
            count = len(nodes_of(self.names))
        except UsageError as error:
            raise ValueError(str(error)) from None
        for runs in (self.addresses, self.numbers):
            if sum(length for length, _ in runs) != count or any(length < 1 for length, _ in runs):
                raise ValueError(f"node list of {count} nodes with runs that do not fit")

    @classmethod
    def of(cls, entries: Sequence[NodeEntry]) -> NodeList:
        """Return the list of these entries."""
        return cls(
            compress([entry.node for entry in entries]),
            _runs("" if entry.address == entry.node else entry.address for entry in entries),
            _runs(entry.number for entry in entries),
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names in order."""
        return nodes_of(self.names)

    def entries(self) -> tuple[NodeEntry, ...]:
        """Return the entries of the list."""
        return _entries(self)


def _runs(values: Iterable[Value]) -> tuple[tuple[int, Value], ...]:
    return tuple((sum(1 for _ in group), value) for value, group in groupby(values))


@lru_cache(maxsize=64)
def nodes_of(names: str) -> tuple[str, ...]:
    """Return the names of a host list. Raises UsageError."""
    nodes = tuple(expand(names))
    if len(nodes) > MAX_NODES:
        raise UsageError(f"more than {MAX_NODES} nodes")
    for node in nodes:
        if not _is_host_name(node):
            raise UsageError(f"not a node's name: {node!r}")
    return nodes


@lru_cache(maxsize=64)
def set_of(names: str) -> frozenset[str]:
    """Return the names of a host list as a set. Raises UsageError."""
    return frozenset(nodes_of(names))


@lru_cache(maxsize=64)
def _entries(nodes: NodeList) -> tuple[NodeEntry, ...]:
    addresses = [value for length, value in nodes.addresses for _ in range(length)]
    numbers = [value for length, value in nodes.numbers for _ in range(length)]
    return tuple(
        NodeEntry(node, address or node, number)
        for node, address, number in zip(nodes.nodes, addresses, numbers, strict=True)
    )
