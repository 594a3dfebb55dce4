"""The faults of a run, drawn from a seed: the same for every policy. Pure.

A fault strikes a place, not a machine: the node that holds this node rank at that time. So policies with and
without spares meet the same faults. Places from ``nodes`` on are spares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from resilio_hpc.simulate.constants import Constants
from resilio_hpc.simulate.fleets import FaultKind, Fleet

SPARES_FAIL = (FaultKind.DEVICE, FaultKind.NODE)  # where no ranks run


@dataclass(frozen=True)
class Domain:
    """Nodes that fail together. ``nodes``: side by side; ``mtbf_s``: of one such group."""

    nodes: int
    mtbf_s: float


@dataclass(frozen=True)
class SimulatedFault:
    """A fault. ``at_us``: from the run's begin; ``places``: node ranks; ``back_us``: after which nodes are sound again.

    ``lasting``: the node is broken until then. ``step_part``: 0 to 1, draws that policies share.
    """

    at_us: int
    kind: FaultKind
    places: tuple[int, ...]
    lasting: bool
    back_us: int


def fault_trace(
    fleet: Fleet, constants: Constants, nodes: int, gpus_per_node: int, spares: int, seconds: float, seed: int,
    domains: tuple[Domain, ...] = (),
) -> list[SimulatedFault]:  # fmt: skip
    """Return all faults by time."""
    per_node_s = fleet.per_gpu_day * gpus_per_node / 86_400.0
    found = list(_of_nodes(fleet, constants, per_node_s, range(nodes), seconds, Random(f"{seed} faults")))
    for spare in range(nodes, nodes + spares):
        idle = _of_nodes(fleet, constants, per_node_s, range(spare, spare + 1), seconds, Random(f"{seed} {spare}"))
        found += [fault for fault in idle if fault.kind in SPARES_FAIL]
    for number, domain in enumerate(domains):
        found += _of_domain(domain, constants, nodes + spares, seconds, Random(f"{seed} domain {number}"))
    return sorted(found, key=lambda fault: (fault.at_us, fault.places))


def _times(rate: float, seconds: float, draw: Random) -> Iterator[float]:
    at = 0.0
    while rate > 0:
        at += draw.expovariate(rate)
        if at >= seconds:
            return
        yield at


def _of_nodes(
    fleet: Fleet, constants: Constants, per_node_s: float, places: range, seconds: float, draw: Random
) -> Iterator[SimulatedFault]:
    kinds, weights = list(fleet.faults), list(fleet.faults.values())
    for at in _times(per_node_s * len(places), seconds, draw):
        kind = draw.choices(kinds, weights)[0]
        place, breaks = draw.choice(places), draw.random() < constants["lasting_share"]
        lasting = breaks and kind in (FaultKind.DEVICE, FaultKind.NODE)
        back_s = draw.expovariate(1.0)
        back_s *= constants["repair_h"] * 3600 if lasting else constants["reboot_s"]
        yield SimulatedFault(round(at * 1e6), kind, (place,), lasting, round(back_s * 1e6))


def _of_domain(
    domain: Domain, constants: Constants, nodes: int, seconds: float, draw: Random
) -> Iterator[SimulatedFault]:
    groups = -(-nodes // domain.nodes)
    for at in _times(groups / domain.mtbf_s, seconds, draw):
        first = draw.randrange(groups) * domain.nodes
        back_us = round(draw.expovariate(1.0) * constants["reboot_s"] * 1e6)
        places = tuple(range(first, min(first + domain.nodes, nodes)))
        yield SimulatedFault(round(at * 1e6), FaultKind.NODE, places, False, back_us)
