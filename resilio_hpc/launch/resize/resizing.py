"""Whether a run should have more nodes, fewer, or stay as it is: one pure function (RES-23, DLR-5).

The order of the rules: first what is under way is finished, then jobs of others get the nodes that they wait for, and
only then the run looks at its own gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from resilio_hpc.autoparallel import Constraints, Waiting, sizes
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.launch.resize.facts import JoinerJob, ResizeDecision, ResizeFacts
from resilio_hpc.launch.resize.growth_limits import job_sizes, room_for
from resilio_hpc.launch.resize.policy import ResizePolicy

# a pending joiner with one of these words in Slurm's reason will not start, however long it waits
_LIMIT_WORDS = ("QOS", "Assoc", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "AccountNotAllowed")


def decide(facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision:
    """Return the one action to take now, or why none is taken."""
    if facts.phase == "over":
        waiting = tuple(one.job for one in _of(facts, "pending"))
        if waiting and ("withdraw", "over") not in facts.refused:
            return ResizeDecision("withdraw", "over", "the run is over", facts.nodes, waiting)
        return _stay(facts, "over", "the run is over")
    steps = (_bring_to_end, _give_way, _follow, _wait, _undo, _grow)
    for step in steps:
        decision = step(facts, policy)
        if decision is not None and (decision.action, decision.code) not in facts.refused:
            return decision
    said = "; ".join(dict.fromkeys(facts.refused.values()))
    return _stay(facts, "refused", f"tried again later: {said}")


def _stay(facts: ResizeFacts, code: str, reason: str) -> ResizeDecision:
    return ResizeDecision("stay", code, reason, facts.nodes)


def _of(facts: ResizeFacts, *states: str) -> list[JoinerJob]:
    return [joiner for joiner in facts.joiners if joiner.state in states]


# -- what is under way -------------------------------------------------------------------------------------------------


def _bring_to_end(facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision | None:
    overdue = [one for one in _of(facts, "leaving") if one.since_s > policy.leave_patience_s]
    if overdue:
        jobs = tuple(one.job for one in overdue)
        reason = f"no commit let {_jobs(jobs)} leave within {seconds(policy.leave_patience_s)}"
        return ResizeDecision("end", "leave_overdue", reason, facts.nodes, jobs)
    for joiner in _of(facts, "pending"):
        why = _why_withdraw(joiner, facts, policy)
        if why is not None:
            return ResizeDecision("withdraw", why[0], why[1], facts.nodes, (joiner.job,))
    return None


def _why_withdraw(joiner: JoinerJob, facts: ResizeFacts, policy: ResizePolicy) -> tuple[str, str] | None:
    if any(word in joiner.reason for word in _LIMIT_WORDS):
        return "limit", f"Slurm's limits do not let job {joiner.job} start: {joiner.reason}"
    if joiner.since_s > policy.pending_patience_s:
        return "too_late", f"job {joiner.job} has waited for {seconds(joiner.since_s)}: its nodes are taken"
    others = _others(facts)
    if others:
        return "others_wait", f"job {others[0].job} of {others[0].user} waits for {plural(others[0].nodes, 'node')}"
    return None


# -- others ------------------------------------------------------------------------------------------------------------


def _others(facts: ResizeFacts) -> list[Waiting]:
    """Return other users' and own jobs that wait for nodes such as this run uses, without those of the run."""
    ours = set(facts.partition.split(","))
    return [one for one in facts.inventory.waiting if one.job not in facts.own_jobs and ours & set(one.partitions)]


