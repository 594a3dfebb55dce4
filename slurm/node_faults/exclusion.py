"""The nodes that a user's next job should avoid, so that it can still start. Pure.

Slurm accepts a list of excluded nodes with which a job can never start (it then waits with BadConstraints). So the list
is bounded: enough of the suitable nodes must remain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from resilio_hpc.slurm.client.gres import Gres
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.node_faults.policy import FaultPolicy
from resilio_hpc.slurm.node_faults.score import NodeScore


@dataclass(frozen=True)
class Exclusion:
    """``nodes``: to be avoided, the worst first; ``spared``: as bad, but without them too few would remain.

    ``why``: as text.
    """

    nodes: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    why: str = ""


# not for this job now, though Slurm does not call the node DOWN (sinfo manual, NODE STATE CODES)
_NOT_NOW = frozenset({"MAINT", "MAINTENANCE", "RESERVED", "NOT_RESPONDING", "INVALID_REG"})


def choose(
    scored: Iterable[NodeScore],
    pool: Sequence[Node],
    needed: int,
    policy: FaultPolicy,
    by_hand: Collection[str] = (),
    partitions: Collection[str] = (),
) -> Exclusion:
    """Return the exclusion.

    ``pool``: suitable nodes; ``needed``: how many the job wants; ``by_hand``: the user's own list; ``partitions``:
    where the job may run. It gets all its nodes from one, so enough must remain in each.
    """
    would_do = {node.name: node for node in pool if node.name not in by_hand}
    bad = [one for one in scored if one.score >= policy.exclude_at and one.node in would_do]
    if not bad:
        return Exclusion()
    allowed = max(policy.exclude_at_least, math.floor(policy.exclude_share * len(would_do)))
    usable = {name for name, node in would_do.items() if node.state.in_service and not node.state.flags & _NOT_NOW}
    suitable = [{name for name, node in would_do.items() if _in(node, [one])} for one in partitions] or [{*would_do}]
    groups = [(names, names & usable) for names in suitable]
    chosen: list[NodeScore] = []
    for one in bad:
        # one that is out of service now may be needed when it is back, as all are that a restarted slurmctld looks for
        enough = all(len(left - {one.node}) >= needed for names, left in groups if one.node in names)
        if len(chosen) < allowed and enough:
            chosen.append(one)
            for _, left in groups:
                left.discard(one.node)
    taken = [one.node for one in chosen]
    spared = tuple(one.node for one in bad if one.node not in taken)
    words = [f"{one.node}: {one.summary}" for one in chosen]
    if spared:
        words.append(
            f"{', '.join(spared)} not avoided: of {len(would_do)} nodes that would do, {len(usable)} in service, "
            f"{needed} are needed and at most {allowed} avoided"
        )
    return Exclusion(tuple(taken), spared, "; ".join(words))


def alike(nodes: Iterable[Node], examples: Collection[str], partitions: Collection[str]) -> tuple[Node, ...]:
    """Return nodes of the partitions of the same make as the nodes that a job got: they are suitable too.

    A job may ask by any expression of features; the nodes that it got, fit.
    """
    known = list(nodes)
    makes = {_make(node) for node in known if node.name in examples}
    return tuple(node for node in known if _make(node) in makes and _in(node, partitions))


def that_have(
    nodes: Iterable[Node], partitions: Collection[str], features: str = "", gpus: Gres | None = None
) -> tuple[Node, ...] | None:
    """Return the partitions' nodes with all ``features`` (``a100&ib``) and so many GPUs; None for other expressions."""
    if features and not re.fullmatch(r"[\w.:/=-]+([&,][\w.:/=-]+)*", features):
        return None
    wanted = {word for word in re.split(r"[&,]", features) if word}
    return tuple(
        node
        for node in nodes
        if _in(node, partitions) and wanted <= {*node.features, *node.active_features} and _has(node, gpus)
    )


def _in(node: Node, partitions: Collection[str]) -> bool:
    return bool(set(node.partitions) & set(partitions))


def _has(node: Node, wanted: Gres | None) -> bool:
    if wanted is None or not wanted.count:
        return True
    fitting = [one for one in node.gres if one.name == wanted.name and wanted.type in ("", one.type)]
    return sum(one.count or 0 for one in fitting) >= wanted.count


def _make(node: Node) -> tuple[object, ...]:
    gres = tuple(sorted((one.name, one.type, one.count or 0) for one in node.gres))
    return (node.cpus, node.memory_mb, gres, tuple(sorted(node.features)))
