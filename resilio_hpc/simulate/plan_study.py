"""From what the user asks for to a study: sizes, rates, numbers, cases. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resilio_hpc.core.errors import UsageError
from resilio_hpc.events.phrases import seconds
from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.simulate.constants import Constants, SourceKind, defaults
from resilio_hpc.simulate.fault_trace import Domain
from resilio_hpc.simulate.fleets import Fleet, fleet_named
from resilio_hpc.simulate.own_runs import own_fleet, own_interval_s, own_nodes, own_numbers, tells_kinds
from resilio_hpc.simulate.peers import peer_named, peers
from resilio_hpc.simulate.study import RESILIO, Progress, Study, StudyCase, daly_s, study
from resilio_hpc.simulate.virtual_run import SimulatedSetup

DEFAULT_FLEET = "llama3"
SAVE_EVERY_S = 600.0
DAYS = 30.0
MOST_CASES = 200
PUBLISHED_GPUS = 12_288  # of which the time for communicators is published


@dataclass(frozen=True)
class StudyRequest:
    """The command's options; None: not given.

    ``save_every_s``: NaN: not given, None: by Daly's formula. ``varied``: (option, field of the setup, values).
    """

    gpus: int | None = None
    gpus_per_node: int | None = None
    days: float | None = None
    job_s: float | None = None
    chained: bool = True
    fleet: str | None = None
    mtbf_h: float | None = None
    domains: tuple[tuple[int, float], ...] = ()
    spares: int | None = None
    min_nodes: int | None = None
    save_every_s: float | None = math.nan
    max_restarts: int = 3
    partner_copies: bool = False
    replicated: bool = False
    last_step: bool = True
    evict_devices: bool = False
    local_disks: bool = False
    given: dict[str, float] = field(default_factory=dict)
    policies: tuple[str, ...] = ()
    varied: tuple[tuple[str, str, tuple[float | bool | None, ...]], ...] = ()
    repeats: int = 5
    seed: int = 0


def run(asked: StudyRequest, reports: Sequence[RunReport], progress: Progress = lambda _share, _words: None) -> Study:
    """Return the study that was asked for. Raises UsageError for what cannot be simulated."""
    if asked.mtbf_h is not None and asked.fleet is not None:
        raise UsageError("--mtbf-h and --fleet both say how often it fails: give one of them")
    fleet, gpus = _fleet(asked, reports)
    per_node = asked.gpus_per_node or fleet.gpus_per_node
    if gpus % per_node:
        raise UsageError(f"{gpus:,} GPUs are no whole number of nodes of {per_node}: --gpus, --gpus-per-node")
    constants = fleet.apply(defaults())
    constants = own_numbers(constants.replaced(_sizes(asked), SourceKind.GIVEN, "--set"), reports, gpus)
    constants = constants.replaced(asked.given, SourceKind.GIVEN, "--set")
    if gpus > PUBLISHED_GPUS:
        constants = constants.extrapolated("communicators_s_per_gpu", f"more than {PUBLISHED_GPUS:,} extrapolated")
    days = asked.days or (fleet.days if asked.mtbf_h is None and not reports else DAYS)
    nodes = gpus // per_node
    setup = SimulatedSetup(
        nodes, per_node, days * 86_400, math.ceil(nodes / 100) if asked.spares is None else asked.spares,
        asked.min_nodes or nodes, 0.0, asked.partner_copies, asked.replicated,
        asked.last_step, evict_devices=asked.evict_devices,
        local_disks=asked.local_disks,
        chained=asked.chained, job_s=asked.job_s, max_restarts=asked.max_restarts,
    )  # fmt: skip
    setup = replace(setup, save_every_s=_interval_s(asked.save_every_s, fleet, constants, setup, reports))
    cases = _cases(asked, setup, fleet, constants)
    for case in cases:
        _check(case.setup)
    domains = tuple(Domain(count, hours * 3600) for count, hours in asked.domains)
    return study(fleet, constants, setup, cases, range(asked.seed, asked.seed + asked.repeats), domains, progress)


def _sizes(asked: StudyRequest) -> dict[str, float]:
    """Return what other measured numbers are converted with."""
    return {name: value for name, value in asked.given.items() if name == "gb_per_gpu"}


def _fleet(asked: StudyRequest, reports: Sequence[RunReport]) -> tuple[Fleet, int]:
    if reports and asked.fleet is None:
        counted = next((one.cost.gpus_per_node for one in reports if one.cost.gpus_per_node), None)
        per_node = asked.gpus_per_node or counted or 1
        gpus = asked.gpus or own_nodes(reports) * per_node
        own = asked.mtbf_h is None or tells_kinds(reports)
        fleet = own_fleet(reports, per_node) if own else fleet_named(DEFAULT_FLEET)
    else:
        fleet = fleet_named(asked.fleet or DEFAULT_FLEET)
        gpus = asked.gpus or fleet.gpus
    if asked.mtbf_h is None:
        return fleet, gpus
    return replace_rate(fleet, 24 / asked.mtbf_h / gpus, asked.mtbf_h), gpus


def replace_rate(fleet: Fleet, per_gpu_day: float, mtbf_h: float) -> Fleet:
    """Return a fleet that fails as often as the user says, in the ways of another."""
    return Fleet(
        name="given", source=f"--mtbf-h {mtbf_h:g}", gpus=fleet.gpus, gpus_per_node=fleet.gpus_per_node,
        days=fleet.days, per_gpu_day=per_gpu_day, mix_source=f"not given: that of {fleet.name}", faults=fleet.faults,
    )  # fmt: skip


def _interval_s(
    asked: float | None, fleet: Fleet, constants: Constants, setup: SimulatedSetup, reports: Sequence[RunReport]
) -> float:
    if asked is None:
        return daly_s(fleet, constants, setup)
    if math.isnan(asked):
        return own_interval_s(reports) or SAVE_EVERY_S
    return asked


def _cases(asked: StudyRequest, setup: SimulatedSetup, fleet: Fleet, constants: Constants) -> list[StudyCase]:
    names = asked.policies or ((RESILIO,) if asked.varied else (RESILIO, *peers()))
    for name in names:
        if name != RESILIO:
            peer_named(name)
    cases = [StudyCase(name, setup) for name in dict.fromkeys(names)]
    for option, name, values in asked.varied:
        found = []
        for case in cases:
            for value in values:
                value = daly_s(fleet, constants, setup) if value is None else value
                value = value * 3600 if name == "job_s" else value
                differs = ", ".join(filter(None, (case.differs, _words(option, value))))
                found.append(StudyCase(case.policy, _changed(case.setup, name, value), differs))
        cases = found
    if len(cases) > MOST_CASES:
        raise UsageError(f"--compare makes {len(cases)} cases; {MOST_CASES} at most")
    return cases


def _changed(setup: SimulatedSetup, name: str, value: float | bool) -> SimulatedSetup:
    fields: dict[str, Any] = {name: value}
    return replace(setup, **fields)


def _words(option: str, value: float | bool) -> str:
    if isinstance(value, bool):
        return f"{option} {'on' if value else 'off'}"
    return f"{option} {seconds(value) if option in ('save-every', 'job-hours') else f'{value:g}'}"


def _check(setup: SimulatedSetup) -> None:
    if setup.min_nodes > setup.nodes:
        raise UsageError(f"--min-nodes {setup.min_nodes} is more than the {setup.nodes} nodes of the run")
    if setup.job_s is not None and setup.job_s < 60:
        raise UsageError("jobs of less than a minute are not simulated: --job-hours")
