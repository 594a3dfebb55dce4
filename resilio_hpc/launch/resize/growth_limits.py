"""How far a run may grow now: idle nodes of its kind, what bounds their number, and joiner jobs for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from resilio_hpc.autoparallel import Pool
from resilio_hpc.events.phrases import plural
from resilio_hpc.launch.resize.facts import ResizeFacts
from resilio_hpc.launch.resize.policy import ResizePolicy


def room_for(facts: ResizeFacts, policy: ResizePolicy) -> tuple[int, tuple[str, str]]:
    """Return how many more nodes may be taken, and which limit sets that: its code and its text."""
    free = {node for pool in fitting_pools(facts) for node in pool.idle if node not in facts.held}
    idle = free - facts.avoided
    settled = [n for n in idle if facts.idle_for_s is None or facts.idle_for_s.get(n, 0.0) >= policy.settle_s]
    spare_jobs = max(0, policy.max_joiner_jobs - len(facts.joiners))
    most_per_job = min((pool.max_nodes for pool in fitting_pools(facts) if pool.max_nodes is not None), default=1 << 30)
    count = len(settled)
    code = "nothing_idle" if len(idle) < facts.unit else "not_settled"
    words = f"{plural(len(idle), 'node')} of the kind are idle, {count} of them for {policy.settle_s:g} s"
    if len(free) > len(idle):
        words += f"; {', '.join(sorted(free - idle)[:8])} failed lately"
    bounds = [
        (count, code, words),
        (facts.most - facts.nodes, "at_most", f"at most {plural(facts.most, 'node')} may train"),
        (spare_jobs * most_per_job, "joiner_jobs", f"{len(facts.joiners)} joiner jobs are in the queue"),
    ]  # fmt: skip
    if policy.max_user_nodes:
        left = policy.max_user_nodes - facts.user_nodes
        bounds.append(
            (left, "user_limit", f"this user's jobs have {facts.user_nodes} of {policy.max_user_nodes} nodes")
        )
    if facts.quota_nodes is not None:
        bounds.append((facts.quota_nodes, "quota", f"quotas leave {plural(facts.quota_nodes, 'node')}"))
    least = min(bounds, key=lambda bound: bound[0])
    return max(0, least[0]) // facts.unit * facts.unit, (least[1], least[2])


def fitting_pools(facts: ResizeFacts) -> Iterator[Pool]:
    """Yield the pools whose nodes are like those of the run."""
    for pool in facts.inventory.pools:
        same_type = facts.gpu_type is None or pool.gpu_type == facts.gpu_type
        same_count = facts.gpus_per_node is None or pool.gpus_per_node == facts.gpus_per_node
        if pool.partition in facts.partition.split(",") and same_type and same_count:
            yield pool


def job_sizes(nodes: int, unit: int, most_jobs: int) -> tuple[int, ...]:
    """Return joiner jobs for so many nodes: small ones, so few nodes can be given back, but at most ``most_jobs``.

    Sizes are multiples of ``unit``; the first one is less where ``nodes`` is no multiple, which completes a unit that
    has lost nodes.
    """
    units = -(-nodes // unit)
    jobs = max(1, min(units, most_jobs))
    sizes = [unit * (units // jobs + (place < units % jobs)) for place in range(jobs)]
    sizes[0] -= units * unit - nodes
    return tuple(sizes)
