"""What a pair check is asked to do."""

from __future__ import annotations

import msgspec

from resilio_hpc.diagnose.policy import PairPolicy


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``nodes`` in the allocation's order: neighbours are paired first. ``place``: "local" (this machine plays them),
    "step" (one srun step in the job ``job``), or "srun" (an srun with an allocation of its own). ``address``: of this
    machine, for the nodes."""

    nodes: tuple[str, ...]
    place: str
    policy: PairPolicy
    address: str = "127.0.0.1"
    job: str = ""
    cpus: int = 0  # per task, which Slurm would otherwise bind to one
    srun_options: tuple[str, ...] = ()
