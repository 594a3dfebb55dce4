"""A measured profile in place of the shipped numbers: links, latencies, and the GPU's efficiencies. Pure.

Bandwidths go into the machine (which holds the data sheet's), so that the cost model's own formulas return the measured
curve for the measured group; latencies and fractions of a peak go into the efficiencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import NAMES, Efficiency, bounds
from resilio_hpc.autoparallel.base.hardware import Arch, Machine
from resilio_hpc.autoparallel.base.hardware import machine as known_machine
from resilio_hpc.autoparallel.cost.collectives import tree_gain
from resilio_hpc.autoparallel.measure.comm_fit import Curve
from resilio_hpc.autoparallel.measure.compute_samples import Sample
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.autoparallel.model.operators import IDLE_POWER, TILE, WIDE_TILE
from resilio_hpc.core.errors import UsageError

_RINGS = ("all-reduce", "all-gather", "reduce-scatter")
_LARGE = 4096  # below it, a product's shape decides more than the GPU
_ATTENTION = {
    "attention": {
        Arch.AMPERE: "flash_ampere",
        Arch.HOPPER: "flash_hopper",
        Arch.BLACKWELL: "flash_blackwell",
        Arch.CDNA: "flash_cdna",
    },
    "attention-cudnn": {Arch.HOPPER: "cudnn_hopper"},
}


def apply(profile: Profile, machine: Machine, efficiency: Efficiency) -> tuple[Machine, Efficiency, list[str]]:
    """Return machine and efficiencies as measured, and notes for the user."""
    notes: list[str] = []
    about = profile.about_communication
    if about is not None and _is_of(about["device"], machine, notes, "communication"):
        machine, efficiency = _inside(profile, machine, efficiency)
        machine, efficiency = _between(profile, machine, efficiency, notes)
    about = profile.about_compute
    if about is not None and about["device"] == "cpu":
        notes.append("profile: operators were measured on a CPU, for trying: not used")
    elif about is not None and _is_of(about["device"], machine, notes, "operators"):
        efficiency = _operators(profile.samples, machine, efficiency, notes)
    return machine, efficiency, notes


def apply_each(
    profile: Profile, machines: Sequence[Machine], efficiency: Efficiency
) -> list[tuple[Machine, Efficiency, list[str]]]:
    """Return the same for every machine, in order; measurements of one GPU do not change another."""
    done = {one: apply(profile, one, efficiency) for one in dict.fromkeys(machines)}
    return [done[one] for one in machines]


def measured_names(measured: Efficiency, known: Efficiency) -> frozenset[str]:
    """Return the parameters that a profile has taken out of ``known``'s hands, those of measured links included."""
    changed = {name for name in NAMES if getattr(measured, name) != getattr(known, name)}
    return frozenset(changed | {"link", "nic"})


def _is_of(device: str, machine: Machine, notes: list[str], what: str) -> bool:
    if device == "cpu":
        notes.append(f"profile: {what} as measured between CPUs")
        return True
    try:
        if known_machine(device).gpu == machine.gpu:
            return True
    except UsageError:
        pass
    notes.append(f"profile: {what} was measured on {device}, not on {machine.gpu}: not used")
    return False


def _bandwidth(profile: Profile, span: str) -> float | None:
    """Return the bus bandwidth of collectives, bytes/s."""
    found = [curve.bandwidth for name in _RINGS if (curve := profile.curve(name, span))]
    return median(found) if found else None


def _inside(profile: Profile, machine: Machine, efficiency: Efficiency) -> tuple[Machine, Efficiency]:
    bandwidth, reduce = _bandwidth(profile, "node"), profile.curve("all-reduce", "node")
    if bandwidth is not None:
        machine = replace(machine, link_gbytes_s=bandwidth / efficiency.link / 1e9)
    if reduce is not None:
        efficiency = replace(efficiency, link_alpha_us=reduce.latency_s * 1e6 / _steps(reduce))
    return machine, efficiency


def _steps(curve: Curve) -> float:
    """Return the factor of link_alpha_us in collectives.py."""
    return 1.5 + math.log2(curve.ranks_per_node)


