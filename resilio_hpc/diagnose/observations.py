"""The observations of a pair check's rounds, node by node. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal

from msgspec import Struct

Fault = Literal["absent", "not_ready", "silent", "crashed", "hung", "wrong_result", "failed"]


class RoundOutcome(Enum):
    """How a round ended for one node.

    ``ALONE``: it failed by itself, before its partner joined. ``TOGETHER``: the collective of the pair failed, which
    either may have caused. ``WAITED``: it did its part; the partner failed alone.
    """

    PASSED = "passed"
    ALONE = "failed alone"
    TOGETHER = "failed together"
    WAITED = "waited"


class Times(Struct, frozen=True):
    """Seconds per operation in each block.

    Of one matrix product on the slowest device, of one all-reduce; without the time that the node (in a collective:
    either node) waited for a CPU. ``waited``: that share of its time while it computed.
    """

    compute: tuple[float, ...] = ()
    collective: tuple[float, ...] = ()
    device: str = ""
    waited: float = 0.0


class Observation(Struct, frozen=True):
    """One node in one round. ``partner`` "": it had none, and only computed."""

    node: str
    partner: str
    outcome: RoundOutcome
    times: Times = Times()
    fault: Fault | None = None
    detail: str = ""


Round = tuple[Observation, ...]
Pair = tuple[str, ...]  # two nodes, or a single one


def by_node(nodes: Iterable[str], history: Sequence[Round]) -> dict[str, list[Observation]]:
    """Return the observations of each node, oldest first."""
    found: dict[str, list[Observation]] = {node: [] for node in nodes}
    for done in history:
        for seen in done:
            found[seen.node].append(seen)
    return found
