"""Which nodes share an srun. Pure.

One srun per node isolates failures best, and overloads slurmctld and the batch host when there are hundreds. So beyond
a few dozen nodes an srun covers a group of nodes that would fail together anyway: the nodes of one switch, as far as
Slurm tells, else neighbours in the list. ``--no-kill`` and similar options keep a group going when one of its nodes is
lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.hostlist import expand

SINGLE_UP_TO = 32  # up to so many nodes, each gets its own srun
GROUP_SIZE = 16

Group = tuple[str, ...]
_LEAF = re.compile(r"(?:^|\s)(?:SwitchName=\S+ .*?Level=0\b|BlockName=\S+ ).*?\bNodes=(\S+)")


def parse_topology(text: str) -> list[Group]:
    """Return the nodes of each leaf switch (or block) in ``scontrol show topology``; none without a known topology."""
    groups = []
    for line in text.splitlines():
        if match := _LEAF.search(line):
            try:
                groups.append(tuple(expand(match.group(1))))
            except UsageError:
                continue
    return groups


def group_nodes(
    nodes: Sequence[str],
    cpus: Sequence[int] = (),
    domains: Iterable[Group] = (),
    size: int = GROUP_SIZE,
) -> list[Group]:
    """Return ``nodes`` in groups of at most ``size``, of one domain where known, and of one number of CPUs.

    ``cpus``: the nodes' CPUs in their order (none: not known). Small domains share a group, large ones are split
    evenly. The first node, where the batch script runs, is in the first group; the order within groups stays.
    """
    domain_of = {node: number for number, domain in enumerate(domains) for node in domain}
    cpus_of = dict(zip(nodes, cpus, strict=False))
    kinds: dict[tuple[int, int], list[str]] = {}
    for node in nodes:
        kinds.setdefault((cpus_of.get(node, 0), domain_of.get(node, -1)), []).append(node)
    groups: list[list[str]] = []
    open_groups: dict[int, list[str]] = {}  # number of CPUs → the last group, while it has room
    for (count, _), members in kinds.items():
        room = open_groups.get(count)
        if room is not None and len(room) + len(members) <= size:
            room.extend(members)
            continue
        pieces = _split(members, size)
        groups.extend(pieces)
        open_groups[count] = pieces[-1]
    return [tuple(group) for group in groups]


def _split(nodes: list[str], size: int) -> list[list[str]]:
    count = -(-len(nodes) // size)
    edges = [round(number * len(nodes) / count) for number in range(count + 1)]
    return [nodes[first:last] for first, last in pairwise(edges)]


def absent_agents(
    group: Group, agents: Iterable[str], lost: Iterable[str], running_s: float, start_allowance_s: float = 60.0
) -> Group:
    """Return the nodes of a running group that have no agent, as the controller sees it.

    Agents that may just be starting count as present. ``agents`` and ``lost``: the controller's, from its status file;
    ``running_s``: since the group's srun was started.
    """
    if running_s < start_allowance_s / 4:
        return ()
    present, gone = set(agents), set(lost)
    late = running_s >= start_allowance_s
    return tuple(node for node in group if node in gone or (late and node not in present))
