"""How far the launcher goes: docs/adoption.md."""

from __future__ import annotations

from resilio_hpc.core.compat import StrEnum


class Mode(StrEnum):
    """What the launcher does about decisions."""

    OBSERVE = "observe"  # decisions are written down, and not carried out
    CHECKPOINT = "checkpoint"  # saves, restores and chains; a failure ends the run
    RECOVER = "recover"  # everything
