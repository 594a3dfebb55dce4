"""How many nodes Slurm's accounting allows a user, an account and a QOS (sacctmgr manual, LIMITS).

Only limits on nodes and GPUs that are in use together count here; other limits show when a job waits for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import CommandError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.model import Job
from resilio_hpc.slurm.client.runner import Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import Unanswered, refused

_ASSOCIATION = ("Account", "User", "GrpTRES")
_QOS = ("Name", "GrpTRES", "MaxTRESPU", "MaxTRESPA")


@dataclass(frozen=True)
class NodeLimit:
    """What running jobs of ``user``, ``account`` and ``qos`` ("" for any) may use together; None for no limit."""

    nodes: int | None = None
    gpus: int | None = None
    user: str = ""
    account: str = ""
    qos: str = ""


def fetch_limits(user: str, account: str, qos: str, run: Runner = run_here) -> tuple[NodeLimit, ...]:
    """Return the limits for a job of this user, account and QOS; none without accounting.

    Raises SlurmError without an answer, which tells nothing about limits.
    """
    enforced = commands.config(run).get("AccountingStorageEnforce")
    if enforced is None:
        raise Unanswered("scontrol show config does not tell what accounting enforces")
    if "limits" not in enforced.lower():
        return ()
    show = ["sacctmgr", "-n", "-P", "show"]
    associations = [*show, "assoc", f"account={account}", f"format={','.join(_ASSOCIATION)}"]
    qualities = [*show, "qos", f"format={','.join(_QOS)}"]
    try:
        told = run(associations, commands.TIMEOUT_S, {}).stdout if account else ""
        qos_told = run(qualities, commands.TIMEOUT_S, {}).stdout if qos else ""
    except CommandError as error:
        raise refused(error) from error
    return (*parse_associations(told, user, account), *parse_qos(qos_told, user, account, qos))


def parse_associations(text: str, user: str, account: str) -> tuple[NodeLimit, ...]:
    """Return ``physics||node=8`` as the account's, ``physics|bob|node=4,gres/gpu=32`` as a user's in it. Pure."""
    rows = [line.split("|") for line in text.splitlines()]
    mine = [row for row in rows if len(row) == len(_ASSOCIATION) and row[0] == account and row[1] in ("", user)]
    return _some([_limit(row[2], user=row[1], account=account) for row in mine])


def parse_qos(text: str, user: str, account: str, qos: str) -> tuple[NodeLimit, ...]:
    """Return the limits of lines ``normal|node=100|node=10|``. Pure."""
    rows = [line.split("|") for line in text.splitlines()]
    found = next((row for row in rows if len(row) == len(_QOS) and row[0] == qos), None)
    if found is None:
        return ()
    return _some(
        [_limit(found[1], qos=qos), _limit(found[2], qos=qos, user=user), _limit(found[3], qos=qos, account=account)]
    )


def _some(limits: Sequence[NodeLimit]) -> tuple[NodeLimit, ...]:
    return tuple(limit for limit in limits if limit.nodes is not None or limit.gpus is not None)


def _limit(tres: str, user: str = "", account: str = "", qos: str = "") -> NodeLimit:
    counts = {name: int(count) for name, count in re.findall(r"(?:^|,)(node|gres/gpu)=(\d{1,9})(?=,|$)", tres)}
    return NodeLimit(counts.get("node"), counts.get("gres/gpu"), user, account, qos)


def nodes_left(limits: Sequence[NodeLimit], jobs: Sequence[Job], gpus_per_node: int) -> int | None:
    """Return how many more nodes the limits allow; None without any.

    GPUs count as ``gpus_per_node`` for each node that a job has, which is too many where jobs share nodes. Pure.
    """
    running = [job for job in jobs if job.state.base == "RUNNING"]
    left: list[int] = []
    for limit in limits:
        counted = [
            job for job in running
            if limit.user in ("", job.user) and limit.account in ("", job.account) and limit.qos in ("", job.qos)
        ]  # fmt: skip
        nodes = sum(job.node_count or len(job.nodes) for job in counted)
        if limit.nodes is not None:
            left.append(limit.nodes - nodes)
        if limit.gpus is not None and gpus_per_node:
            left.append(limit.gpus // gpus_per_node - nodes)
    return max(0, min(left)) if left else None
