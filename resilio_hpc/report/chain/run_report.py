"""A run's report: everything that the command and the page show, from the run directory's files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import Untrusted
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.report.accounting import part_facts
from resilio_hpc.report.accounting.causes import TimeCause, totals
from resilio_hpc.report.accounting.node_time import NodeTime, node_time
from resilio_hpc.report.accounting.run_time import RunTime, run_time
from resilio_hpc.report.chain import checkpoint_facts as checkpoints
from resilio_hpc.report.chain import recoveries as faults
from resilio_hpc.report.chain.advice import Advice, advice
from resilio_hpc.report.chain.checkpoint_facts import CheckpointFacts
from resilio_hpc.report.chain.cost import RunCost, gpus_per_node, run_cost
from resilio_hpc.report.chain.recoveries import ChainRecovery
from resilio_hpc.report.overview import find_run, read_identity
from resilio_hpc.report.present import RunNow, facts_of, parse_verdict, present
from resilio_hpc.report.progress import KINDS as PROGRESS_KINDS
from resilio_hpc.report.progress import RunProgress, progress
from resilio_hpc.report.status import parse_status

KINDS = part_facts.KINDS | faults.KINDS | checkpoints.KINDS | PROGRESS_KINDS
SAMPLES = 16  # nodes whose GPUs are counted


@dataclass(frozen=True)
class RunReport:
    """Everything about a run. ``now``: when it was made, Unix seconds;"""

    path: Path
    run_id: str
    now: float
    state: RunNow
    time: RunTime
    nodes: NodeTime
    recoveries: tuple[ChainRecovery, ...]
    checkpoints: CheckpointFacts
    cost: RunCost
    advice: tuple[Advice, ...]
    progress: RunProgress

    @property
    def by_cause(self) -> dict[TimeCause, int]:
        """Return the microseconds of the wall clock by cause."""
        return totals(self.time.spans)


def read_report(path: Path, now: float) -> RunReport:
    """Return the report of a run directory. Raises UsageError where it is none, Untrusted where it is another's."""
    path = find_run(path)
    run_id, created = read_identity(path)
    status = parse_status(trusted_files.read_object(path / "status.json"))
    verdict = parse_verdict(trusted_files.read_object(path / "verdict.json"))
    events = read_ledger(path / "ledger", KINDS)
    if not any(event.kind == "first_step" for event in events):
        events = read_ledger(path / "ledger", KINDS | {part_facts.OF_STARTS})
    state = present(facts_of(events), created, status, verdict, now)
    until = status.time if status is not None else None
    return build_report(path, run_id, events, state, now, until, _gpus(path))


def build_report(
    path: Path, run_id: str, events: Sequence[Event], state: RunNow, now: float, until: float | None, gpus: int | None
) -> RunReport:
    """Return the report from its parts. Pure.

    ``until``: until when a job that has not ended is known to run.
    """
    time = run_time(events, until)
    nodes = node_time(time)
    found = faults.recoveries(events, time, state.state in ("starting", "running"))
    saves = checkpoints.checkpoint_facts(events, time)
    cost = run_cost(nodes, gpus)
    return RunReport(
        path,
        run_id,
        now,
        state,
        time,
        nodes,
        tuple(found),
        saves,
        cost,
        tuple(advice(time, nodes, found, saves, cost)),
        progress(events, state.status if state.state != "ended" else None, now),
    )


def _gpus(path: Path) -> int | None:
    """Return the GPUs of a node, from the newest samples in the run directory."""
    try:
        files = list(itertools.islice((path / "metrics").glob("*.json"), SAMPLES))
        return gpus_per_node([trusted_files.read_object(file) or {} for file in files])
    except (OSError, Untrusted):
        return None
