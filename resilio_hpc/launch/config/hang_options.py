"""How ranks that live and do not go on are found: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.launch.config.flags import failures_flag, number

CONTAINERS = ("apptainer", "singularity", "shifter", "podman", "docker", "enroot", "ch-run")


@dataclass(frozen=True)
class HangOptions:
    """``timeout_s``: None, where it is learned from the run (``launch/controller/faults/hangs``)."""

    timeout_s: float | None = failures_flag(
        "seconds without a step before ranks are restarted whose hang may still end by itself; a certain one (a "
        "stopped rank, a deadlock) is acted on at once; 0: hangs are reported, and nothing is restarted "
        "(default: 600, or ten times the run's longest step; never where no rank is known to wait for another)",
        None,
        number,
        metavar="S",
        least=0,
        names="--hang-timeout",
    )
    intercept: bool = failures_flag(
        "do not load the libraries that note the ranks' calls of communication libraries and of the GPU",
        True,
        None,
        raw=False,
        reads=lambda given: not given,
        names="--no-intercept",
    )

    def watched(self, torch: bool, mpi: bool, kind: str, program: str) -> tuple[str, ...]:
        """Return the families of communication libraries whose calls are noted. ``kind``: of the options.

        A library that is of no use is not loaded, since programs would find its names. Nor is one where a command may
        open a container: its file is missing there, and each process would say so. Those of a GPU are loaded only on
        nodes that have one (``workers/interception``).
        """
        # imported here: options are read where the extensions are missing, too
        from resilio_hpc.native.intercept import GPU_FAMILIES

        in_python = torch and kind != "command"
        found = dict.fromkeys(("gloo", "nccl", *GPU_FAMILIES), in_python)
        found["mpi"] = mpi and Path(program).name not in CONTAINERS
        return tuple(family for family, used in found.items() if used and self.intercept)
