"""What a guard of steps needs of its run, and of what saves the run's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from resilio_hpc.train.validation.replica_groups import ReplicaRound


class GuardedRun(ReplicaRound, Protocol):
    """What a guard needs of its run; ``train.Run`` is one."""

    launched: bool

    def save_last(self, completed: int, save: Callable[[int], Any]) -> None:
        """Save, and return when that is committed."""


class BoundarySaver(Protocol):
    """Saves the last finished step; what ``Checkpointer.saver`` returns is one."""

    @property
    def holds_boundary(self) -> bool:
        """Return whether it can."""

    def save_boundary(self, live: Any) -> Any:
        """Save it with an object of the state as it is now."""
