"""The run directory on the shared file system, and the requests to it, which take time and may hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilio_hpc.launch.succession import EpochRecord

if TYPE_CHECKING:
    from virtual_cluster.agent import VirtualAgent
    from virtual_cluster.ranks import History
    from virtual_cluster.world import World

STORAGE_S = 0.005


@dataclass
class Directory:
    """What lies there."""

    epochs: list[EpochRecord] = field(default_factory=list)
    committed: dict[int, History] = field(default_factory=dict)
    commit_times: list[tuple[float, int]] = field(default_factory=list)
    fence: int = 0  # the lowest epoch that may still commit
    verdict: dict[str, Any] | None = None
    pulse: tuple[int, int] = (0, 0)  # (epoch, counter)
    last_round: int = -1

    @property
    def newest(self) -> int:
        """The newest epoch on record."""
        return max((record.epoch for record in self.epochs), default=0)


class SharedStorage:
    """Answers requests after a while; the answer is None when the file system fails."""

    def __init__(self, world: World) -> None:
        self._world = world

    def ask(self, agent: VirtualAgent, question: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """A request of the agent's storage child."""

        def serve() -> None:
            if agent.alive:
                reply = None if self._world.storage_fails else question()
                agent.event(lambda: answer(reply))

        self._world.after(STORAGE_S, serve)

    def save(self, agent: VirtualAgent, seconds: float, write: Callable[[], None]) -> None:
        """The agent's saver writes a file."""
        self._world.after(seconds, lambda: write() if agent.alive else None)
