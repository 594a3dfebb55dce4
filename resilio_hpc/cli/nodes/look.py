"""``resilio nodes list | exclude | learn | forget | report``: remembered faults, and changes of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.drain_options import names_of
from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.events.phrases import seconds
from resilio_hpc.launch.chain.suspect_nodes import suspect_nodes
from resilio_hpc.prolog_epilog.base import reports
from resilio_hpc.slurm.client import commands, this_node
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.hostlist import compress
from resilio_hpc.slurm.client.orders import check_nodes
from resilio_hpc.slurm.node_faults.fault import FORGOTTEN, NodeFault, evidence
from resilio_hpc.slurm.node_faults.ledger import SYSTEM, FaultLedger, users_directory
from resilio_hpc.slurm.node_faults.policy import FaultPolicy, fault_policy
from resilio_hpc.slurm.node_faults.score import Counted, NodeScore, scores
from resilio_hpc.slurm.submit.new_job import of_options


def ledger_of(options: argparse.Namespace) -> FaultLedger:
    """Return the ledger that the options name. Raises UsageError where memory is switched off."""
    if options.ledger is not None:
        return FaultLedger(options.ledger)
    if options.system:
        return FaultLedger(SYSTEM)
    run_dir = getattr(options, "run_dir", None) or Path("resilio-runs/0")
    directory = users_directory(os.environ, run_dir)
    if directory is None:
        raise UsageError("RESILIO_NODE_FAULTS=off: nothing is remembered (--ledger DIR names a ledger)")
    return FaultLedger(directory)


def _scored(options: argparse.Namespace, policy: FaultPolicy, cluster: str = "") -> list[NodeScore]:
    kept = ledger_of(options).read()
    for problem in kept.problems:
        print(f"resilio: warning: {printable(problem)}", file=sys.stderr)
    return scores(kept.faults, time.time(), policy, cluster)


def cluster_name() -> str:
    """Return Slurm's name of this cluster, "" without one."""
    return os.environ.get("SLURM_CLUSTER_NAME", "") or commands.config_value("ClusterName")


# -- looking ---------------------------------------------------------------------------------------------------------


def list_(options: argparse.Namespace) -> int:
    """Print scores, and for named nodes each fault."""
    policy = fault_policy(options.policy)
    wanted = set(names_of(options.nodes))
    found = [one for one in _scored(options, policy) if not wanted or one.node in wanted]
    if options.json:
        print(json.dumps([_facts(one) for one in found], indent=1))
        return 0
    if not found:
        print("no faults are remembered" + (f" of {', '.join(sorted(wanted))}" if wanted else ""))
    for one in found:
        print(f"{one.node}: {one.summary}{_follows(one, policy)}")
        for counted in one.counted if wanted else ():
            print(f"  {_line(counted)}")
    return 0


def _follows(one: NodeScore, policy: FaultPolicy) -> str:
    if one.score >= policy.drain_at:
        return "; at or above the threshold for a drain"
    return "; avoided by jobs" if one.score >= policy.exclude_at else ""


def _line(counted: Counted) -> str:
    fault = counted.fault
    age = seconds(max(0.0, time.time() - fault.time))
    what = " ".join(word for word in (fault.kind, fault.check, fault.device) if word)
    where = f", job {fault.job}" if fault.job else ""
    return f"counts {counted.worth:.2f}, {age} ago{where}: {what}: {printable(fault.evidence)}"


def _facts(one: NodeScore) -> dict[str, object]:
    faults = [
        {"time": c.fault.time, "kind": c.fault.kind, "check": c.fault.check, "device": c.fault.device,
         "run": c.fault.run, "job": c.fault.job, "counts": round(c.worth, 4), "evidence": c.fault.evidence}
        for c in one.counted
    ]  # fmt: skip
    devices = {device: round(part, 4) for device, part in one.devices.items() if device}
    return {"node": one.node, "score": round(one.score, 4), "devices": devices, "faults": faults}


def exclude(options: argparse.Namespace) -> int:
    """Print a host list on standard output, empty where nothing is to be avoided; the reasons on standard error."""
    policy = fault_policy(options.policy)
    wants = {"nodes": str(options.nodes), **({"partition": options.partition} if options.partition else {})}
    scored = [one for one in _scored(options, policy, cluster_name()) if one.score >= policy.exclude_at]
    if not scored:
        print("[]" if options.json else "")
        return 0
    chosen = of_options(wants, scored, CommandClient(), policy)
    print(json.dumps(chosen.nodes) if options.json else compress(chosen.nodes))
    if chosen.why:
        print(f"resilio: {printable(chosen.why, 1000)}", file=sys.stderr)
    return 0


# -- changing --------------------------------------------------------------------------------------------------------


def learn(options: argparse.Namespace) -> int:
    """Add the faults in a run's ledger; known ones are not added again."""
    options.run_dir = run_argument.run_of(options)
    if not (options.run_dir / "ledger").is_dir():
        raise UsageError(f"{options.run_dir}: there is no run (it has no ledger)")
    options.run_dir = trusted_files.run_directory(options.run_dir)
    ledger, run = ledger_of(options), Fields.of(trusted_files.read_object(options.run_dir / "run.json")).text("run_id")
    known = {fault.key for fault in ledger.read().faults}
    cluster = cluster_name()
    seen = suspect_nodes(read_ledger(options.run_dir / "ledger"), run, cluster)
    return _append(ledger, [fault for fault in seen if fault.key not in known], options)


def forget(options: argparse.Namespace) -> int:
    """Forget the remembered faults of these nodes."""
    names = names_of(options.nodes)
    check_nodes(names)
    now = time.time()
    lines = [NodeFault(time=now, node=name, kind=FORGOTTEN, evidence=evidence(options.why)) for name in names]
    return _append(ledger_of(options), lines, options)


def _append(ledger: FaultLedger, faults: list[NodeFault], options: argparse.Namespace) -> int:
    if not options.dry_run:
        ledger.append(faults)
    if options.json:
        added = [{"node": one.node, "kind": one.kind, "time": one.time, "evidence": one.evidence} for one in faults]
        print(json.dumps({"ledger": str(ledger.directory), "written": not options.dry_run, "added": added}, indent=1))
        return 0
    would = "would be " if options.dry_run else ""
    for one in faults:
        print(f"{one.node}: {one.kind}: {printable(one.evidence)}")
    print(f"{len(faults)} {would}added to {ledger.directory}")
    return 0


def report(options: argparse.Namespace) -> int:
    """Ask root's own checks to look at this node; a report has no other effect."""
    check_nodes([options.node])
    here = this_node.name_or_host()
    if options.node != here and options.spool == reports.SPOOL:
        raise UsageError(
            f"reports are read on the node itself: run this on {options.node} (this is {here}), as with "
            f"srun --nodelist={options.node}, or name a spool that the nodes share with --spool"
        )
    text = reports.Report(node=options.node, why=evidence(options.why))
    name = "" if options.dry_run else reports.write(options.spool, text)
    if options.json:
        print(json.dumps({"node": options.node, "why": text.why, "file": name}))
    elif options.dry_run:
        print(f"{options.node}: would be reported in {options.spool}: {text.why}")
    else:
        print(f"{options.node}: reported; root's daemon there checks it within a minute or so (resilio health why)")
    return 0
