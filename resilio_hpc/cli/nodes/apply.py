"""``resilio nodes apply``: weights and drains in Slurm from remembered faults. For administrators."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from resilio_hpc.cli.common.drain_options import exit_code, mode_and_audit, names_of
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.outcome import DrainResult
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.writer import ACT, DRY_RUN, DrainWriter
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.from_slurm import faults_seen
from resilio_hpc.slurm.node_faults.ledger import SYSTEM, FaultLedger
from resilio_hpc.slurm.node_faults.policy import fault_policy
from resilio_hpc.slurm.node_faults.score import scores
from resilio_hpc.slurm.node_faults.weight_file import WeightFile
from resilio_hpc.slurm.node_faults.weight_updater import Steered, Steering, WeightResult
from resilio_hpc.slurm.orders.audit import DEFAULT_PATH, PATH_VARIABLE


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command alone."""
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="only these (default: all)")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--dry-run", action="store_true", help="say what would be done; nothing is written anywhere")
    modes.add_argument("--observe", action="store_true", help="learn, and write to the audit log what would be done")
    parser.add_argument("--no-learn", action="store_true", help="do not learn from Slurm's own node reasons first")
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="take all weights that are not ours for the site's (slurm.conf was changed)",
    )
    parser.add_argument("--drain-policy", type=Path, metavar="FILE", help="numbers for drain_policy.toml's")
    parser.add_argument("--audit", type=Path, metavar="FILE", help=f"audit log (${PATH_VARIABLE}, else {DEFAULT_PATH})")


def apply(options: argparse.Namespace) -> int:
    """Learn, score, and carry out. Exit codes: drain_options.EXIT_CODES."""
    policy, (mode, audit) = fault_policy(options.policy), mode_and_audit(options)
    ledger = FaultLedger(options.ledger or SYSTEM)
    client, weights = CommandClient(), WeightFile(ledger.directory)
    wanted = set(names_of(options.nodes))
    results: list[DrainResult | WeightResult] = []

    def told(one: Steered) -> None:
        results.append(one.result)
        if one.result is not DrainResult.NOTHING:
            print(_line(one, options.json), flush=True)

    with nullcontext() if mode == DRY_RUN else weights.locked():
        nodes = client.nodes()
        if unknown := sorted(wanted - {node.name for node in nodes}):
            raise UsageError(f"Slurm knows no node {printable(unknown[0])}")
        faults = _learnt(ledger, nodes, options)
        scored = {one.node: one for one in scores(faults, time.time(), policy, "")}
        drains = DrainWriter(client, drain_policy(options.drain_policy), audit, mode)
        steering = Steering(client, drains, weights, audit, policy, mode)
        looked_at = [node for node in nodes if not wanted or node.name in wanted]
        steering.apply(looked_at, scored, told, options.adopt)
    if audit.problem:
        print(f"resilio: warning: {audit.problem}", file=sys.stderr)
    if not options.json and all(result is DrainResult.NOTHING for result in results):
        unchanged = "nothing would be changed" if mode != ACT else "nothing was to be changed"
        print(f"{len(looked_at)} nodes, {len(scored)} with remembered faults: {unchanged}", flush=True)
    return exit_code(result for result in results if isinstance(result, DrainResult))


def _learnt(ledger: FaultLedger, nodes: Sequence[Node], options: argparse.Namespace) -> list[NodeFault]:
    """Return the remembered faults and those that Slurm tells, which are kept too, unless this is a dry run."""
    kept = ledger.read()
    for problem in kept.problems:
        print(f"resilio: warning: {printable(problem)}", file=sys.stderr)
    known = {fault.key for fault in kept.faults}
    seen = [] if options.no_learn else faults_seen(nodes, commands.config_value("ClusterName"))
    new = [fault for fault in seen if fault.key not in known]
    if not options.dry_run:
        ledger.append(new)
    return [*kept.faults, *new]


def _line(one: Steered, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(one).decode()
    return f"{one.node}: {one.act}: {one.result}: {printable(one.why, 800)}"
