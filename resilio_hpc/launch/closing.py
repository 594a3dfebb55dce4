"""The last words of a launch: the verdict, and the first failure in one place (DLR-4)."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

MAX_TRACEBACK_LINES = 40


def verdict_lines(run_path: Path, verdict: dict[str, Any], successor: str | None) -> list[str]:
    """What the user reads at the end. Pure."""
    name = str(verdict.get("verdict", "unknown")).replace("_", " ")
    lines = [f"{name}: {verdict.get('reason', '')}"]
    failure = verdict.get("first_failure")
    if isinstance(failure, dict):
        lines += failure_lines(failure)
    restarts = verdict.get("restarts")
    if restarts:
        lines.append(f"{restarts} restart(s); last committed step {verdict.get('committed')}")
    if verdict.get("verdict") in ("time_limit", "needs_new_job", "terminated"):
        if successor:
            lines.append(f"job {successor} carries on from step {verdict.get('committed')}")
        else:
            lines.append(f"to carry on: resubmit with --run-dir {run_path}")
    elif verdict.get("exit_code"):
        lines.append(f"logs of all ranks: {run_path}/logs; what happened: resilio ledger {run_path}")
    return lines


def failure_lines(failure: dict[str, Any]) -> list[str]:
    """The first failure: node, rank, exit, time, traceback. Pure."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(failure.get("time", 0))))
    how = (
        f"signal {failure['signal']}" if failure.get("signal") is not None else f"exit code {failure.get('exit_code')}"
    )
    lines = [f"first failure: rank {failure.get('rank')} (local {failure.get('local_rank')}) on {failure.get('node')} "
             f"at {at}, {how}: {failure.get('message', '')}"]  # fmt: skip
    traceback = str(failure.get("traceback", "")).rstrip().splitlines()
    return lines + [f"    {line}" for line in traceback[-MAX_TRACEBACK_LINES:]]


def report_verdict(run_path: Path, verdict: dict[str, Any], successor: str | None) -> None:
    """Print the last words to standard error."""
    for line in verdict_lines(run_path, verdict, successor):
        print(f"[resilio] {line}", file=sys.stderr)
    sys.stderr.flush()
