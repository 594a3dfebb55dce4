"""The run directory on the shared file system, and the requests to it, which take time and may hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir.limit_files import KeptLimits, LimitOrder

if TYPE_CHECKING:
    from tests.support.virtual_cluster.agent import VirtualAgent
    from tests.support.virtual_cluster.ranks import History
    from tests.support.virtual_cluster.world import World

JOB = "job"
STORAGE_S = 0.005


@dataclass
class Directory:
    """What lies there."""

    epochs: list[EpochRecord] = field(default_factory=list)
    witnesses: dict[str, str] = field(default_factory=dict)  # name → the node that has it
    committed: dict[int, History] = field(default_factory=dict)
    commit_times: list[tuple[float, int]] = field(default_factory=list)
    newest_commit: tuple[int, int] = (0, -1)  # (epoch, round)
    fence: int = 0  # the lowest epoch that may still commit
    verdict: dict[str, Any] | None = None
    pulse: tuple[int, int] = (0, 0)  # (epoch, counter)
    last_round: int = -1
    limits: KeptLimits = field(default_factory=KeptLimits)
    order: LimitOrder = field(default_factory=LimitOrder)

    @property
    def newest(self) -> int:
        """The newest epoch on record."""
        return max((record.epoch for record in self.epochs), default=0)

    @property
    def said(self) -> tuple[str, int] | None:
        """Name and exit code of the verdict, if there is one."""
        return (self.verdict["verdict"], self.verdict["exit_code"]) if self.verdict is not None else None

    def claim_epoch(self, record: EpochRecord) -> bool:
        """Exclusively, and from then on no older epoch commits."""
        holder = next((known for known in self.epochs if known.epoch == record.epoch), None)
        if holder is None:
            self.epochs.append(record)
        won = holder is None or holder == record
        if won:
            self.fence = max(self.fence, record.epoch)
        return won

    def write_verdict(self, verdict: dict[str, Any]) -> int:
        """The first of the job stands. Returns the newest epoch."""
        if self.verdict is None and self.newest <= verdict.get("epoch", 1 << 60):
            self.verdict = verdict
        return self.newest

    def write_status(self, epoch: int, leads: bool) -> int:
        """The pulse moves while the controller leads. Returns the newest epoch."""
        if self.newest <= epoch:
            self.pulse = (epoch, self.pulse[1] + leads)
        return self.newest

    def keep_limits(self, kept: KeptLimits) -> None:
        """The newest controller's."""
        if self.newest <= kept.epoch:
            self.limits = kept

    def claim_witness(self, witness: str, node: str) -> str:
        """Exclusively: whose it is."""
        return self.witnesses.setdefault(witness, node)


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
