"""How each node stands after the rounds so far: known to be good, bad, or in doubt. Pure.

A node is *good* once it has passed with a partner. When a pair fails, that counts against whoever is not known to be
good. A node is *bad* once two rounds have counted against it, and the last of them leaves nobody else to blame: it
failed by itself, or its partner is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.diagnose.observations import Observation, Outcome, Round


@dataclass(frozen=True)
class Standing:
    """``by_itself``: the bad nodes that needed no partner to be found out."""

    good: frozenset[str]
    bad: frozenset[str]
    by_itself: frozenset[str]


def standing(history: Sequence[Round]) -> Standing:
    """After these rounds."""
    good: set[str] = set()
    bad: set[str] = set()
    alone: set[str] = set()
    strikes: dict[str, int] = {}
    for done in history:
        before = frozenset(good)
        for seen in done:
            bad.discard(seen.node)
            if seen.outcome is Outcome.PASSED and seen.partner:
                good.add(seen.node)
            elif _counts(seen, before):
                good.discard(seen.node)
                strikes[seen.node] = strikes.get(seen.node, 0) + 1
                if strikes[seen.node] > 1 and (seen.outcome is Outcome.ALONE or seen.partner in before):
                    bad.add(seen.node)
                    (alone.add if seen.outcome is Outcome.ALONE else alone.discard)(seen.node)
    return Standing(frozenset(good), frozenset(bad), frozenset(alone & bad))


def _counts(seen: Observation, good: frozenset[str]) -> bool:
    """Whether what was seen counts against the node itself."""
    if seen.outcome is Outcome.TOGETHER:
        return seen.node not in good or seen.partner in good
    return seen.outcome is Outcome.ALONE
