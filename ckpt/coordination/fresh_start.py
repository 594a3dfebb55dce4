"""Whether a run may begin from nothing: not where checkpoints existed, and none can be read."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core.errors import CorruptCheckpoint


def check_not_all_damaged(directory: Path) -> None:
    """Raise CorruptCheckpoint when steps exist and none is good: then only the user may decide to start over."""
    found, damaged = checkpoint_index.survey(directory)
    if found:
        return
    if damaged:
        step, why = max(damaged.items())
        raise CorruptCheckpoint(
            f"every step in {directory} is damaged; step {step}: {why} (to begin anew, remove them)"
        )
    if step_of_latest(directory) is not None:
        raise CorruptCheckpoint(
            f"{why_newest_is_gone(directory)}; no other step is there (to begin anew, remove {directory / 'latest'})"
        )


def why_newest_is_gone(directory: Path, known: Collection[int] = ()) -> str:
    """Return the text that ``latest`` names a step which does not exist any more; "" when it exists.

    ``known``: steps that exist.
    """
    step = step_of_latest(directory)
    if step is None or step in known or store_of(directory).exists(checkpoint_index.step_directory(directory, step)):
        return ""
    return f"step {step} was committed last in {directory}, and it is gone"


def step_of_latest(directory: Path) -> int | None:
    """Return the number in ``latest``; None without one."""
    try:
        text = store_of(directory).read(directory / "latest", 40)
    except OSError:
        return None
    return int(text) if re.fullmatch(rb"[0-9]{1,18}\n?", text) else None
