"""What ``resilio drain`` and ``resilio undrain`` share: options, the writer, what is printed, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.hostlist import expand
from resilio_hpc.slurm.client.which_client import which
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.writer import ACT, DRY_RUN, OBSERVE, DrainWriter, Outcome
from resilio_hpc.slurm.orders.audit import DEFAULT_PATH, PATH_VARIABLE, AuditLog

EXIT_CODES = (
    "exit codes: 0 done, or nothing to do; 1 Slurm did not answer or refused; 2 a mistake in the command; "
    "3 a node was left as it is, since it is somebody else's or too many are drained"
)
_LEFT, _FAILED = {"left", "storm", "shared", "overtaken", "contested"}, {"unknown", "refused"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that both commands have."""
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="n3, or several: n[1-4,7]")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--dry-run", action="store_true", help="say what would be done; nothing is written anywhere")
    modes.add_argument("--observe", action="store_true", help="the same, and written to the audit log")
    parser.add_argument("--audit", type=Path, metavar="FILE", help=f"audit log (${PATH_VARIABLE}, else {DEFAULT_PATH})")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="numbers for drain_policy.toml's")
    parser.add_argument("--json", action="store_true", help="a line of JSON per node")


def names_of(words: Sequence[str]) -> list[str]:
    """The nodes named, each once. Raises UsageError."""
    return list(dict.fromkeys(name for word in words for name in expand(word)))


def writer(options: argparse.Namespace, breaker: bool = True, client: SlurmClient | None = None) -> DrainWriter:
    """The drain writer that the options describe, by way of ``client`` (default: the best). Raises UsageError."""
    mode, audit = mode_and_audit(options)
    return DrainWriter(client or which(), drain_policy(options.policy), audit, mode, breaker=breaker)


def mode_and_audit(options: argparse.Namespace) -> tuple[str, AuditLog]:
    """Return what is carried out, and where it is written down."""
    mode = DRY_RUN if options.dry_run else OBSERVE if options.observe else ACT
    path = None if mode == DRY_RUN else options.audit or Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)
    return mode, AuditLog(path)


def exit_code(results: set[str]) -> int:
    """Return the code that EXIT_CODES has for these results."""
    return 1 if results & _FAILED else 3 if results & _LEFT else 0


def carry_out(names: Sequence[str], act: Callable[[str], Outcome], drainer: DrainWriter, as_json: bool) -> int:
    """One node after the other; prints each outcome as it comes. Returns the exit code.

    A Slurm that does not answer is not asked for each of a thousand nodes.
    """
    results = set[str]()
    for name in names:
        outcome = act(name)
        results.add(outcome.result)
        print(_line(outcome, as_json), flush=True)
        if outcome.result in ("storm", "shared"):
            print(f"resilio: TOO MANY DRAINS: {outcome.why} (--no-breaker drains all the same)", file=sys.stderr)
        if outcome.unanswered:
            rest = len(names) - names.index(name) - 1
            print(f"resilio: Slurm does not answer{f'; {rest} more nodes not tried' if rest else ''}", file=sys.stderr)
            break
    if drainer.audit_problem:
        print(f"resilio: warning: {drainer.audit_problem}", file=sys.stderr)
    return exit_code(results)


def _line(outcome: Outcome, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(outcome).decode()
    return f"{outcome.node}: {outcome.result}: {printable(outcome.why, 800)}"
