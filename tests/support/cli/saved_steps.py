"""Two saved steps that the commands of ``resilio ckpt`` are tried on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc import ckpt
from tests.support.waiting import PATIENCE_S


def alone(patch: pytest.MonkeyPatch) -> None:
    """No other rank and no agent."""
    for name in ("RANK", "WORLD_SIZE", "RESILIO_AGENT_SOCKET"):
        patch.delenv(name, raising=False)


def save_steps(directory: Path, state_of: Callable[[int], dict[str, Any]]) -> Path:
    """Save the steps 10 and 20 in ``directory``."""
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        saver = ckpt.Checkpointer(directory)
        for step in (10, 20):
            saver.save(step, state_of(step)).wait(timeout_s=PATIENCE_S)
    return directory


def copy_of(saved: Path, below: Path) -> Path:
    """A copy of the steps, in a directory whose name is hard to handle."""
    return shutil.copytree(saved, below / "check 'points'\n", symlinks=True)
