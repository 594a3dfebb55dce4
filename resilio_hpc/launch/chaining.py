"""The chain as the launcher sees it: judge the predecessor, submit the successor, end the chain when it must end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch import run_directory
from resilio_hpc.launch.options import LaunchOptions
from resilio_hpc.launch.placements import Site
from resilio_hpc.slurm import chain, commands

# How this job's part ended → the next job of the chain carries on. Everything else ends the chain.
CONTINUES = ("time_limit", "needs_new_job")
USER_ENDED = ("CANCELLED",)


class Chain:
    """One job's view of its chain. ``active``: a successor exists or will."""

    def __init__(self, options: LaunchOptions, site: Site, run_path: Path, ledger: Ledger) -> None:
        self.number = chain.link_number(os.environ) if site.mode != "local" else 1
        self.active = options.chain and site.mode != "local" and self.number < options.chain_max
        self.successor: str | None = None
        self._options = options
        self._site = site
        self._run_path = run_path
        self._ledger = ledger
        if options.chain and site.mode == "local" and site.leads:
            print("[resilio] note: --chain has no effect outside of Slurm", file=sys.stderr)

    def judge_predecessor(self) -> str | None:
        """Why this job has nothing to do, or None. Only a job that the chain started asks about its predecessor."""
        verdict = run_directory.read_verdict(self._run_path)
        if verdict is not None and verdict.get("verdict") == "completed":
            return f"this run is already complete: nothing to do (another --run-dir starts a new run; {self._run_path})"
        predecessor = os.environ.get("RESILIO_PREDECESSOR")
        if not predecessor or self._site.mode == "local":
            return None
        ended = run_directory.read_verdict(self._run_path, predecessor)
        name = ended.get("verdict") if ended else None
        state = commands.job_state(predecessor)
        self._ledger.append("predecessor", job=predecessor, verdict=name, state=state, link=self.number)
        if name in CONTINUES:
            return None
        if state in USER_ENDED:
            return self._stop("cancelled", f"job {predecessor} was cancelled: the chain ends here")
        if name in ("no_progress", "not_enough_nodes", "interrupted", "agents_lost"):
            return self._stop(str(name), f"job {predecessor} ended with {name}: the chain ends here")
        return None  # time limit, node failure, preemption, or nobody can tell: carry on

    def _stop(self, verdict: str, reason: str) -> str:
        if not self._site.leads:
            return reason
        run_directory.write_verdict(
            self._run_path, self._site.key, {"verdict": verdict, "exit_code": 0, "reason": reason}
        )  # fmt: skip
        return reason

    def begin(self) -> None:
        """Submit the successor at the start, so that it exists whatever happens to this job."""
        if not (self.active and self._site.leads):
            return
        try:
            link = chain.submit_successor(self._run_path, self._site.job, len(self._site.nodes))
        except SlurmError as error:
            raise UsageError(f"--chain: the next job could not be submitted: {error}") from error
        self.successor = link.job
        self._ledger.append("successor", job=link.job, link=link.number)

    def close(self, verdict: dict[str, Any]) -> None:
        """Cancel the successor unless there is something left for it to do."""
        if self.successor is None or not self._site.leads:
            return
        name = verdict.get("verdict")
        continues = name in CONTINUES or (
            name == "terminated" and commands.job_state(self._site.job) not in USER_ENDED
        )  # fmt: skip
        if continues:
            return
        try:
            commands.cancel(self.successor)
            self._ledger.append("successor_cancelled", job=self.successor, verdict=name)
            self.successor = None
        except SlurmError as error:
            print(f"[resilio] job {self.successor} could not be cancelled, it will end by itself: {error}",
                  file=sys.stderr)  # fmt: skip

    def exit_code(self, verdict: dict[str, Any]) -> int:
        """0 when the chain carries on, else the verdict's own."""
        if self.active and verdict.get("verdict") in CONTINUES:
            return 0
        code = verdict.get("exit_code", 1)
        return code if isinstance(code, int) else 1
