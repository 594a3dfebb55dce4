"""Shared by ``resilio drain`` and ``resilio undrain``: options, the writer, output, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from typing_extensions import assert_never

from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.hostlist import expand
from resilio_hpc.slurm.drain.outcome import DrainOutcome, DrainResult
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.writer import ACT, DRY_RUN, OBSERVE, DrainWriter
from resilio_hpc.slurm.orders.audit import DEFAULT_PATH, PATH_VARIABLE, AuditLog

EXIT_CODES = (
    "exit codes: 0 done, or nothing to do; 1 Slurm did not answer or refused; 2 a mistake in the command; "
    "3 a node was left as it is, since it is another's or too many are drained"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="n3, or several: n[1-4,7]")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--dry-run", action="store_true", help="say what would be done; nothing is written anywhere")
    modes.add_argument("--observe", action="store_true", help="the same, and written to the audit log")
    parser.add_argument("--audit", type=Path, metavar="FILE", help=f"audit log (${PATH_VARIABLE}, else {DEFAULT_PATH})")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="numbers for drain_policy.toml's")
    parser.add_argument("--json", action="store_true", help="a line of JSON per node")


def names_of(words: Sequence[str]) -> list[str]:
    """Return the nodes named, each once. Raises UsageError."""
    return list(dict.fromkeys(name for word in words for name in expand(word)))


def writer(options: argparse.Namespace, breaker: bool = True, client: SlurmClient | None = None) -> DrainWriter:
    """Return the drain writer that the options describe, through ``client`` (default: the best).

    Raises UsageError.
    """
    mode, audit = mode_and_audit(options)
    return DrainWriter(client or CommandClient(), drain_policy(options.policy), audit, mode, breaker=breaker)


def mode_and_audit(options: argparse.Namespace) -> tuple[str, AuditLog]:
    """Return what is carried out, and the log for it."""
    mode = DRY_RUN if options.dry_run else OBSERVE if options.observe else ACT
    path = None if mode == DRY_RUN else options.audit or Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)
    return mode, AuditLog(path)


def carry_out(names: Sequence[str], act: Callable[[str], DrainOutcome], drainer: DrainWriter, as_json: bool) -> int:
    """Act on one node after the other; print each outcome as it comes. Return the exit code.

    A Slurm that does not answer is not asked for each of a thousand nodes.
    """
    results: list[DrainResult] = []
    for name in names:
        outcome = act(name)
        results.append(outcome.result)
        print(_line(outcome, as_json), flush=True)
        if outcome.result in (DrainResult.STORM, DrainResult.SHARED):
            print(f"resilio: TOO MANY DRAINS: {outcome.why} (--no-breaker drains all the same)", file=sys.stderr)
        if outcome.unanswered:
            rest = len(names) - names.index(name) - 1
            print(f"resilio: Slurm does not answer{f'; {rest} more nodes not tried' if rest else ''}", file=sys.stderr)
            break
    if drainer.audit_problem:
        print(f"resilio: warning: {drainer.audit_problem}", file=sys.stderr)
    return exit_code(results)


def exit_code(results: Iterable[DrainResult]) -> int:
    """Return the exit code of EXIT_CODES for these nodes together: a failure weighs most."""
    codes = {_code(result) for result in results}
    return 1 if 1 in codes else max(codes, default=0)


def _code(result: DrainResult) -> int:
    match result:
        case DrainResult.DRAINED | DrainResult.REWORDED | DrainResult.UNDRAINED | DrainResult.NOTHING:
            return 0
        case DrainResult.OFFERED | DrainResult.WOULD_ACT:
            return 0
        case DrainResult.UNKNOWN | DrainResult.REFUSED:
            return 1
        case DrainResult.LEFT | DrainResult.STORM | DrainResult.SHARED | DrainResult.OVERTAKEN | DrainResult.CONTESTED:
            return 3
        case _:
            assert_never(result)


def _line(outcome: DrainOutcome, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(outcome).decode()
    return f"{outcome.node}: {outcome.result}: {printable(outcome.why, 800)}"
