"""What to change about a run, with the numbers that it rests on; nothing where too little was measured. Pure.

The time between saves is Daly's (``autoparallel.search.failures``), with the mean time between faults that cost steps,
and with the measured wait of training for a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.autoparallel.search.failures import interval_s
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.report.accounting.causes import US, TimeCause
from resilio_hpc.report.accounting.node_time import NodeTime
from resilio_hpc.report.accounting.run_time import RunTime
from resilio_hpc.report.chain.checkpoint_facts import CheckpointFacts
from resilio_hpc.report.chain.cost import RunCost
from resilio_hpc.report.chain.recoveries import ChainRecovery, RecoveryOutcome

LEAST_FAULTS = 3  # a mean of fewer says little
LEAST_SAVES = 3
SAME = 1.5  # an interval that differs by less is as good: the loss is flat around its least value
WORTH = 0.001  # of the time: less is not worth a change


@dataclass(frozen=True)
class Advice:
    """One piece of advice. ``change``: what to do, "" where nothing is to be changed, or too little is known."""

    subject: str
    change: str
    why: str


def advice(
    time: RunTime, nodes: NodeTime, found: Sequence[ChainRecovery], saves: CheckpointFacts, cost: RunCost
) -> list[Advice]:
    """Return the advice on each subject."""
    return [_interval(time, found, saves), _spares(time, nodes, found, cost), _retention(saves)]


# -- the time between saves --------------------------------------------------------------------------------------------


def _interval(time: RunTime, found: Sequence[ChainRecovery], saves: CheckpointFacts) -> Advice:
    name = "time between saves"
    faults = [one for one in found if one.outcome is not RecoveryOutcome.NOT_NEEDED]
    costly = [one for one in faults if one.fault.lost_steps is None or one.fault.lost_steps > 0]
    if saves.interval_s is None or saves.blocked_s is None or saves.blocked_s.count < LEAST_SAVES:
        timed = saves.blocked_s.count if saves.blocked_s else 0
        return Advice(name, "", f"too little was measured: {plural(timed, 'save')} with a known wait of training; "
                      f"{LEAST_SAVES} are needed")  # fmt: skip
    if len(faults) >= LEAST_FAULTS and not costly:
        return Advice(name, "", f"none of {plural(len(faults), 'fault')} cost a step: ranks went on from memory; a "
                      f"fault that takes memory along would cost up to {seconds(saves.interval_s.median)}")  # fmt: skip
    if len(costly) < LEAST_FAULTS:
        return Advice(name, "", f"too little was measured: {plural(len(costly), 'fault')} that cost steps, or may "
                      f"have; {LEAST_FAULTS} are needed")  # fmt: skip
    mtbf_s = time.jobs_us / US / len(costly)
    wait_s, now_s = saves.blocked_s.total / saves.blocked_s.count, saves.interval_s.median
    best_s = interval_s(mtbf_s, wait_s, 0.0)
    lost_now, lost_best = _lost(now_s, wait_s, mtbf_s), _lost(best_s, wait_s, mtbf_s)
    basis = (
        f"a fault that costs steps every {seconds(mtbf_s)} ({len(costly)} in {seconds(time.jobs_us / US)}), "
        f"{seconds(wait_s)} of waiting per save (mean of {saves.blocked_s.count})"
    )
    costs = f"expected loss {lost_now:.2%} at {seconds(now_s)}, {lost_best:.2%} at {seconds(best_s)}"
    if max(best_s, now_s) < SAME * min(best_s, now_s) or lost_now - lost_best < WORTH:
        same = f"as it is: a save every {seconds(now_s)}; by Daly's formula {seconds(best_s)} is best"
        return Advice(name, "", f"{same} ({basis}); {costs}")
    change = f"save every {seconds(best_s)} instead of {seconds(now_s)}"
    return Advice(name, change, f"by Daly's formula, from {basis}; {costs}")


def _lost(interval: float, wait: float, mtbf: float) -> float:
    """Return the share of time lost to saves, and to steps done again: half an interval for each fault."""
    return min(1.0, wait / (interval + wait) + interval / 2 / mtbf)


# -- spares ------------------------------------------------------------------------------------------------------------


def _spares(time: RunTime, nodes: NodeTime, found: Sequence[ChainRecovery], cost: RunCost) -> Advice:
    name = "spares (--spares)"
    losses = [one for one in found if one.fault.kind == "node_lost"]
    replaced = [one for one in losses if one.fault.plan == "replace_node"]
    missing = [one for one in losses if one.fault.plan in ("shrink", "wait_for_node", "next_job")]
    idle_us = sum(len(one.nodes) * (one.end_us - one.begin_us) for one in nodes.spans if not one.held)
    if missing:
        down = [one.down_s for one in missing if one.down_s is not None]
        took = f", which took {seconds(sum(down))} until training went on" if down else ""
        why = f"{plural(len(missing), 'time')} no spare was there for a lost node{took}; {len(replaced)} times one was"
        return Advice(name, f"keep {plural(_at_once(missing, time), 'more spare')}", why)
    held = f"{idle_us / US / 3600 * (cost.gpus_per_node or 1):,.1f} {cost.unit}"
    if not losses and idle_us > 0.01 * nodes.us:
        return Advice(name, "", f"no node was lost; nodes without ranks cost {held}: keep them only as an insurance")
    if losses:
        return Advice(name, "", f"as they are: each of {plural(len(losses), 'lost node')} could be replaced, or was "
                      f"back; nodes without ranks cost {held}")  # fmt: skip
    return Advice(name, "", f"no node was lost in {seconds(time.jobs_us / US)}")


def _at_once(missing: Sequence[ChainRecovery], time: RunTime) -> int:
    """Return how many nodes at most were missing within the time that a recovery took."""
    most = 0
    for one in missing:
        until = one.fault.time + (one.down_s or 0.0)
        most = max(most, sum(one.fault.time <= other.fault.time <= until for other in missing))
    return max(1, most)


# -- how many checkpoints are kept -------------------------------------------------------------------------------------


def _retention(saves: CheckpointFacts) -> Advice:
    name = "checkpoints kept (--keep-checkpoints)"
    short = saves.problems.get("space_short", 0)
    if saves.steps_back is None or saves.steps_back.count < LEAST_FAULTS:
        count = saves.steps_back.count if saves.steps_back else 0
        known = f"too little was measured: {plural(count, 'restore')}; {LEAST_FAULTS} are needed"
        return Advice(name, "keep fewer, or make room" if short else "", f"room ran short {short} times; {known}"
                      if short else known)  # fmt: skip
    back = (
        f"of {plural(saves.steps_back.count, 'restore')}, the furthest went {saves.steps_back.most:.0f} steps behind "
    )
    why = f"{back}the newest committed step"
    if short:
        return Advice(name, "keep fewer, or make room", f"room ran short {short} times; {why}")
    return Advice(name, "", f"as it is: {why}, and room never ran short")


def lost_hours(cost: RunCost) -> float:
    """Return the hours that did not move training forward, in the cost's unit."""
    return cost.hours(*(cause for cause in TimeCause if cause not in (TimeCause.TRAIN, TimeCause.SAVE)))
