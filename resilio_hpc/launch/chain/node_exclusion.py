"""Keeps which nodes a run found faulty for later jobs, and lets its next job avoid them (``--exclude``).

The ledger is the user's own (``slurm.node_faults``). ``links/JOB.excluded.json`` holds which of a job's excluded nodes
the launcher added. So nodes that the user named stay, and the others are removed when they are forgiven.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.launch.chain.suspect_nodes import suspect_nodes
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.chain.successor_options import EMPTY
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.hostlist import compress, expand
from resilio_hpc.slurm.node_faults.exclusion import Exclusion, alike, choose
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger, users_directory
from resilio_hpc.slurm.node_faults.policy import FaultPolicy, fault_policy
from resilio_hpc.slurm.node_faults.score import NodeScore, scores
from resilio_hpc.slurm.submit.new_job import EXCLUDED_VARIABLE

Record = Callable[..., None]


class Change(Struct, frozen=True):
    """A job's new list: ``nodes``, of which ``ours`` were not named by the user."""

    nodes: tuple[str, ...]
    ours: tuple[str, ...]
    why: str


def avoid_faulty_nodes(run_path: Path, job: str, nodes: Collection[str], successor: str | None, record: Record) -> None:
    """Keep what the run has learnt, and update the pending ``successor``'s list. ``nodes``: this job's.

    Never raises: a run does not end for what it could not learn. May hang with the run directory.
    """
    directory = users_directory(os.environ, run_path)
    if directory is None:
        return
    try:
        policy, cluster = fault_policy(), cluster_name()
        ledger = FaultLedger(directory)
        run_id = Fields.of(trusted_files.read_object(run_path / "run.json")).text("run_id")
        scored = scores(_learnt(ledger, run_path, run_id, cluster), time.time(), policy, cluster)
        if successor is not None:
            _refresh(run_path, job, nodes, successor, scored, policy, CommandClient(), record)
    except (ResilioError, OSError, ValueError) as error:
        say(f"note: which nodes later jobs had better avoid: {printable(str(error), 400)}")


def cluster_name() -> str:
    """Return the name of Slurm's cluster, in a job or outside; "" where it is unknown."""
    return os.environ.get("SLURM_CLUSTER_NAME") or commands.config_value("ClusterName")


def faulty_nodes(run_path: Path, run_id: str, events: Sequence[Event], cluster: str) -> frozenset[str]:
    """Return nodes that no job of the user should get now, from the node ledger and this run's own.

    Raises HealthError, OSError.
    """
    directory = users_directory(os.environ, run_path)
    if directory is None:
        return frozenset()
    policy = fault_policy()
    faults = [*FaultLedger(directory).read().faults, *suspect_nodes(events, run_id, cluster)]
    return frozenset(one.node for one in scores(faults, time.time(), policy, cluster) if one.score >= policy.exclude_at)


def _learnt(ledger: FaultLedger, run_path: Path, run_id: str, cluster: str) -> list[NodeFault]:
    known = list(ledger.read().faults)
    keys = {fault.key for fault in known}
    seen = suspect_nodes(read_ledger(run_path / "ledger"), run_id, cluster)
    new = [fault for fault in seen if fault.key not in keys]
    ledger.append(new)
    return known + new


def _refresh(
    run_path: Path, job: str, examples: Collection[str], successor: str, scored: list[NodeScore], policy: FaultPolicy,
    client: SlurmClient, record: Record,
) -> None:  # fmt: skip
    before = ours_of(run_path, successor, job, os.environ)
    if not before and not any(one.score >= policy.exclude_at for one in scored):
        return
    fields = commands.job_fields(successor)
    if fields.get("JobState", "") != "PENDING":
        return
    partitions = fields.get("Partition", "").split(",")
    pool = alike(client.nodes(), examples, partitions)
    change = decide_change(
        fields, before, lambda needed, by_hand: choose(scored, pool, needed, policy, by_hand, partitions)
    )
    if change is None:
        return
    # first, so that a launcher that dies after the order knows them as its own
    _write(run_path, successor, {*before, *change.ours})
    client.orders.update_job(successor, {"ExcNodeList": compress(change.nodes)})
    _write(run_path, successor, change.ours)
    record("excludes", job=successor, nodes=list(change.ours), why=change.why)
    if change.ours:
        say(f"--chain: the next job avoids {compress(change.ours)} ({printable(change.why, 300)})")


def decide_change(
    fields: Mapping[str, str], ours: Collection[str], choose_of: Callable[[int, Collection[str]], Exclusion]
) -> Change | None:
    """Return the list that a pending job should have; None if it has it. ``fields``: scontrol's. Pure.

    ``choose_of``: called with the number of nodes that the job needs, and the nodes that the user named.
    """
    now = _names(fields, "ExcNodeList")
    by_hand = [name for name in now if name not in ours]
    if fields.get("Reservation", "") in EMPTY:
        numbers = [int(word) for word in fields.get("NumNodes", "").split("-") if word.isdecimal()]
        chosen = choose_of(max(numbers, default=1), {*by_hand, *_names(fields, "ReqNodeList")})
    else:
        chosen = Exclusion(why="a job in a reservation takes the nodes of it")
    wanted = sorted({*by_hand, *chosen.nodes})
    return None if wanted == sorted(now) else Change(tuple(wanted), tuple(sorted(chosen.nodes)), chosen.why)


def _names(fields: Mapping[str, str], field: str) -> list[str]:
    value = fields.get(field, "")
    return [] if value in EMPTY else expand(value)


def ours_of(run_path: Path, successor: str, job: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return which of the successor's excluded nodes the launcher added: those noted for it, else this job's."""
    for number in (successor, job):
        kept = trusted_files.read_object(_file(run_path, number))
        if kept is not None:
            return Fields(kept).texts("nodes")
    try:
        return tuple(expand(environment.get(EXCLUDED_VARIABLE, "")))
    except UsageError:
        return ()


def _write(run_path: Path, job: str, ours: Collection[str]) -> None:
    write_atomic(_file(run_path, job), json.dumps({"v": 1, "nodes": sorted(ours)}).encode())


def _file(run_path: Path, job: str) -> Path:
    return run_path / "links" / f"{job}.excluded.json"
