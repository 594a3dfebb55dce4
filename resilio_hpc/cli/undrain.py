"""``resilio undrain NODE…``: end this package's own drains, and no others."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from resilio_hpc.cli.common.drain_options import EXIT_CODES, add_options, carry_out, names_of, writer
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.health import run
from resilio_hpc.core.errors import HealthError, SlurmError
from resilio_hpc.prolog_epilog.drain.node_drains import DRAINED_LEAVE_S
from resilio_hpc.prolog_epilog.run.cached_verdict import DIRECTORY
from resilio_hpc.slurm.client import this_node
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.outcome import DrainOutcome, DrainResult
from resilio_hpc.slurm.drain.reason import BY_HAND, read_reason
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.node_faults.from_slurm import DRAINED_FOR_FAULTS

_EXAMPLES = """examples:
  resilio undrain n3
  resilio undrain n[3-5] --check gpu.xid
  resilio undrain --kill-task-failed n7
"""
_CLOCKS_S = 1.0  # slurmctld writes whole seconds
LookAgain = Callable[[str, Collection[str]], Mapping[str, str] | None]
"""From a node and checks: evidence by check that still fails; None where this is not the node, or it cannot be told."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see EXIT_CODES."""
    parser = Parser(
        prog="resilio undrain",
        description="End the drains that resilio_hpc made. Those of administrators and of Slurm itself stay, and so "
        "does a reason of ours that was edited. A node that is DOWN stays DOWN. Just after a drain, prologs "
        "of jobs on their way may still fail: the command waits for that. A node whose check still fails is drained "
        "again; on the node itself that is looked at before.",
        epilog=_EXAMPLES + EXIT_CODES,
    )
    add_options(parser)
    which_drain = parser.add_mutually_exclusive_group()
    which_drain.add_argument("--check", metavar="ID", help="only what this check holds (default: all of ours)")
    which_drain.add_argument(
        "--kill-task-failed",
        action="store_true",
        help='instead end a drain that Slurm made itself ("Kill task failed"): look first whether its processes ended',
    )
    options = parser.parse_args(argv)
    names = names_of(options.nodes)
    client = CommandClient()
    drainer = writer(options, client=client)
    if options.kill_task_failed:
        return carry_out(names, drainer.resume_slurms_own, drainer, options.json)
    if options.dry_run or options.observe:
        return carry_out(names, lambda name: drainer.undrain(name, options.check), drainer, options.json)
    return carry_out(names, lambda name: end(name, options.check, drainer, client), drainer, options.json)


def look_here(node: str, checks: Collection[str]) -> Mapping[str, str] | None:
    """Run the node's checks again for a new verdict, if this is the node and its verdicts are kept."""
    if os.geteuid() != 0 or not DIRECTORY.is_dir() or this_node.name_or_host() != node:
        return None
    try:
        return run.look_again(node, checks)
    except HealthError:
        return None


def end(
    node: str,
    check: str | None,
    drainer: DrainWriter,
    client: SlurmClient,
    look: LookAgain = look_here,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> DrainOutcome:
    """End the drain once no prolog may fail for an old verdict; the outcome tells the results of the node's checks."""
    try:
        before = next(iter(client.nodes([node])), None)
    except SlurmError:  # the order will report it
        before = None
    checks = _checks_of(before, check)
    fails: Mapping[str, str] | None = None
    if before is not None and checks:
        fails = look(node, checks)
        _wait_for_prologs(before, clock, sleep)
    outcome = drainer.undrain(node, check)
    if outcome.result is not DrainResult.UNDRAINED or not checks:
        return outcome
    return replace(outcome, why=f"{outcome.why}; {_what_follows(checks, fails)}")


def _checks_of(node: Node | None, check: str | None) -> list[str]:
    """Return the health checks whose drain would end."""
    ours = read_reason(node.reason) if node is not None and node.state.drain else None
    named = [one.check for one in ours or () if check in (None, one.check)]
    return [one for one in named if one not in (BY_HAND, DRAINED_FOR_FAULTS)]


def _wait_for_prologs(node: Node, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Wait while prologs may fail: the node daemon permits that when it drains, for jobs on their way."""
    left_s = (node.reason_time or 0) + DRAINED_LEAVE_S + _CLOCKS_S - clock()
    if 0 < left_s <= DRAINED_LEAVE_S + _CLOCKS_S:
        print(f"resilio: {node.name}: its prologs may still fail for {left_s:.0f} s: waiting", file=sys.stderr)
        sleep(left_s)


def _what_follows(checks: Sequence[str], fails: Mapping[str, str] | None) -> str:
    if fails is None:
        names = ", ".join(checks)
        return f"its node daemon looks at {names} again, and drains it again where that still fails"
    if not fails:
        return f"{', '.join(checks)} looked again and found nothing"
    return "; ".join(f"{check} still fails ({why}): it will be drained again" for check, why in fails.items())
