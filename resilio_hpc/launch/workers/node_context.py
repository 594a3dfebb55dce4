"""What every part of an agent uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from resilio_hpc.core.ledger import Ledger
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.process import announce
from resilio_hpc.launch.rundir.run_directory import RunIdentity


class NodeContext(Struct, frozen=True):
    """One node's agent: settings, run, directories, ledger, and console.

    ``local_dir``: the agent's own, in ``/tmp``; ``arena_dir``: in ``/dev/shm``; ``open_files``: the limit for ranks.
    """

    settings: AgentSettings
    run: RunIdentity
    local_dir: Path
    arena_dir: Path
    ledger: Ledger
    open_files: int

    @property
    def name(self) -> str:
        """Return the node's name."""
        return self.settings.node

    @property
    def options(self) -> LaunchOptions:
        """Return the launch's options."""
        return self.settings.options

    def record(self, kind: str, **fields: Any) -> None:
        """Write an event of this node to the ledger."""
        self.ledger.append(kind, node=self.name, **{k: v for k, v in fields.items() if k != "node"})

    def tell(self, kind: str, **fields: Any) -> None:
        """Write an event to the ledger, and print its words."""
        self.record(kind, **fields)
        self.say(words(kind, {"node": self.name, **fields}))

    def say(self, line: str) -> None:
        """Print one line for the user."""
        announce.say(line)
