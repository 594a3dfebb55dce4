"""Which nodes are slow. Pure (DLR-3).

A node's time is its fastest block: what else runs there hits some blocks, a throttled device or a bad link all of them.
It is slow where that is far above the median of all nodes, by a ratio that grows with the noise: by how much the blocks
of a typical node (its slowest left out), and the healthy nodes, differ among themselves. A second round with a partner
that is not slow has to confirm it, by the first round's median and by that partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from resilio_hpc.diagnose.observations import Round, RoundOutcome, Times
from resilio_hpc.diagnose.policy import PairPolicy

LEAST_NODES = 3  # of two nodes, neither is the measure
_SIGMA = 1.4826  # standard deviations in a median absolute deviation, for a normal distribution


class Slow(Struct, frozen=True):
    """A slow node.

    ``ratio``: to the median of all nodes, in the round where it was smaller; ``what``: compute or collective.
    """

    node: str
    what: str
    ratio: float
    confirmed: bool


class _Scale(Struct, frozen=True):
    """The usual seconds per operation, and the limit beyond which a node is slow."""

    usual_s: float
    limit_s: float

    def slow(self, value_s: float) -> bool:
        return value_s > self.limit_s


def find(history: Sequence[Round], policy: PairPolicy) -> tuple[Slow, ...]:
    """Return the slow nodes, each once; those that a second round has not confirmed yet are marked."""
    found: dict[str, Slow] = {}
    for what, ratio in (("compute", policy.slow_compute), ("collective", policy.slow_collective)):
        for slow in _find(history, policy, what, ratio):
            found.setdefault(slow.node, slow)
    return tuple(found.values())


def too_many(slow: Sequence[Slow], measured: int, policy: PairPolicy) -> bool:
    """Return whether so many are slow that they are another kind of node, or have a common cause."""
    return len(slow) > max(1, int(measured * policy.slow_share))


def _find(history: Sequence[Round], policy: PairPolicy, what: str, ratio: float) -> list[Slow]:
    first = _blocks(history[0], what) if history else {}
    if len(first) < LEAST_NODES:
        return []
    scale = _scale(first, ratio, policy)
    found = []
    for node, blocks in first.items():
        if scale.slow(min(blocks)):
            later = [_later(done, node, what, scale, ratio, policy) for done in history[1:]]
            ratios = [one for one in later if one is not None]
            if 0.0 not in ratios:
                least = min([min(blocks) / scale.usual_s, *ratios])
                found.append(Slow(node, what, least, confirmed=bool(ratios)))
    return found


def _later(done: Round, node: str, what: str, scale: _Scale, ratio: float, policy: PairPolicy) -> float | None:
    """Return the ratio in a later round, 0 where it is not slow there; None where that round does not tell.

    Then it was not timed, or the two nodes' noise is as large as the difference: another round may tell.
    """
    blocks = _blocks(done, what)
    mine = blocks.get(node)
    partner = next((seen.partner for seen in done if seen.node == node), "")
    if mine is None or partner not in blocks:
        return None
    now = min(mine)
    if not scale.slow(now):
        return 0.0
    if what == "compute":  # a collective takes the same time on both
        beside = min(blocks[partner])
        if now <= _limit(beside, ratio, policy):
            return 0.0
        if now <= _limit(beside, ratio * _unrest([mine, blocks[partner]]), policy):
            return None
    return now / scale.usual_s


def _blocks(done: Round, what: str) -> dict[str, tuple[float, ...]]:
    passed = [seen for seen in done if seen.outcome in (RoundOutcome.PASSED, RoundOutcome.WAITED)]
    return {seen.node: blocks for seen in passed if (blocks := _of(seen.times, what))}


def _of(times: Times, what: str) -> tuple[float, ...]:
    return times.compute if what == "compute" else times.collective


def _scale(nodes: Mapping[str, tuple[float, ...]], ratio: float, policy: PairPolicy) -> _Scale:
    best = [min(blocks) for blocks in nodes.values()]
    usual = median(best)
    healthy = [value for value in best if value <= usual * ratio] or best
    deviation = _SIGMA * median(abs(value - usual) for value in healthy)
    limit = _limit(usual, ratio * _unrest(list(nodes.values())), policy)
    return _Scale(usual, max(limit, usual + policy.slow_deviations * deviation))


def _limit(usual_s: float, ratio: float, policy: PairPolicy) -> float:
    return max(usual_s * ratio, usual_s + policy.least_difference_s)


def _unrest(nodes: Sequence[tuple[float, ...]]) -> float:
    """Return the ratio of a typical node's slowest block but one to its fastest: 1 on a quiet machine."""
    return median(sorted(blocks)[-2:][0] / min(blocks) for blocks in nodes)
