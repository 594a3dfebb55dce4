"""Fractions of data-sheet rates that real machines reach: the parameters of the cost model, within physical bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError


@dataclass(frozen=True)
class Efficiency:
    """One value per parameter; efficiency.toml has its meaning, its bounds and its source."""

    gemm_volta: float
    gemm_ampere: float
    gemm_hopper: float
    gemm_blackwell: float
    gemm_cdna: float
    fp8: float
    fp4: float
    rows: float
    wave: float
    depth: float
    misaligned: float
    flash_one: float
    flash_ampere: float
    flash_hopper: float
    cudnn_hopper: float
    flash_blackwell: float
    flash_cdna: float
    memory: float
    elementwise: float
    eager: float
    unfused_softmax: float
    host_us: float
    host_norm: float
    host_softmax: float
    host_comm_us: float
    host_step_us: float
    host_micro_us: float
    link: float
    link_alpha_us: float
    nic: float
    nic_alpha_us: float
    tree: float
    p2p: float
    tp_overlap: float
    dp_overlap: float
    fsdp_norm: float
    zero3_rails: float
    straggler: float
    ep_overlap: float
    imbalance: float
    dispatch: float

    def vector(self) -> NDArray[np.float64]:
        return np.array([getattr(self, field.name) for field in fields(self)])

    def with_vector(self, values: Sequence[float] | NDArray[np.float64]) -> Efficiency:
        return replace(self, **{f.name: float(v) for f, v in zip(fields(self), values, strict=True)})


NAMES = tuple(field.name for field in fields(Efficiency))


@dataclass(frozen=True)
class Bounds:
    """Of every parameter: physical bounds, the value believed before measuring, and how firmly (spread of its ln)."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    prior: NDArray[np.float64]
    spread: NDArray[np.float64]


@cache
def _table() -> Mapping[str, Mapping[str, float]]:
    text = files("resilio_hpc.autoparallel").joinpath("efficiency.toml").read_text()
    return tomllib.loads(text)


def shipped() -> Efficiency:
    """Return the shipped priors."""
    return Efficiency(**{name: float(_table()[name]["value"]) for name in NAMES})


def bounds() -> Bounds:
    """Return bounds and beliefs in the order of ``NAMES``."""
    return Bounds(*(np.array([float(_table()[n][key]) for n in NAMES]) for key in ("low", "high", "prior", "spread")))


def read(text: str) -> Efficiency:
    """Return a calibration: TOML ``name = value``, the rest as shipped; nearby.py reads [[nearby]].

    Raises UsageError for an unknown name or a value outside its physical bounds.
    """
    limits = bounds()
    values = {name: value for name, value in tomllib.loads(text).items() if name != "nearby"}
    for name, value in values.items():
        if name not in NAMES:
            raise UsageError(f"calibration: unknown parameter {name!r}; known are {', '.join(NAMES)}")
        low, high = limits.low[NAMES.index(name)], limits.high[NAMES.index(name)]
        if not isinstance(value, (int, float)) or not low <= value <= high:
            raise UsageError(f"calibration: {name} = {value!r} lies outside its physical bounds {low:g} to {high:g}")
    return replace(shipped(), **{name: float(value) for name, value in values.items()})
