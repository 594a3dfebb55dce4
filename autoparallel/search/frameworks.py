"""Training software by name: its possible layouts (``spaces.toml``), its kernels, and its machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from resilio_hpc.autoparallel.base.hardware import Arch, Machine, machine
from resilio_hpc.autoparallel.base.layout import Offload, Recompute, Schedule
from resilio_hpc.autoparallel.base.stack import Stack
from resilio_hpc.autoparallel.measure.rows import case
from resilio_hpc.autoparallel.search.layout_space import Space
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

DEFAULT = "Megatron-Core"


@cache
def _spaces() -> tuple[Mapping[str, Any], ...]:
    text = files("resilio_hpc.autoparallel.search").joinpath("spaces.toml").read_text()
    return tuple(tomllib.loads(text)["space"])


def space_of(framework: str) -> Space:
    """Return the layouts that this software can run."""
    row = next(row for row in _spaces() if row["pattern"] in framework.lower())
    return Space(
        cp=tuple(row.get("cp", ())),
        zero=tuple(row["zero"]),
        recompute=tuple(Recompute[kind.upper()] for kind in row["recompute"]),
        interleaving=row.get("interleaving", True),
        schedules=tuple(Schedule[name.upper()] for name in row.get("schedules", ["one_f_one_b"])),
        pipeline_zero=tuple(row.get("pipeline_zero", (0, 1))),
        rounds=row.get("rounds", "whole"),
        replicas=row.get("replicas", False),
        sequence_parallel=row.get("sequence_parallel", True),
        expert_tp=row.get("expert_tp", False),
        uneven=row.get("uneven", False),
        offload=tuple(Offload[name.upper()] for name in ("none", *row.get("offload", []))),
        offload_zero=tuple(row.get("offload_zero", ())),
        offload_recompute=tuple(Recompute[kind.upper()] for kind in row.get("offload_recompute", [])),
        only={name: row[name] for name in ("tp", "pp") if name in row},
    )


def machine_and_stack(
    gpu: str, per_node: int, framework: str, precision: str = "", interconnect: str = ""
) -> tuple[Machine, Stack]:
    """Return machine and stack for words of ``resilio plan predict``. ``per_node`` 0: as in the usual machine.

    Without a precision it is bf16, or fp16 where the GPU has no bf16. Raises UsageError for an unknown GPU, or for a
    precision in which it does not multiply.
    """
    volta = machine(gpu).arch == Arch.VOLTA
    if volta and precision.startswith("bf16"):
        raise UsageError(f"precision {precision}: {gpu} has no products of bf16: fp16, or another GPU")
    row = {
        "layers": "1", "hidden": "128", "heads": "1", "seq": "1", "num_gpus": "1", "gpu": gpu,
        "gpus_per_node": str(per_node or ""), "framework": framework, "interconnect": interconnect,
        "precision": precision or ("fp16" if volta else "bf16"),
    }  # fmt: skip
    found = case(row)
    return found.machine, found.stack