def _network(profile: Profile, efficiency: Efficiency) -> tuple[float | None, Efficiency]:
    """Return the bus bandwidth of rings between nodes, bytes/s, and the gain of trees over them."""
    rings = [curve.bandwidth for name in _RINGS[1:] if (curve := profile.curve(name, "network"))]
    reduce = profile.curve("all-reduce", "network")
    if reduce is None:
        return (median(rings) if rings else None), efficiency
    most = float(tree_gain(np.array(reduce.ranks), np.array(reduce.ranks / reduce.ranks_per_node))) - 1
    if not rings:
        return reduce.bandwidth / (1 + efficiency.tree * most), efficiency
    ring = median(rings)
    place, limits = NAMES.index("tree"), bounds()
    gain = (reduce.bandwidth / ring - 1) / most if most > 0 else efficiency.tree
    return ring, replace(efficiency, tree=float(np.clip(gain, limits.low[place], limits.high[place])))


def _between(
    profile: Profile, machine: Machine, efficiency: Efficiency, notes: list[str]
) -> tuple[Machine, Efficiency]:
    reduce = profile.curve("all-reduce", "network")
    bandwidth, own = _network(profile, efficiency)
    if machine.domain_gpus != machine.node_gpus:
        if bandwidth is not None:
            notes.append("profile: nodes share an NVLink domain: their network is taken as shipped")
        return machine, efficiency
    efficiency = own
    if bandwidth is not None:
        machine = replace(machine, nic_gbytes_s=bandwidth / efficiency.nic / 1e9)
    if reduce is not None and reduce.ranks_per_node < machine.node_gpus:
        notes.append(
            f"profile: network measured with {reduce.ranks_per_node} of {machine.node_gpus} ranks per node, "
            "which may not fill it"
        )
    if reduce is not None and reduce.ranks > reduce.ranks_per_node:
        total = reduce.latency_s * 1e6
        inner = efficiency.link_alpha_us * _steps(reduce) if reduce.ranks_per_node > 1 else 0.0
        doublings = math.log2(reduce.ranks / reduce.ranks_per_node)
        efficiency = replace(efficiency, nic_alpha_us=max(total - inner, 0.1 * total) / doublings)
    transfer = profile.curve("send-recv", "network")
    if transfer is not None:
        share = machine.nic_gbytes_s * 1e9 / machine.node_gpus
        efficiency = replace(efficiency, p2p=min(1.0, transfer.bandwidth / share))
    return machine, efficiency


def _operators(samples: Sequence[Sample], machine: Machine, efficiency: Efficiency, notes: list[str]) -> Efficiency:
    peak = machine.bf16 * 1e12 * math.sqrt((machine.power - IDLE_POWER) / (1 - IDLE_POWER))
    found = {f"gemm_{machine.arch.name.lower()}": _products(samples, machine, efficiency, peak)}
    for kind, names in _ATTENTION.items():
        parts = [one.rate / peak / _width(one.shape[3]) for one in samples if one.kind == kind]
        if machine.arch in names and parts:
            found[names[machine.arch]] = median(parts)
    passes = [one.rate for one in samples if one.kind in ("normalisation", "optimizer")]
    found["memory"] = median(passes) / (machine.memory_gbytes_s * 1e9) if passes else None
    limits = bounds()
    for name, value in found.items():
        if value is None:
            continue
        low, high = limits.low[NAMES.index(name)], limits.high[NAMES.index(name)]
        if low <= value <= high:
            efficiency = replace(efficiency, **{name: value})
        else:
            notes.append(
                f"profile: {name} = {value:.3g} lies outside its physical bounds {low:g} to {high:g}: not used"
            )
    return efficiency


def _products(samples: Sequence[Sample], machine: Machine, efficiency: Efficiency, peak: float) -> float | None:
    """Return the fraction of the peak of large products, after waves and depth are taken out."""
    parts = []
    for sample in samples:
        if sample.kind == "matmul" and min(sample.shape) >= _LARGE:
            m, n, k = sample.shape
            waves = math.ceil(m / TILE) * math.ceil(n / WIDE_TILE) / machine.sms
            reach = waves / (waves + efficiency.wave) * k / (k + efficiency.depth)
            parts.append(sample.rate / peak / reach)
    return median(parts) if parts else None


def _width(head_dim: int) -> float:
    """Return the share of a tile that a head fills (64 of 128: half), as in operators.py."""
    return min(1.1, head_dim / (head_dim + 32) * 1.25)
