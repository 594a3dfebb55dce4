"""How ranks that live and do not go on are found: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.launch.config.flags import failures_flag, number


@dataclass(frozen=True)
class HangOptions:
    """``timeout_s``: None, where it is learned from the run (``launch/controller/hangs``)."""

    timeout_s: float | None = failures_flag(
        "seconds without a step before ranks are restarted whose hang may still end by itself; a certain one (a "
        "stopped rank, a deadlock) is acted on at once; 0: hangs are told, and nothing is restarted "
        "(default: 60, or ten times the run's longest step)",
        None,
        number,
        metavar="S",
        least=0,
        names="--hang-timeout",
    )
    intercept: bool = failures_flag(
        "do not load the library that notes the ranks' calls of communication libraries",
        True,
        None,
        raw=False,
        reads=lambda given: not given,
        names="--no-intercept",
    )

    def watched(self, torch: bool, mpi: bool) -> tuple[str, ...]:
        """Return the families of communication libraries that ranks may use and whose calls are noted.

        A library that is of no use is not loaded: programs would find its names.
        """
        found = {"gloo": torch, "nccl": torch, "mpi": mpi}
        return tuple(family for family, used in found.items() if used and self.intercept)
