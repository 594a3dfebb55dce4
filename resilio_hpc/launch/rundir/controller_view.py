"""What the run's controller writes to the run directory, for readers that are not connected to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resilio_hpc.core import trusted_files
from resilio_hpc.core.json_fields import Fields


class ControllerView:
    """The controller's status file. It counts as the word of a living controller only while it keeps changing."""

    def __init__(self, run_path: Path) -> None:
        self.agents: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()
        self._path = run_path / "status.json"
        self._pulse: tuple[Any, Any] = (None, None)

    def look(self) -> bool:
        """Read it.

        Return True when a controller has led since the last look: then ``agents`` and ``lost`` are its own.
        """
        return self.take(trusted_files.read_object(self._path) or {})

    def take(self, status: dict[str, Any]) -> bool:
        """Do as ``look`` does, with a status that the caller has read."""
        pulse = (status.get("epoch"), status.get("pulse"))
        moved = None not in (self._pulse[0], pulse[0]) and pulse != self._pulse
        self._pulse = pulse
        if moved:
            self.agents = tuple(Fields(status).inner("agents").data)
            self.lost = Fields(status).texts("lost")
        return moved
