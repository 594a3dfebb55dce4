"""GPUs and the links between them, read from gpus.toml, as columns for the vectorised model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from importlib.resources import files

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable


class Arch(IntEnum):
    """GPU generations that share one set of measured efficiencies."""

    VOLTA = 0
    AMPERE = 1
    HOPPER = 2
    BLACKWELL = 3
    CDNA = 4  # AMD MI300 and later; no table of measurements was fitted


@dataclass(frozen=True)
class Machine:
    """One kind of GPU in its nodes. Bandwidths in GB/s (1e9), one way; peaks in TFLOP/s, dense.

    ``host_gbytes_s``: link to the host's memory, one way. ``host_memory_gb``, ``host_memory_gbytes_s``: of that memory,
    one GPU's share. ``domain_gpus``: GPUs that reach each other over NVLink (more than a node's on NVL72).
    ``nic_gbytes_s``: network of a whole node. ``power``: board power limit relative to the data sheet's.
    ``exponentials``: per clock, relative to others of its kind.
    """

    gpu: str
    arch: Arch
    bf16: float
    memory_gb: float
    memory_gbytes_s: float
    sms: int
    link_gbytes_s: float
    nic_gbytes_s: float
    node_gpus: int = 8
    domain_gpus: int = 8
    host_gbytes_s: float = 32.0
    host_memory_gb: float = 128.0
    host_memory_gbytes_s: float = 50.0
    fp8: float = 0.0
    fp4: float = 0.0
    power: float = 1.0
    exponentials: float = 1.0
    source: str = ""


_SUFFIX = re.compile(
    r"$|[^A-Z0-9]|SXM|PCI|NVL|\d*GB|HBM"
)  # what may follow a GPU's name: a form of it, no other letter


@cache
def machines() -> Mapping[str, Machine]:
    """Return the shipped GPUs by name."""
    text = files("resilio_hpc.autoparallel").joinpath("gpus.toml").read_text()
    return {
        name: Machine(gpu=name, **{**row, "arch": Arch[row["arch"].upper()]})
        for name, row in tomllib.loads(text).items()
    }


def machine(name: str) -> Machine:
    """Return the GPU of this name, as people or tables write it (``A100-SXM-80GB``, ``h100``, ``NVIDIA H200``)."""
    known = machines()
    plain = name.upper().split("(")[0].replace("NVIDIA", "").replace("TESLA", "").strip(" -_").replace("_", "-")
    plain = re.sub(r"^(AMD|INSTINCT|[ -])+", "", plain)
    if "A100" in plain and "40" in plain:
        plain = "A100-40GB"
    elif "H100" in plain and "96" in plain:
        plain = "H100-96GB"
    elif "PCI" in plain:
        plain = plain.split("-")[0].split(" ")[0] + "-PCIE"
    candidates = sorted((key for key in known if plain.startswith(key) and _SUFFIX.match(plain[len(key) :])), key=len)
    if not candidates:
        near = difflib.get_close_matches(plain, known, 3, 0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"unknown GPU {printable(repr(name), 60)}: {hint}known are {', '.join(known)}")
    return known[candidates[-1]]


@dataclass(frozen=True)
class Machines:
    """Machines as columns, in FLOP/s, bytes and bytes/s."""

    arch: Column
    bf16: Column
    fp8: Column
    fp4: Column
    power: Column
    exponentials: Column
    memory: Column
    memory_bandwidth: Column
    sms: Column
    link: Column
    nic: Column
    host_link: Column
    host_memory: Column
    host_bandwidth: Column
    node_gpus: Column
    domain_gpus: Column

    @classmethod
    def of(cls, rows: Sequence[Machine]) -> Machines:
        def column(name: str, scale: float = 1.0) -> Column:
            return np.array([getattr(row, name) * scale for row in rows], dtype=float)

        plain = {"arch", "power", "exponentials", "sms", "node_gpus", "domain_gpus"}
        names = {field.name for field in fields(cls)} & plain
        return cls(
            **{name: column(name) for name in names},
            bf16=column("bf16", 1e12),
            fp8=column("fp8", 1e12),
            fp4=column("fp4", 1e12),
            memory=column("memory_gb", 1e9),
            memory_bandwidth=column("memory_gbytes_s", 1e9),
            link=column("link_gbytes_s", 1e9),
            nic=column("nic_gbytes_s", 1e9),
            host_link=column("host_gbytes_s", 1e9),
            host_memory=column("host_memory_gb", 1e9),
            host_bandwidth=column("host_memory_gbytes_s", 1e9),
        )
