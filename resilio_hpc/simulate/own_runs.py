"""Numbers of the user's own runs, from their reports: how often they failed, and what it took. Pure.

Means, since it is their sums that count. A number that too few events tell is left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, median

from resilio_hpc.core.errors import UsageError
from resilio_hpc.events.phrases import plural
from resilio_hpc.report.accounting.causes import US, TimeCause
from resilio_hpc.report.chain.checkpoint_facts import Spread
from resilio_hpc.report.chain.recoveries import ChainRecovery, RecoveryOutcome
from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.simulate.constants import Constants, SourceKind
from resilio_hpc.simulate.fleets import FaultKind, Fleet

KINDS = {"node_lost": FaultKind.NODE, "agent_lost": FaultKind.PROCESS, "hang": FaultKind.HANG}
CLASSES = {"gpu_hardware": FaultKind.DEVICE, "nic_network": FaultKind.NETWORK}
TRAINS = (TimeCause.TRAIN, TimeCause.SAVE, TimeCause.REPEATED, TimeCause.STALLED)
LEAST = 3  # a mean of fewer says little


def _faults(reports: Sequence[RunReport]) -> list[ChainRecovery]:
    found = [one for report in reports for one in report.recoveries]
    return [one for one in found if one.outcome is not RecoveryOutcome.NOT_NEEDED and not one.fault.drill]


def kind_of(one: ChainRecovery) -> FaultKind:
    """Return what a fault did."""
    return KINDS.get(one.fault.kind) or CLASSES.get(one.failure_class) or FaultKind.PROCESS


def tells_kinds(reports: Sequence[RunReport]) -> bool:
    """Return whether there are faults enough to tell in what ways runs fail."""
    return len(_faults(reports)) >= LEAST


def own_fleet(reports: Sequence[RunReport], gpus_per_node: int) -> Fleet:
    """Return how often runs failed. Raises UsageError where they tell too little."""
    faults = _faults(reports)
    # a fault in a recovery is part of that recovery in the ledger, so faults are of the time in which ranks train
    node_days = sum(report.nodes.by_cause[cause] for report in reports for cause in TRAINS) / US / 86_400
    if len(faults) < LEAST or node_days <= 0:
        raise UsageError(
            f"{plural(len(reports), 'run')} with {plural(len(faults), 'fault')}: {LEAST} faults are needed for a mean "
            "time between them; name more runs, or give --mtbf-h or --fleet"
        )
    found = Counter(kind_of(one) for one in faults)
    trained = f"{node_days:,.3g} node-days of training"
    what = f"{plural(len(faults), 'fault')} in {trained}, {plural(len(reports), 'own run')}"
    return Fleet(
        name="own runs", source=what, gpus=gpus_per_node, gpus_per_node=gpus_per_node, days=30,
        per_gpu_day=len(faults) / node_days / gpus_per_node, mix_source=what,
        faults={kind: float(count) for kind, count in found.items()},
    )  # fmt: skip


def own_numbers(constants: Constants, reports: Sequence[RunReport], gpus: int) -> Constants:
    """Return the constants with what the runs have measured. ``gpus``: of the simulated run."""
    gb = constants["gb_per_gpu"]

    def measured(name: str, values: Sequence[float], of: Callable[[float], float] = lambda value: value) -> None:
        nonlocal constants
        if values and (name in ("queue_s", "launch_s") or len(values) >= LEAST):
            what = f"own runs: mean of {len(values)}"
            constants = constants.replaced({name: max(0.0, of(fmean(values)))}, SourceKind.MEASURED, what)

    saves = [report.checkpoints for report in reports]
    memory = _all([one.restores.get("memory") for one in saves])
    measured("snapshot_s_per_gb", _all([one.blocked_s for one in saves]), lambda value: value / gb if gb else 0.0)
    measured("memory_load_s_per_gb", memory, lambda value: value / gb if gb else 0.0)
    store = [value for value in _all([one.restores.get("committed") for one in saves]) if value > 0]
    measured("store_gb_s", store, lambda value: max(1e-9, gb * gpus / value))
    faults = _faults(reports)
    of_nodes = [one.fault.detection_s for one in faults if kind_of(one) is FaultKind.NODE and one.fault.detection_s]
    hangs = [one.fault.detection_s or 0.0 for one in faults if kind_of(one) is FaultKind.HANG]
    stalled_s = sum(report.by_cause[TimeCause.STALLED] for report in reports) / US
    measured("heartbeat_timeout_s", of_nodes)
    measured("hang_s", hangs, lambda value: value + stalled_s / len(hangs))
    load_s = gb * constants["memory_load_s_per_gb"]
    starts = [
        one.fault.recovery_s - one.fault.detection_s for one in faults
        if one.fault.recovery_s is not None and one.fault.detection_s is not None
    ]  # fmt: skip
    lost = [one.fault.lost_steps for one in faults if kind_of(one) is FaultKind.PROCESS]
    measured("last_step_share", [float(steps <= 1) for steps in lost if steps is not None])
    if len(starts) >= LEAST:  # what a restart takes is known as a whole
        measured("program_start_s", starts, lambda value: value - load_s)
        whole = dict.fromkeys(("rank_end_s", "round_s_per_node", "communicators_s_per_gpu", "silent_node_s"), 0.0)
        constants = constants.replaced(whole, SourceKind.MEASURED, "own runs: part of program_start_s")
    jobs = sum(len(report.time.parts) for report in reports)
    begun = sum(report.by_cause[TimeCause.START] for report in reports) / US
    measured("launch_s", [begun / jobs] if jobs else [], lambda value: value - constants["program_start_s"])
    queued = [report.by_cause[TimeCause.QUEUE] / US / (len(report.time.parts) - 1) for report in reports
              if len(report.time.parts) > 1]  # fmt: skip
    measured("queue_s", queued)
    return constants


def _all(spreads: Sequence[Spread | None]) -> list[float]:
    """Return one value for each that was measured, with the same sum."""
    return [one.total / one.count for one in spreads if one is not None for _ in range(one.count)]


def own_interval_s(reports: Sequence[RunReport]) -> float | None:
    """Return the time between saves, as the runs had it; None where it is not known."""
    found = [report.checkpoints.interval_s.median for report in reports if report.checkpoints.interval_s]
    return median(found) if found else None


def own_nodes(reports: Sequence[RunReport]) -> int:
    """Return the most nodes with ranks that a round of the runs had."""
    return max((len(one.members) for report in reports for part in report.time.parts for one in part.facts.rounds),
               default=1)  # fmt: skip
