"""The place of a rank in its round, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from resilio_hpc.ckpt.coordination import world
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.rank_link import COLLECTIVE_VARIABLE

_LEAST_COLLECTIVE_S = 60.0
_OF_A_RANK = ("rank", "local_rank", "round")


def place_in(environment: Mapping[str, str], launched: bool) -> dict[str, Any]:
    """Return the fields of a Run that its round gives. ``launched``: by resilio-launch."""
    place = world.find_place(environment)
    run_dir = environment.get("RESILIO_RUN_DIR")
    tensor, pipeline, data = _layout(environment, place.world_size)
    return {
        "rank": place.rank,
        "world_size": place.world_size,
        "local_rank": place.local_rank,
        "round": place.round,
        "restart_count": int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "run_dir": Path(run_dir) if run_dir else None,
        "checkpoint_dir": Path(environment.get("RESILIO_CHECKPOINT_DIR", "checkpoints")),
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "data_parallel": data,
        "micro_batch": int(micro) if (micro := environment.get("RESILIO_MICRO_BATCH", "")).isdecimal() else 0,
        "collective_timeout": _collective_timeout(environment) if launched else None,
    }


def forget_place(run: object) -> None:
    """Take from a standby process's Run what it has not, before it enters the restartable function."""
    for name in _OF_A_RANK:
        delattr(run, name)


def raise_missing(name: str) -> NoReturn:
    """Raise what a missing attribute of a Run means: UsageError where a standby process asks for its place."""
    if name in _OF_A_RANK:
        raise UsageError(
            f"run.{name}: a process of --spare-ranks has no rank before its @train.restartable function: use it inside"
        )
    raise AttributeError(f"a Run has no attribute {name!r}")


def _layout(environment: Mapping[str, str], world_size: int) -> tuple[int, int, int]:
    """Return tensor, pipeline and data parallel; all ranks data parallel where the environment is not of this world."""
    degrees = [environment.get(f"RESILIO_{name}", "") for name in ("TP", "PP", "DP")]
    if not all(text.isdecimal() for text in degrees):
        return 1, 1, world_size
    tensor, pipeline, data = map(int, degrees)
    return (tensor, pipeline, data) if tensor * pipeline * data == world_size else (1, 1, world_size)


def _collective_timeout(environment: Mapping[str, str]) -> timedelta | None:
    """Return how long a rank may wait in a collective, at least a minute; None where that is not known."""
    try:
        seconds = float(environment.get(COLLECTIVE_VARIABLE, ""))
    except ValueError:
        return None
    return timedelta(seconds=max(_LEAST_COLLECTIVE_S, seconds)) if 0.0 < seconds < 1e9 else None
