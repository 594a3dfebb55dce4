"""Carries out decisions to resize a run, one at a time, and writes each into the run's ledger.

It keeps no state that matters: joiners are found in the queue by their Comment, and orders to them stand in the ledger.
It may end at any moment, and another one goes on from there.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import ResilioError, SlurmError, UsageError, os_error_text
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.chain import node_exclusion
from resilio_hpc.launch.resize.facts import ResizeDecision, ResizeFacts
from resilio_hpc.launch.resize.growth_limits import fitting_pools
from resilio_hpc.launch.resize.policy import ResizePolicy
from resilio_hpc.launch.resize.resizing import decide
from resilio_hpc.launch.resize.view import ResizeView
from resilio_hpc.launch.rundir import run_claim
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.orders import reshape
from resilio_hpc.slurm.submit import joiner_job

AGAIN_S = 60.0
WRITER = "resizer"  # belongs to no job's part of the ledger, since it may write between two jobs


class Resizer:
    """Resizes one run. ``values``: of the template ``joiner``, in place of those from the run's own job.

    ``dry_run``: nothing is written anywhere; ``observes``: decisions are in the ledger, and not carried out.
    """

    def __init__(
        self, view: ResizeView, client: SlurmClient, policy: ResizePolicy, values: Mapping[str, str], dry_run: bool,
        observes: bool = False,
    ) -> None:  # fmt: skip
        self._view = view
        self._client = client
        self._policy = policy
        self._values = values
        self._acts = not (dry_run or observes)
        self._ledger: Ledger | None = None
        self._lock: int | None = None
        self._told: set[tuple[str, str, str]] = set()  # action, code and error of the last record
        self._failed: dict[tuple[str, str], tuple[float, str]] = {}  # when, and why
        if not dry_run:
            self._lock = _lock(view.path / "resizer.lock")
            self._ledger = Ledger(view.path / "ledger", WRITER)

    def step(self) -> tuple[ResizeDecision, str]:
        """Look, decide, act. Return the decision and what went wrong with it, "" for nothing."""
        facts = replace(self._view.facts(), refused=self._refused())
        decision = decide(facts, self._policy)
        if not self._acts or decision.action == "stay":
            self._tell(decision, facts, acted=False)
            return decision, ""
        done, error = self._act(decision, facts)
        if error:
            self._failed[decision.action, decision.code] = (time.monotonic(), error)
        self._tell(done, facts, acted=bool(done.jobs), error=error)
        return done, error

    def close(self) -> None:
        """Unlock the run for another resizer."""
        if self._ledger is not None:
            self._ledger.close()
        if self._lock is not None:
            os.close(self._lock)

    def _refused(self) -> dict[tuple[str, str], str]:
        """Return what Slurm refused lately, so that it is not asked at every look.

        Growth is tried again after the cool-down, the rest after a minute.
        """
        now = time.monotonic()
        pauses = {"grow": self._policy.cool_down_s}
        return {
            what: error for what, (at, error) in self._failed.items()
            if now - at < pauses.get(what[0], min(self._policy.cool_down_s, AGAIN_S))
        }  # fmt: skip

    # -- acting ----------------------------------------------------------------------------------------------------

    def _act(self, decision: ResizeDecision, facts: ResizeFacts) -> tuple[ResizeDecision, str]:
        """Carry out the decision. Return it as far as it was carried out, and why not farther."""
        orders: dict[str, Callable[[str], None]] = {
            "shrink": joiner_job.leave,
            "end": joiner_job.end,
            "withdraw": joiner_job.end,
            "reshape": lambda job: self._reshape(job, decision.sizes[0]),
        }
        jobs: list[str] = []
        try:
            if decision.action == "grow":
                values = self._joiner_values(facts)
                for size in decision.sizes:
                    jobs.append(joiner_job.submit_joiner(values, size))
            else:
                for job in decision.jobs:
                    orders[decision.action](job)
                    jobs.append(job)
        except ResilioError as error:
            sizes = decision.sizes[: len(jobs)] if decision.action == "grow" else decision.sizes
            return replace(decision, jobs=tuple(jobs), sizes=sizes), str(error)
        return replace(decision, jobs=tuple(jobs)), ""

    def _reshape(self, successor: str, nodes: int) -> None:
        """Change the size of the next job, and with it how many faulty nodes it can avoid."""
        path = self._view.path
        done = reshape.reshape(successor, reshape.JobShape(nodes=nodes), path, self._client.orders)
        if not done.fits:
            raise SlurmError(done.why)
        last = next(iter(run_claim.newest(path)), None)
        if last is not None and self._ledger is not None:
            node_exclusion.avoid_faulty_nodes(path, last.job, last.nodes, successor, self._ledger.append)

    def _joiner_values(self, facts: ResizeFacts) -> dict[str, str]:
        record = self._view.record
        assert record is not None
        fields = commands.job_fields(record.job)
        if not fields:
            raise SlurmError(f"scontrol show job {record.job}: no answer; what a joiner should ask for is unknown")
        path = self._view.path
        try:
            trusted_files.make_directory(path / "joiners")
        except OSError as error:
            raise UsageError(os_error_text(error, str(path / "joiners"))) from None
        apart = sorted(facts.held | other_kinds(facts) | facts.avoided)
        own = joiner_job.joiner_values(fields, self._view.run.run_id, path, apart, facts.ends_in_s)
        fixed = {key: own[key] for key in ("comment", "run_dir")}  # identify the job
        return {**own, **self._values, **fixed}

    # -- the ledger ------------------------------------------------------------------------------------------------

    def _tell(self, decision: ResizeDecision, facts: ResizeFacts, acted: bool, error: str = "") -> None:
        """Record the decision with its reasons; a decision to stay, once per reason."""
        told = (decision.action, decision.code, error)
        if self._ledger is None or (told in self._told and not acted):
            return
        self._told = {told} if acted or decision.action == "stay" else {*self._told, told}
        more: dict[str, Any] = {"error": error} if error else {}
        if decision.expected:
            more["expected"] = dict(decision.expected)
        self._ledger.append(
            "resize", action=decision.action, code=decision.code, reason=decision.reason, nodes_now=facts.nodes,
            nodes=decision.nodes, jobs=list(decision.jobs), sizes=list(decision.sizes), acted=acted, **more,
        )  # fmt: skip


def other_kinds(facts: ResizeFacts) -> frozenset[str]:
    """Return nodes of the run's partitions that have other GPUs than the run: joiners must not use them. Pure."""
    ours = {name for pool in fitting_pools(facts) for name in pool.nodes}
    partitions = facts.partition.split(",")
    all_names = {name for pool in facts.inventory.pools if pool.partition in partitions for name in pool.nodes}
    return frozenset(all_names - ours)


def _lock(path: Path) -> int | None:
    """Lock the run. Return the descriptor; None where locks are not known.

    Raises UsageError if another resizer has it.
    """
    try:
        held = trusted_files.open_file(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UsageError(os_error_text(error, str(path))) from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UsageError(f"another resilio resize looks after this run ({path} is locked)") from None
    except OSError:  # a file system without locks
        os.close(held)
        return None
    return held
