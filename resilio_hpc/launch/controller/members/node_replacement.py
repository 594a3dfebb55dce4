"""Which nodes a run goes on without after a test. Pure.

A node that computes wrongly or fails is always parted with. A slow one holds up all others, since ranks go in step:
it is parted with where a spare takes its place, or where the others alone are faster.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from resilio_hpc.diagnose.result import CheckResult
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts


def worth_replacing(
    result: CheckResult, members: Sequence[str], usable: Collection[str], shape: NodeCounts
) -> frozenset[str]:
    """Return the nodes to go on without: none where too few would be left, spares that failed included."""
    bad = frozenset(result.bad)
    ratios = {one.node: max(one.compute_ratio or 1.0, one.collective_ratio or 1.0) for one in result.nodes}
    slow = sorted(result.slow, key=lambda node: -ratios[node])
    unfit = bad if shape.trim(len(set(usable) - bad)) else frozenset()
    for count in range(len(slow), 0, -1):
        out = unfit | set(slow[:count])
        left = min(len(members), shape.trim(len(set(usable) - out)))
        rest = max([ratios[node] for node in slow[count:] if node in members], default=1.0)
        gain = max([ratios[node] for node in slow[:count] if node in members], default=1.0) / rest
        if (left and left / len(members) * gain > 1.0) or left >= len(members):
            return frozenset(out)
    return unfit
