"""Nodes and jobs from ``sinfo -O`` and ``squeue -O``, partitions from ``scontrol``: output of every version. Pure.

A job's name and comment are its user's, and may hold any separator, newlines, even whole rows of such a table. So each
question ends its columns in a random mark, which no user can have written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.gres import parse_gres
from resilio_hpc.slurm.client.job_json import host_names
from resilio_hpc.slurm.client.json_values import texts, whole
from resilio_hpc.slurm.client.model import Job, Node, Partition
from resilio_hpc.slurm.client.states import job_state, node_state

NODE_COLUMNS = (
    "NodeList", "StateComplete", "CPUs", "CPUsState", "Memory", "AllocMem", "Gres", "GresUsed", "Features",
    "features_act", "Weight", "PartitionName", "Reason", "UserLong", "Timestamp", "Comment", "Extra", "NodeAddr",
    "Version",
)  # fmt: skip
JOB_COLUMNS = (
    "JobID", "State", "ArrayJobID", "ArrayTaskID", "Reason", "UserName", "UserID", "Account", "QOS", "Partition",
    "NumNodes", "NodeList", "TimeLimit", "SubmitTime", "StartTime", "EndTime", "RestartCnt", "Dependency",
    "Name", "Comment", "Command", "WorkDir",
)  # fmt: skip
_UNSET = {"", "(null)", "N/A", "n/a", "None", "NONE", "Unknown", "NOT_SET", "INVALID", "Partition_Limit"}
_DURATION = re.compile(r"(?:(\d{1,9})-)?(?:(?:(\d{1,9}):)?(\d{1,9}):)?(\d{1,9})")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")


def column_format(columns: Sequence[str], mark: str) -> str:
    """Return the argument of ``-O``; Slurm clips no column whose width is left out."""
    return ",".join(f"{column}:{mark}" for column in columns)


def table(output: str, columns: Sequence[str], mark: str) -> list[dict[str, str]]:
    """Return the rows. Raises Garbled when the last one is torn."""
    *cells, rest = output.split(mark)
    if rest.strip() or len(cells) % len(columns):
        raise Garbled(f"Slurm's table of {len(columns)} columns is torn: {len(cells)} cells")
    rows = [cells[start : start + len(columns)] for start in range(0, len(cells), len(columns))]
    return [dict(zip(columns, [row[0].lstrip("\n"), *row[1:]], strict=True)) for row in rows]


def parse_nodes(output: str, mark: str) -> tuple[Node, ...]:
    """Return the nodes, from one row per node and partition, so only nodes in a partition. Raises Garbled."""
    first: dict[str, dict[str, str]] = {}
    partitions: dict[str, list[str]] = {}
    for row in table(output, NODE_COLUMNS, mark):
        first.setdefault(row["NodeList"], row)
        partitions.setdefault(row["NodeList"], []).append(row["PartitionName"])
    return tuple(_node(row, partitions[name]) for name, row in first.items() if name)


def _node(row: dict[str, str], partitions: list[str]) -> Node:
    when, by = row["Timestamp"], row["UserLong"].partition("(")[0]
    set_at = whole(when) or None
    reason = row["Reason"] if set_at is not None or row["Reason"] != "none" else ""  # "none" may be a user's reason
    return Node(
        name=row["NodeList"],
        state=node_state([row["StateComplete"]]),
        partitions=tuple(sorted(name for name in partitions if name not in _UNSET)),
        cpus=whole(row["CPUs"]),
        cpus_allocated=whole(row["CPUsState"].partition("/")[0]),
        memory_mb=whole(row["Memory"]),
        memory_allocated_mb=whole(row["AllocMem"]),
        gres=parse_gres(row["Gres"]),
        gres_used=parse_gres(row["GresUsed"]),
        features=texts(row["Features"]),
        active_features=texts(row["features_act"]),
        weight=whole(row["Weight"]),
        reason=reason,
        reason_by="" if not reason or by in _UNSET else by,
        reason_time=set_at if reason else None,
        comment=_written(row["Comment"]),
        extra=_written(row["Extra"]),
        address=row["NodeAddr"],
        version=_plain(row["Version"]),
    )


def parse_jobs(output: str, mark: str) -> tuple[Job, ...]:
    """Return the jobs, from one row each. Raises Garbled."""
    rows = table(output, JOB_COLUMNS, mark)
    return tuple(_job(row, number) for row in rows if (number := whole(row["JobID"])))


def _job(row: dict[str, str], number: int) -> Job:
    tasks = _plain(row["ArrayTaskID"])
    return Job(
        id=number,
        state=job_state([row["State"]]),
        array_job_id=whole(row["ArrayJobID"]) if tasks else None,
        array_tasks=tasks,
        reason=row["Reason"],
        user=row["UserName"],
        user_id=whole(row["UserID"]),
        account=_plain(row["Account"]),
        qos=_plain(row["QOS"]),
        partition=row["Partition"],
        node_count=whole(row["NumNodes"].partition("-")[0]),
        nodes=host_names(row["NodeList"]),
        time_limit_s=duration_s(row["TimeLimit"]),
        submit_time=whole(row["SubmitTime"]) or None,
        start_time=whole(row["StartTime"]) or None,
        end_time=whole(row["EndTime"]) or None,
        restarts=whole(row["RestartCnt"]),
        dependency=_plain(row["Dependency"]),
        name=row["Name"],
        comment=_written(row["Comment"]),
        command=_written(row["Command"]),
        work_dir=row["WorkDir"],
    )


def parse_partitions(output: str) -> tuple[Partition, ...]:
    """Return the partitions of ``scontrol -o show partitions``: a line each, the same from 22.05 to 26.05.

    No text of users is in it. Slurm's JSON is newer, and names the default partition only from 26.05 on.
    """
    rows = [dict(_FIELD.findall(line)) for line in output.splitlines()]
    return tuple(_partition(row) for row in rows if row.get("PartitionName"))


def _partition(row: dict[str, str]) -> Partition:
    def value(name: str) -> str:
        return _plain(row.get(name, ""))

    return Partition(
        name=row["PartitionName"],
        state=value("State") or "UNKNOWN",
        nodes=host_names(value("Nodes")),
        total_nodes=whole(value("TotalNodes")),
        total_cpus=whole(value("TotalCPUs")),
        default=value("Default") == "YES",
        max_time_s=duration_s(value("MaxTime")),
        default_time_s=duration_s(value("DefaultTime")),
        max_nodes=math.inf if value("MaxNodes") == "UNLIMITED" else whole(value("MaxNodes")),
        min_nodes=whole(value("MinNodes")),
        priority_tier=whole(value("PriorityTier")),
        preempt_mode=value("PreemptMode"),
        over_subscribe=value("OverSubscribe"),
    )


def duration_s(text: str) -> float | None:
    """Return the seconds of ``1-00:00:00``, ``30:00`` (minutes:seconds), ``UNLIMITED``; None for what is not set."""
    if text == "UNLIMITED":
        return math.inf
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _plain(text: str) -> str:
    return "" if text in _UNSET else text


def _written(text: str) -> str:
    """Return a user's text, which may be "None"."""
    return "" if text == "(null)" else text
