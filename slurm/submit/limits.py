"""Jobs that can never start: they ask for more than their partitions have, or allow. Pure, except ``asked``.

Slurm by default queues such jobs (EnforcePartLimits=NO in slurm.conf), where they wait for ever; or refuses them
without saying which of ten requests is wrong. What is not known counts as fine: a partition without nodes may get some,
a QOS may lift a partition's limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.hostlist import expand
from resilio_hpc.slurm.client.model import Node, Partition
from resilio_hpc.slurm.node_faults.exclusion import that_have
from resilio_hpc.slurm.submit.new_job import gpus_wanted

_UNITS = {"": 1, "M": 1, "K": 1 / 1024, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class SiteLimits:
    """What jobs can get on a site. ``largest_array``: slurm.conf's MaxArraySize; 0 where it is not known."""

    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    largest_array: int = 0


def asked(client: SlurmClient, options: Mapping[str, str]) -> SiteLimits | None:
    """Return Slurm's answer about the site; None without one: then sbatch is asked anyway."""
    try:
        largest = commands.config_value("MaxArraySize") if "array" in options else ""
        site = SiteLimits(client.partitions(), client.nodes(), int(largest) if largest.isdecimal() else 0)
    except (SlurmError, UsageError):
        return None
    return site if site.partitions else None


def never_starts(options: Mapping[str, str], own: Collection[str], site: SiteLimits) -> str:
    """Return why a job with sbatch's ``options`` can never start, where that is certain; else "".

    ``own``: the keys of those that its user gave; the others are the template's.
    """
    array = _array(options.get("array", ""), site.largest_array)
    if array:
        return array
    named = options.get("partition", "").split(",") if options.get("partition") else []
    chosen = [one for one in site.partitions if (one.name in named if named else one.default)]
    if not chosen or any(name not in {one.name for one in site.partitions} for name in named):
        return ""  # sbatch reports it
    reasons = [_why_not(options, own, one, site.nodes) for one in chosen]
    return "; ".join(dict.fromkeys(reason for found in reasons for reason in found)) if all(reasons) else ""


def _array(array: str, largest: int) -> str:
    """Return what is wrong where a task's number is not below MaxArraySize."""
    numbers = [int(number) for number in re.findall(r"[0-9]+", re.sub(r"%[0-9]+|:[0-9]+", "", array))]
    if not largest or max(numbers, default=0) < largest:
        return ""
    return f"array={array}: the largest number of a task is {largest - 1} (MaxArraySize={largest} of slurm.conf)"


def _why_not(
    options: Mapping[str, str], own: Collection[str], partition: Partition, nodes: Sequence[Node]
) -> list[str]:
    """Return every reason against one partition; none where the job fits."""

    def said(key: str) -> str:
        whose = "" if key in own else " (the template's)"
        return f"{key}={options[key]}{whose}"

    found = [] if options.get("qos") else _limits(options, said, partition)
    members = [node for node in nodes if partition.name in node.partitions]
    if not members:
        return found
    needed, excluded = node_count(options), _names(options.get("exclude", ""))
    left = [node for node in members if node.name not in excluded]
    if needed > len(left):
        without = f" without {options['exclude']}" if len(left) < len(members) else ""
        found.append(f"{said('nodes')}: partition {partition.name} has {len(left)}{without}")
    for key, wanted, most, unit in _per_node(options, left or members, partition.name):
        if wanted > most:
            found.append(f"{said(key)}: nodes of partition {partition.name} have {most:g}{unit} at most")
    if not found and options.get("constraint"):
        fitting = that_have(left, [partition.name], options["constraint"], gpus_wanted(options))
        if fitting is not None and len(fitting) < needed:
            found.append(f"{said('constraint')}: {len(fitting)} nodes of partition {partition.name} have it")
    return found


def _limits(options: Mapping[str, str], said: Callable[[str], str], partition: Partition) -> list[str]:
    """Return the reasons by the partition's limits. A QOS may allow more."""
    found = []
    asked_s = seconds(options["time"]) if "time" in options else None
    if asked_s is not None and partition.max_time_s is not None and asked_s > partition.max_time_s:
        found.append(f"{said('time')}: partition {partition.name} allows {_words(partition.max_time_s)}")
    if partition.max_nodes is not None and node_count(options) > partition.max_nodes:
        found.append(f"{said('nodes')}: partition {partition.name} allows {partition.max_nodes:g}")
    most = int(options.get("nodes", "1").split("-")[-1])
    if partition.min_nodes is not None and most < partition.min_nodes:
        found.append(f"nodes={most}: partition {partition.name} takes jobs from {partition.min_nodes} nodes on")
    return found


def _per_node(options: Mapping[str, str], nodes: Sequence[Node], partition: str) -> list[tuple[str, float, float, str]]:
    """Return (option, request for each node, the most that one has, unit), for values that all nodes tell."""
    rows: list[tuple[str, float, float, str]] = []
    tasks, cpus = (int(options.get(key, "1")) for key in ("ntasks_per_node", "cpus_per_task"))
    told = [node.cpus for node in nodes]
    key = "cpus_per_task" if cpus > 1 else "ntasks_per_node"
    if key in options and None not in told:
        rows.append((key, tasks * cpus, max(count or 0 for count in told), " CPUs"))
    gpus = gpus_wanted(options)
    if gpus is not None and gpus.count:
        key = "gpus_per_node" if options.get("gpus_per_node") else "gres"
        kind = f" GPUs{f' of type {gpus.type}' if gpus.type else ''}"
        rows.append((key, gpus.count, max(_gpus(node, gpus.type) for node in nodes), kind))
    memory = mebibytes(options.get("mem", "0"))
    sizes = [node.memory_mb for node in nodes]
    if memory and None not in sizes:
        rows.append(("mem", memory, max(size or 0 for size in sizes), " MiB"))
    return rows


def _gpus(node: Node, kind: str) -> int:
    return sum(one.count or 0 for one in node.gres if one.name == "gpu" and kind in ("", one.type))


def node_count(options: Mapping[str, str]) -> int:
    """Return the nodes that a job has at least. Pure."""
    return int(options.get("nodes", "1").split("-")[0])


def _names(hosts: str) -> frozenset[str]:
    try:
        return frozenset(expand(hosts))
    except UsageError:  # a file of names
        return frozenset()


def seconds(time: str) -> float | None:
    """Return sbatch's ``--time`` in seconds, ``math.inf`` without a limit; None for other text. Pure."""
    if time == "UNLIMITED":
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(re.fullmatch("[0-9]+", part) for part in [*parts, *([days] if dash else [])]):
        return None
    numbers = [int(part) for part in parts]
    if dash:  # DAYS-HH[:MM[:SS]]
        hours, minutes, over = [*numbers, 0, 0][:3]
        return float(((int(days) * 24 + hours) * 60 + minutes) * 60 + over)
    if len(numbers) == 1:
        return float(numbers[0] * 60)
    hours, minutes, over = numbers if len(numbers) == 3 else [0, *numbers]
    return float((hours * 60 + minutes) * 60 + over)


def mebibytes(memory: str) -> float:
    """Return sbatch's ``--mem`` in MiB; 0: all of a node's. Pure."""
    found = re.fullmatch(r"([0-9]+)([KMGT]?)B?", memory.upper())
    return 0.0 if found is None else int(found[1]) * _UNITS[found[2]]


def _words(limit_s: float) -> str:
    minutes = int(limit_s // 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00" if days else f"{rest // 60}:{rest % 60:02d}:00"