def _give_way(facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision | None:
    """End joiners where that lets a job of others start; return None where no job would gain by it."""
    running = sorted(_of(facts, "running"), key=lambda one: (one.since_s, one.job))  # the newest first
    for other in _others(facts):
        usable = {node for pool in facts.inventory.pools if pool.partition in other.partitions for node in pool.nodes}
        free = {n for pool in facts.inventory.pools if pool.partition in other.partitions
                for n in (*pool.idle, *pool.planned)}  # fmt: skip
        coming = sum(len(usable & set(one.names)) for one in _of(facts, "leaving", "ending"))
        short = other.nodes - len(free) - coming
        chosen = _enough([one for one in running if usable & set(one.names)], usable, short)
        given = sum(one.nodes for one in chosen)
        if chosen and len(facts.held) - given >= facts.least:
            who = f"job {other.job} of {other.user}"
            reason = f"{who} waits for {plural(other.nodes, 'node')}, {short} more than are free"
            return ResizeDecision(
                "shrink", "others_wait", reason, facts.nodes - given, tuple(one.job for one in chosen)
            )
    return None


def _enough(joiners: Sequence[JoinerJob], usable: set[str], short: int) -> list[JoinerJob]:
    """Return as many of these joiners, in this order, as free ``short`` nodes; none where all would not be enough."""
    chosen: list[JoinerJob] = []
    freed = 0
    for joiner in joiners:
        if freed >= short:
            break
        chosen.append(joiner)
        freed += len(usable & set(joiner.names))
    return chosen if freed >= short > 0 else []


# -- the chain ---------------------------------------------------------------------------------------------------------


def _follow(facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision | None:
    """Change the next job of the chain to the size that it can have at once."""
    successor = facts.successor
    if successor is None or not policy.reshape_successor:
        return None
    ceiling = max(facts.most + facts.spares, facts.own_nodes)
    if facts.phase == "between_jobs" and successor.waits_for_nodes:
        free = len({node for pool in facts.inventory.pools if pool.partition in facts.partition.split(",")
                    for node in (*pool.idle, *pool.planned)})  # fmt: skip
        fitting = free // facts.unit * facts.unit
        if facts.least + facts.spares <= fitting < successor.nodes:
            why = f"{plural(free, 'node')} are free, and job {successor.job} waits for {successor.nodes}"
            return ResizeDecision("reshape", "start_smaller", why, fitting, (successor.job,), (fitting,))
    held = sum(joiner.nodes for joiner in _of(facts, "running") if set(joiner.names) <= facts.held)
    wanted = min(facts.own_nodes + held, ceiling)
    if facts.phase == "training" and not _of(facts, "pending", "leaving", "ending") and wanted != successor.nodes:
        why = f"the jobs of this run hold {plural(wanted, 'node')}, which all become free when the next one starts"
        return ResizeDecision("reshape", "follow_size", why, facts.nodes, (successor.job,), (wanted,))
    return None


# -- waiting -----------------------------------------------------------------------------------------------------------


def _wait(facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision | None:
    if facts.phase == "between_jobs":
        return _stay(facts, "between_jobs", "the run waits for its next job")
    if facts.phase == "settling":
        return _stay(facts, "settling", "ranks are being started")
    moving = _of(facts, "pending", "leaving", "ending")
    if moving:
        return _stay(facts, "under_way", f"{_jobs([one.job for one in moving])} comes or goes")
    missing = sum(joiner.nodes for joiner in _of(facts, "running") if not set(joiner.names) <= facts.held)
    if missing:
        return _stay(facts, "under_way", f"{plural(missing, 'node')} of joiners start their agents")
    waiting = len(facts.held) - facts.nodes - facts.spares
    if waiting >= facts.unit and facts.nodes + facts.unit <= facts.most:
        return _stay(facts, "under_way", f"{plural(waiting, 'node')} of the run train after the next commit")
    if facts.last_resize_s is not None and facts.last_resize_s < policy.cool_down_s:
        left = policy.cool_down_s - facts.last_resize_s
        return _stay(facts, "cool_down", f"resized {seconds(facts.last_resize_s)} ago: not again for {seconds(left)}")
    if facts.throughput is None:
        return _stay(facts, "no_step_time", "no step time is known yet: does the script use run.steps or step_done?")
    return None


# -- what is good for the run ------------------------------------------------------------------------------------------


def _undo(facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision | None:
    """End joiners that bring too little, so that other jobs can use their nodes."""
    running = sorted(_of(facts, "running"), key=lambda one: (one.since_s, one.job))
    if not running or facts.throughput is None or facts.nodes - running[0].nodes < facts.least:
        return None
    last = running[0]
    after = facts.nodes - last.nodes
    if facts.gpu_utilisation is not None and facts.gpu_utilisation < policy.low_utilisation:
        reason = f"GPUs are busy for {facts.gpu_utilisation:.0%} of the time"
        return ResizeDecision("shrink", "idle_gpus", reason, after, (last.job,))
    efficiency = _efficiency(facts, after, facts.nodes)
    if not facts.throughput.assumed and efficiency < policy.min_efficiency * policy.shrink_below:
        reason = f"the last {plural(last.nodes, 'node')} bring {efficiency:.0%} of a linear gain"
        return ResizeDecision("shrink", "poor_scaling", reason, after, (last.job,))
    return None


def _efficiency(facts: ResizeFacts, fewer: int, more: int) -> float:
    """Return the gain in speed of the nodes beyond ``fewer``, relative to that of as many of the first nodes."""
    assert facts.throughput is not None
    gain = facts.throughput.speed(more) / facts.throughput.speed(fewer) - 1
    return gain / (more / fewer - 1)


def _grow(facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision:
    assert facts.throughput is not None
    if facts.nodes + facts.unit > facts.most:
        return _stay(facts, "at_most", f"{plural(facts.nodes, 'node')} train, the most that this run may have")
    if facts.gpu_utilisation is not None and facts.gpu_utilisation < policy.low_utilisation:
        return _stay(facts, "idle_gpus", f"GPUs are busy for {facts.gpu_utilisation:.0%} of the time: more are no use")
    if facts.lost_joiners > 0 and facts.lost_joiners >= policy.max_lost_joiners:
        return _stay(
            facts, "joiners_fail", f"the last {facts.lost_joiners} joiners ended without joining: see their output"
        )
    others = _others(facts)
    if others:
        return _stay(facts, "others_wait", f"job {others[0].job} of {others[0].user} waits for nodes")
    room, limit = room_for(facts, policy)
    if room < facts.unit:
        return _stay(facts, limit[0], limit[1])
    larger = _larger(facts, room)
    best = next((nodes for nodes in larger if _worth(nodes, facts, policy) == ""), None)
    if best is not None:
        return _grow_to(best, facts, policy)
    nearest = min(larger, default=None)
    why = _worth(nearest, facts, policy) if nearest else "no larger number of ranks fits model and batch"
    return _stay(facts, "no_gain" if nearest else "no_fit", why)


def _larger(facts: ResizeFacts, room: int) -> list[int]:
    """Return the sizes with more nodes than now, the fastest first."""
    assert facts.throughput is not None
    constraints = Constraints(
        ranks_per_node=facts.ranks_per_node, min_nodes=facts.nodes + 1, max_nodes=facts.nodes + room,
        node_unit=facts.unit, model_parallel=facts.model_parallel, global_batch=facts.global_batch,
        micro_batch=facts.micro_batch,
    )  # fmt: skip
    return sizes(facts.throughput, constraints)


def _worth(nodes: int, facts: ResizeFacts, policy: ResizePolicy) -> str:
    """Return why another size is not worth its restart, or ""."""
    assert facts.throughput is not None
    gain = facts.throughput.speed(nodes) / facts.throughput.speed(facts.nodes) - 1
    size = f"{plural(nodes, 'node')} would be {gain:.1%} faster"
    if gain < policy.min_gain:
        return f"{size}, less than {policy.min_gain:.1%}"
    efficiency = _efficiency(facts, facts.nodes, nodes)
    if efficiency < policy.min_efficiency:
        return f"{size}, {efficiency:.0%} of a linear gain"
    horizon = min(policy.horizon_s, facts.ends_in_s if facts.ends_in_s is not None else math.inf)
    cost = policy.payback * _restart_s(facts, policy)
    if horizon * gain <= cost:
        return f"{size}, which in the {seconds(horizon)} that are left does not pay for a restart"
    return ""


def _restart_s(facts: ResizeFacts, policy: ResizePolicy) -> float:
    return policy.restart_s if facts.restart_s is None else facts.restart_s


def _grow_to(best: int, facts: ResizeFacts, policy: ResizePolicy) -> ResizeDecision:
    assert facts.throughput is not None
    more = best - facts.nodes
    speed, now = facts.throughput, facts.throughput.step_s(facts.nodes)
    basis = "assuming" if speed.assumed else "measured"
    reason = (
        f"{plural(more, 'idle node')}: {speed.speed(best) / speed.speed(facts.nodes) - 1:.0%} more speed "
        f"({basis} {speed.communication_s / now:.0%} communication), for a restart of "
        f"{seconds(_restart_s(facts, policy))}"
    )
    jobs = job_sizes(more, facts.unit, policy.max_joiner_jobs - len(facts.joiners))
    expected = {"step_s": round(speed.step_s(best), 6), "step_s_now": round(now, 6)}
    return ResizeDecision("grow", "idle_nodes", reason, best, (), jobs, expected)


def _jobs(jobs: Sequence[str]) -> str:
    return f"job{'s' * (len(jobs) != 1)} {', '.join(jobs)}"
