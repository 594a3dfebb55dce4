"""pyslurm, in a process of its own: ``python -m resilio_hpc.slurm.client.pyslurm_child``.

libslurm ends its process when it finds no configuration, and waits for minutes when slurmctld is away: neither must
happen to the one who asks. A line on the input is a question in JSON, ``["nodes", NAME…]``, ``["jobs", NUMBER…]`` or
``["partitions"]`` (without names: all). A line on the output is an answer in the form of scontrol's ``--json``, so that
the same parser reads it; partitions are text, as ``scontrol show partitions`` prints them. The first line says READY.
What pyslurm does not tell is an error, so that the commands are asked.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

READY = "pyslurm"


def main() -> int:
    """Answer questions until the input ends."""
    pyslurm = importlib.import_module("pyslurm")
    _say({READY: str(getattr(pyslurm, "__version__", ""))})
    for line in sys.stdin:
        what, *names = json.loads(line)
        try:
            _say({**ANSWERS[what](pyslurm, names), "errors": []})
        except (pyslurm.RPCError, _NotTold) as error:
            _say({"errors": [{"description": str(error)}]})
    return 0


class _NotTold(Exception):
    """Raised where pyslurm leaves out what the commands say."""


def _nodes(pyslurm: Any, names: Sequence[str]) -> dict[str, object]:
    found = [pyslurm.Node.load(name) for name in names] if names else list(pyslurm.Nodes.load().values())
    return {"nodes": [record(node) for node in found]}


def record(node: Any) -> dict[str, object]:
    """Return a node as scontrol's JSON has it. pyslurm does not tell which resources are in use."""
    return {
        "name": node.name,
        "state": [node.state],
        "partitions": list(node.partitions or ()),
        "cpus": node.total_cpus,
        "alloc_cpus": node.allocated_cpus,
        "real_memory": node.real_memory,
        "alloc_memory": node.allocated_memory,
        "gres": ",".join(f"{kind}:{count}" for kind, count in (node.configured_gres or {}).items()),
        "features": list(node.available_features or ()),
        "active_features": list(node.active_features or ()),
        "weight": node.weight,
        "reason": node.reason,
        "reason_set_by_user": node.reason_user,
        "reason_changed_at": node.reason_time,
        "comment": node.comment,
        "extra": node.extra,
        "address": node.address,
        "version": node.slurm_version,
    }


def _jobs(pyslurm: Any, numbers: Sequence[str]) -> dict[str, object]:
    """Answer with jobs; all are loaded, since libslurm's question for one gives a single record of an array."""
    found = list(pyslurm.Jobs.load().values())
    if numbers:
        found = [job for job in found if not {str(job.id), str(job.array_id)}.isdisjoint(numbers)]
    if any("_" in number for number in numbers) or any(job.array_id or job.dependencies for job in found):
        raise _NotTold("pyslurm does not tell an array's tasks, nor the state of a dependency")
    return {"jobs": [job_record(job) for job in found]}


def job_record(job: Any) -> dict[str, object]:
    """Return a job as scontrol's JSON has it."""
    return {
        "job_id": job.id,
        "job_state": [job.state],
        "state_reason": job.state_reason,
        "user_name": job.user_name,
        "user_id": job.user_id,
        "account": job.account,
        "qos": job.qos,
        "partition": job.partition,
        "node_count": job.num_nodes,
        "nodes": job.allocated_nodes,
        "time_limit": {"infinite": True} if job.time_limit == "UNLIMITED" else job.time_limit,
        "submit_time": job.submit_time,
        "start_time": job.start_time,
        "end_time": job.end_time,
        "restart_cnt": job.requeue_count,
        "name": job.name,
        "comment": job.comment,
        "command": job.command,
        "current_working_directory": job.working_directory,
    }


def _partitions(pyslurm: Any, _names: Sequence[str]) -> dict[str, object]:
    return {"partitions": "\n".join(partition_line(one) for one in pyslurm.Partitions.load().values())}


def partition_line(partition: Any) -> str:
    """Return a partition as ``scontrol -o show partitions`` has it."""
    fields = {
        "PartitionName": partition.name,
        "Default": "YES" if partition.is_default else "NO",
        "DefaultTime": _duration(partition.default_time),
        "MaxNodes": partition.max_nodes,
        "MaxTime": _duration(partition.max_time),
        "MinNodes": partition.min_nodes,
        "Nodes": partition.nodes,
        "PriorityTier": partition.priority_tier,
        "OverSubscribe": partition.oversubscribe,
        "PreemptMode": partition.preempt_mode,
        "State": partition.state,
        "TotalCPUs": partition.total_cpus,
        "TotalNodes": partition.total_nodes,
    }
    return " ".join(f"{name}={'' if value is None else value}" for name, value in fields.items())


def _duration(minutes: Any) -> Any:
    """Return minutes as Slurm writes them, MINUTES:SECONDS; other values as they are."""
    return f"{minutes}:00" if isinstance(minutes, int) else minutes


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


ANSWERS: dict[str, Callable[[Any, Sequence[str]], dict[str, object]]] = {
    "nodes": _nodes,
    "jobs": _jobs,
    "partitions": _partitions,
}

if __name__ == "__main__":
    sys.exit(main())
