"""Time of collectives: latency and bandwidth (α–β) over NVLink domains and the network between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machines
from resilio_hpc.autoparallel.base.layout import Layouts


@dataclass(frozen=True)
class CollectiveGroup:
    """Groups as columns: their number of ranks, and how many of these share an NVLink domain."""

    size: Column
    local: Column


@dataclass(frozen=True)
class Groups:
    """The process groups of layouts placed tp, cp, dp, pp from the inside of a domain outwards."""

    tp: CollectiveGroup
    cp: CollectiveGroup
    dp: CollectiveGroup
    ep: CollectiveGroup
    etp: CollectiveGroup
    shard: CollectiveGroup
    """Ranks that share one copy of what ZeRO shards; ``replicas``: ranks with the same shard."""
    replicas: CollectiveGroup
    alike: CollectiveGroup
    """Ranks with the same experts, which reduce their gradients together."""
    stage_is_local: Column
    """1 where neighbouring pipeline stages share a domain."""


def groups(layouts: Layouts, machines: Machines, expert_tp: Column) -> Groups:
    """Return the groups. ``expert_tp``: ranks that share an expert."""
    domain = np.minimum(machines.domain_gpus, layouts.num_gpus)

    def group(size: Column, inside: Column) -> CollectiveGroup:
        return CollectiveGroup(size, np.clip(np.floor(domain / inside), 1, size))

    inner = layouts.tp * layouts.cp
    return Groups(
        tp=group(layouts.tp, np.ones(1)),
        cp=group(layouts.cp, layouts.tp),
        dp=group(layouts.dp * layouts.cp, layouts.tp),
        shard=group(layouts.dp * layouts.cp / layouts.replicas, layouts.tp),
        replicas=group(layouts.replicas, inner * layouts.dp / layouts.replicas),
        # a layout that says so has the ranks of one expert side by side, and those of the next one beside them
        ep=group(layouts.ep, np.where(layouts.etp > 0, layouts.etp, layouts.tp)),
        etp=group(expert_tp, np.ones(1)),
        alike=group(np.maximum(inner * layouts.dp / (layouts.ep * expert_tp), 1), layouts.ep * expert_tp),
        stage_is_local=(2 * inner * layouts.dp <= domain).astype(float),
    )


def _share(group: CollectiveGroup, machines: Machines, efficiency: Efficiency) -> Column:
    """Return the network bandwidth that one group has per domain: groups side by side share it."""
    nic = machines.nic * machines.domain_gpus / machines.node_gpus
    return nic * efficiency.nic * np.minimum(1.0, group.local / machines.domain_gpus)


def _latency(group: CollectiveGroup, efficiency: Efficiency) -> Column:
    # two GPUs pay most of the latency of eight: NCCL all-reduce curves of A100 nodes
    inner = np.where(group.local > 1, efficiency.link_alpha_us * (1.5 + np.log2(np.maximum(group.local, 1))), 0.0)
    outer = efficiency.nic_alpha_us * np.log2(np.maximum(group.size / group.local, 1))
    return (inner + outer) * 1e-6


def gather(size: Column, group: CollectiveGroup, machines: Machines, efficiency: Efficiency) -> Column:
    """Seconds of an all-gather or a reduce-scatter of ``size`` bytes (the whole tensor); an all-reduce takes two."""
    across = group.size > group.local
    link = machines.link * efficiency.link
    bandwidth = np.where(across, np.minimum(link, _share(group, machines, efficiency)), link)
    time = size * (group.size - 1) / group.size / bandwidth + _latency(group, efficiency) / 2
    return np.where(group.size > 1, time, 0.0)


def tree_gain(size: Column, domains: Column) -> Column:
    """How much less an all-reduce of ``size`` ranks sends between ``domains`` domains in a tree than in a ring.

    A ring sends 2(n-1)/n of the bytes through each domain's network, a tree of domains 2(d-1)/d: half of it for two.
    """
    apart = np.maximum(domains, 2)
    return np.where(domains > 1, (1 - 1 / np.maximum(size, 1)) / (1 - 1 / apart), 1.0)


def all_reduce(size: Column, group: CollectiveGroup, machines: Machines, efficiency: Efficiency) -> Column:
    """Return the seconds of an all-reduce of ``size`` bytes: inside of the domains in rings, between them in trees."""
    gain = 1 + efficiency.tree * (tree_gain(group.size, group.size / group.local) - 1)
    link = machines.link * efficiency.link
    outer = np.minimum(link, _share(group, machines, efficiency) * gain)
    bandwidth = np.where(group.size > group.local, outer, link)
    time = 2 * size * (group.size - 1) / group.size / bandwidth + _latency(group, efficiency)
    return np.where(group.size > 1, time, 0.0)


def all_to_all(
    size: Column, outer: Column, group: CollectiveGroup, machines: Machines, efficiency: Efficiency
) -> Column:
    """Seconds of an all-to-all: each rank sends ``size`` bytes in all, or ``outer`` if all were for other domains."""
    inner = size * (group.local - 1) / group.size / (machines.link * efficiency.link)
    outside = outer * (group.size - group.local) / group.size
    share = machines.nic / machines.node_gpus * efficiency.nic
    return np.where(group.size > 1, np.maximum(inner, outside / share) + _latency(group, efficiency), 0.0)


def transfer(size: Column, local: Column, machines: Machines, efficiency: Efficiency) -> Column:
    """Return the seconds of a point-to-point transfer of ``size`` bytes while every GPU of the node sends one."""
    inner = size / (machines.link * efficiency.link) + efficiency.link_alpha_us * 1e-6
    outer = size / (machines.nic / machines.node_gpus * efficiency.p2p) + efficiency.nic_alpha_us * 1e-6
    return np.where(local > 0, inner, outer)
