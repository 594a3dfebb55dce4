"""Which nodes a run has found faulty, from its ledger: not every failure is a node's. Pure.

A node is to blame where it fell silent while no user had asked the run to end, where a rank's error is known to be its
GPU's, where its own disk failed, where processes outlived SIGKILL, or where a test of the run's nodes found it.
Exceptions, signals and out-of-memory kills of the script say nothing of the node, nor does an agent that a user has
killed on purpose (a drill).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.diagnose.causes.known_faults import fault_in
from resilio_hpc.diagnose.causes.pattern_table import FaultOf
from resilio_hpc.events.drill_marks import DrillMarks
from resilio_hpc.events.event_text import words
from resilio_hpc.slurm.node_faults.fault import NodeFault, decode, encode, evidence

ENDING = ("warned", "stopping", "verdict")
GOING = ("signal", "leaving")  # of one node, or of all nodes of a job


def suspect_nodes(events: Iterable[Event], run: str = "", cluster: str = "") -> list[NodeFault]:
    """Return the faults of nodes in a run's ledger. ``events`` by time, of all writers and jobs; ``run``: its id.

    Runs outside of Slurm blame no node: their nodes are this machine, in several parts.
    """
    found: list[NodeFault] = []
    job, in_slurm, ends = "", False, False
    going: set[str] = set()
    drills = DrillMarks()
    for event in events:
        drills.take(event)
        f = Fields(event.fields)
        if event.kind == "launch":
            job, in_slurm, ends, going = f.text("job"), f.text("mode") != "local", False, set()
        elif event.kind in ENDING or (event.kind == "signal" and f.has("to")):
            ends = True
        elif event.kind in GOING:
            going.add(f.text("node"))
        elif event.kind == "node_returned":
            going.discard(f.text("node"))
            found = [_was_silent_only(fault, f.text("node"), job) for fault in found]
        rank, at = f.data.get("local_rank"), max(0.0, event.time - (f.number("silent_s") or 0.0))
        for node, kind, why in _blamed(event, f):
            if not in_slurm or (kind == "node-lost" and (ends or node in going)):
                continue
            if kind == "node-lost" and drills.of(node, at) is not None:
                continue  # its agent was killed on purpose
            device = f"local rank {rank}" if kind == "device-error" and rank is not None else ""
            fault = NodeFault(
                time=at, node=node, kind=kind, device=device, run=run, job=job, cluster=cluster, evidence=evidence(why)
            )
            if _can_be_kept(fault):
                found.append(fault)
    return found


def _blamed(event: Event, f: Fields) -> list[tuple[str, str, str]]:
    """Return node, kind and evidence of each fault that an event tells of."""
    if event.kind == "tested":
        why = f.inner("evidence")
        kinds = (("bad", "tested-bad"), ("slow", "tested-slow"))
        return [(node, kind, why.text(node, f"{state} in a test of nodes"))
                for state, kind in kinds for node in f.texts(state)]  # fmt: skip
    kind = _kind(event.kind, f)
    return [(f.text("node"), kind, words(event.kind, event.fields))] if kind else []


def _was_silent_only(fault: NodeFault, node: str, job: str) -> NodeFault:
    """Return the fault of a node that came back into its job: it was cut off or stood still, and did not lose power."""
    if (fault.node, fault.job, fault.kind) != (node, job, "node-lost"):
        return fault
    return msgspec.structs.replace(fault, kind="node-silent")


def _kind(event: str, f: Fields) -> str:
    if event == "node_lost":
        return "node-lost"
    if event == "stop_failed":
        return "unkillable"
    if event == "local_failed" and fault_in(f.text("error"), FaultOf.DISK):
        return "disk-error"
    said = f"{f.text('message')}\n{f.text('traceback')}"
    if event == "rank_failed" and fault_in(said, FaultOf.DEVICE):
        return "device-error"
    return ""


def _can_be_kept(fault: NodeFault) -> bool:
    try:
        return decode(encode(fault)) is not None
    except ValueError:  # a ledger that a user has edited
        return False
