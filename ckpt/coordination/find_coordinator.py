"""The choice of a process's coordinator: its agent's under resilio-launch, else it decides with its peers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from resilio_hpc.ckpt.coordination import agent_coordinator, agent_link
from resilio_hpc.ckpt.coordination.coordinator import Coordinator, local_directory
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.store.retention import Retention


def find_coordinator(
    directory: Path,
    environment: Mapping[str, str],
    retention: Retention,
    patience_s: float,
    local: str | os.PathLike[str] | None,
    bytes_per_s: float,
    local_keep: int,
) -> Coordinator:
    """Return the launcher's coordinator, or without one a LocalCoordinator with the other arguments."""
    link = agent_link.current(environment)
    if link is not None:
        return agent_coordinator.AgentCoordinator(link, environment)
    where = local_directory(local, environment)
    return LocalCoordinator(
        directory, environment, retention, patience_s, local=where, bytes_per_s=bytes_per_s, local_keep=local_keep
    )
