"""What an agent keeps on its node for agents that are started again."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from resilio_hpc.core import trusted_files

Kept = TypeVar("Kept")


class NodeMemory:
    """Small files in the node's private directory; a node that dies loses them.

    They count for one part of a run only: a job's, and the epoch in which it ``begins``.
    """

    def __init__(self, directory: Path, job: str, begins: int) -> None:
        self._directory = directory
        self._part = [job, begins]

    def keep(self, name: str, value: msgspec.Struct) -> None:
        """Replace what is kept under ``name``. After a node's death it has no use, so nothing is synced."""
        temporary = self._directory / f"{name}.part"
        temporary.write_bytes(msgspec.json.encode({"part": self._part, "value": value}))
        temporary.rename(self._directory / f"{name}.json")

    def kept(self, name: str, kind: type[Kept]) -> Kept | None:
        """Return what an earlier agent kept; None when nothing of this part can be read."""
        try:
            kept = msgspec.json.decode(trusted_files.read(self._directory / f"{name}.json"))
            return msgspec.convert(kept["value"], kind) if kept["part"] == self._part else None
        except (OSError, KeyError, TypeError, msgspec.MsgspecError):
            return None
