"""The smallest schedule that still breaks something: easier to read than the one that was found."""

from __future__ import annotations

from dataclasses import replace

from tests.support.simulator.run import run
from tests.support.simulator.schedule import Schedule


def shrink(plan: Schedule) -> Schedule:
    """Leave out faults, one after the other, as long as an invariant is still broken without them."""
    smaller = True
    while smaller:
        smaller = False
        for fault in plan.faults:
            less = replace(plan, faults=tuple(other for other in plan.faults if other is not fault))
            if run(less).violation:
                plan, smaller = less, True
                break
    return plan
