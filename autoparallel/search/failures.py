"""What failures and checkpoints take of a run's time. Pure.

Daly (2006, doi:10.1016/j.future.2004.11.016): a run of T seconds of work on a job that fails every M seconds on
average, with a checkpoint that stalls it for C after each τ, and R to be back at work after a failure, lasts

    M · exp(R / M) · (exp((τ + C) / M) - 1) · T / τ,        best with τ = √(2 C M) - C for C < M / 2
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Reliability:
    """Reliability. ``node_mtbf_s``: mean time between failures of one node, infinite for none.

    ``steps``: of the run, 0: unknown.
    """

    node_mtbf_s: float = math.inf
    restart_s: float = 120.0
    checkpoint_s: float = 1.0
    steps: int = 0


def interval_s(mtbf_s: float, checkpoint_s: float, step_s: float) -> float:
    """Return the best time between two checkpoints; at least a step."""
    best = math.sqrt(2 * checkpoint_s * mtbf_s) - checkpoint_s if checkpoint_s < mtbf_s / 2 else mtbf_s
    return max(best, step_s)


def overhead(run: Reliability, nodes: int, step_s: float) -> float:
    """Return the share of time that is no training; 1 where failures come faster than work between checkpoints."""
    mtbf = run.node_mtbf_s / nodes
    if math.isinf(mtbf):
        return 0.0
    between = interval_s(mtbf, run.checkpoint_s, step_s)
    exponent = run.restart_s / mtbf, (between + run.checkpoint_s) / mtbf
    if sum(exponent) > 30:
        return 1.0
    return 1 - between / (mtbf * math.exp(exponent[0]) * math.expm1(exponent[1]))


def run_s(run: Reliability, nodes: int, step_s: float) -> float:
    """Return the seconds of the whole run (1,000 steps where its length is not known); infinite where it never ends."""
    lost = overhead(run, nodes, step_s)
    return math.inf if lost >= 1 else (run.steps or 1000) * step_s / (1 - lost)
