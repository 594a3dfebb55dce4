"""The libraries that note the ranks' calls, and where each rank notes them.

They stand in the spawner's environment, since a forked rank cannot load them any more; the user's own LD_PRELOAD stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.native import intercept
from resilio_hpc.native.intercept import CALLS_VARIABLE as CALLS_VARIABLE


def preload(environment: Mapping[str, str], watched: Sequence[str], root: Path = Path("/")) -> dict[str, str]:
    """Return the variables that load these families' libraries. ``root``: of the file system, with the devices.

    {} where none was built, or its path cannot stand in a list.
    """
    useful = [family for family in watched if intercept.is_useful(family, root)]
    libraries = [path for family in useful if (path := intercept.library(family))]
    usable = [path for path in libraries if not set(path) & {" ", ":"}]
    if not usable:
        return {}
    own = environment.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": ":".join([*usable, *([own] if own else [])])}


def ring_file(arena_dir: Path, round_number: int, local_rank: int) -> Path:
    """Return the file of a rank's call ring."""
    return arena_dir / f"calls-{round_number}-{local_rank}"


def remove_older(arena_dir: Path, round_number: int) -> None:
    """Remove the rings of earlier rounds, whose ranks are gone."""
    for path in arena_dir.glob("calls-*-*"):
        if not path.name.startswith(f"calls-{round_number}-"):
            path.unlink(missing_ok=True)
