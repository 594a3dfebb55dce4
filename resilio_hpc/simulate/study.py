"""Policies on the same faults, several times over: medians and spread. Pure, but for the time it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from resilio_hpc.autoparallel.search.failures import interval_s
from resilio_hpc.core.errors import UsageError
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.simulate.account import SimulatedResult
from resilio_hpc.simulate.constants import Constant, Constants, SourceKind
from resilio_hpc.simulate.fault_trace import Domain, SimulatedFault, fault_trace
from resilio_hpc.simulate.fleets import Fleet
from resilio_hpc.simulate.peers import PeerRun, peer_named
from resilio_hpc.simulate.recovering_run import RecoveringRun
from resilio_hpc.simulate.virtual_run import SimulatedSetup

RESILIO = "resilio"
MOST_FAULTS = 200_000  # of one run: what has more of them makes no progress
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class StudyCase:
    """One row: a policy and a setup. ``differs``: what is compared, in words."""

    policy: str
    setup: SimulatedSetup
    differs: str = ""


@dataclass(frozen=True)
class Row:
    """What became of a case, one result for each repeat."""

    case: StudyCase
    results: tuple[SimulatedResult, ...]
    took_s: float

    def middle(self, of: Callable[[SimulatedResult], float]) -> float:
        """Return the median over the repeats."""
        return median(of(one) for one in self.results)

    def spread(self, of: Callable[[SimulatedResult], float]) -> tuple[float, float]:
        """Return the least and the largest."""
        values = [of(one) for one in self.results]
        return min(values), max(values)

    def share(self, cause: TimeCause) -> float:
        """Return a cause's share of the time of all repeats."""
        return sum(one.by_cause[cause] for one in self.results) / sum(one.wall_us for one in self.results)

    def count(self, name: str) -> float:
        """Return how often something happened, on average."""
        return sum(one.counts.get(name, 0) for one in self.results) / len(self.results)


@dataclass(frozen=True)
class Study:
    """Cases, and what became of them. ``numbers``: all that were used, with their sources."""

    fleet: Fleet
    setup: SimulatedSetup
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    numbers: tuple[Constant, ...]
    took_s: float

    @property
    def guesses(self) -> list[Constant]:
        """Return the numbers that are neither measured, published, nor given."""
        return [one for one in self.numbers if one.kind is SourceKind.GUESS]


def daly_s(fleet: Fleet, constants: Constants, setup: SimulatedSetup) -> float:
    """Return the best time between saves by Daly's formula, at least a step."""
    mtbf_s = fleet.mtbf_s(setup.gpus)
    if math.isinf(mtbf_s):
        raise UsageError("--save-every auto needs a rate of faults")
    return interval_s(mtbf_s, constants["gb_per_gpu"] * constants["snapshot_s_per_gb"], constants["step_s"])


def study(
    fleet: Fleet, constants: Constants, setup: SimulatedSetup, cases: Sequence[StudyCase], seeds: Sequence[int],
    domains: tuple[Domain, ...] = (), progress: Progress = lambda _share, _words: None,
) -> Study:  # fmt: skip
    """Run all cases on the same faults. Raises UsageError where faults come so often that nothing could be learned."""
    began = time.perf_counter()
    expected = setup.seconds / fleet.mtbf_s(setup.gpus)
    expected += sum(-(-setup.nodes // one.nodes) * setup.seconds / one.mtbf_s for one in domains)
    if expected > MOST_FAULTS:
        raise UsageError(f"{expected:,.0f} faults are to be expected; {MOST_FAULTS:,} at most: fewer days or GPUs")
    spares = max(case.setup.spares for case in cases)
    traces = [
        fault_trace(fleet, constants, setup.nodes, setup.gpus_per_node, spares, setup.seconds, seed, domains)
        for seed in seeds
    ]  # fmt: skip
    rows, total = [], len(cases) * len(seeds)
    for number, case in enumerate(cases):
        case_began, results = time.perf_counter(), []
        for repeat, trace in enumerate(traces):
            done = number * len(seeds) + repeat
            words = f"{case.policy} {case.differs}".strip()

            def told(share: float, done: int = done, words: str = words) -> None:
                progress((done + share) / total, words)

            results.append(_result(case, constants, trace, told))
        rows.append(Row(case, tuple(results), time.perf_counter() - case_began))
    numbers = constants.rows()
    for policy in dict.fromkeys(case.policy for case in cases):
        numbers += peer_named(policy).numbers() if policy != RESILIO else []
    return Study(fleet, setup, tuple(seeds), tuple(rows), tuple(numbers), time.perf_counter() - began)


def _result(
    case: StudyCase, constants: Constants, trace: Sequence[SimulatedFault], told: Callable[[float], None]
) -> SimulatedResult:
    if case.policy == RESILIO:
        return RecoveringRun(case.setup, constants, trace, told).result()
    return PeerRun(peer_named(case.policy), case.setup, constants, trace, told).result()
