"""The controller's orders to write a step and to commit it, and what it hears of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core.rank_link import SaveProgress
from resilio_hpc.core.tiers import Stage
from resilio_hpc.launch.agent.decisions.agent_ports import Ports
from resilio_hpc.launch.agent.decisions.controller_reports import ControllerReports
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound

Saving = m.PersistStep | m.KeepCopies | m.CommitStep


class SaveOrders:
    """What one node's saver is to write; each order is carried out once. ``committed``: steps that are durable."""

    def __init__(self, ports: Ports, reports: ControllerReports) -> None:
        self.committed: set[int] = set()
        self._ports = ports
        self._reports = reports
        # the saver's last order: epoch, round, step, whether to commit
        self._ordered: tuple[int, int, int, bool] = (-1, -1, -1, False)

    def write(self, message: Saving, local: LocalRound, world_size: int, lease: float) -> None:
        """Carry out an order. ``lease``: until when this node's ranks may run, in monotonic seconds."""
        if isinstance(message, m.KeepCopies):
            self._ports.services.keep_copies(message, world_size)
            return
        order = (message.epoch, message.round, message.step, isinstance(message, m.CommitStep))
        if order[:3] == self._ordered[:3] and order <= self._ordered:
            return  # a repeated order: its answer is on the way, or among the facts that are sent again
        if isinstance(message, m.CommitStep) and self._ports.monotonic() > lease:
            # the order waited here while this node stood still, and the others may have gone on from an older step
            self.persist_failed(message.round, message.step, "the order to commit came after the end of the lease")
            return
        self._ordered = order
        if isinstance(message, m.CommitStep):
            self._ports.services.commit(message)
        else:
            self._ports.services.persist(message, local.member, world_size)

    def stage_reached(self, message: m.StageReached, attached: Iterable[int]) -> None:
        """Tell the ranks that a checkpoint is durable, or failed."""
        if message.stage is Stage.COMMITTED:
            self.committed.add(message.step)
        for rank in attached:
            self._ports.services.tell_rank(rank, SaveProgress(message.step, message.stage, message.error))

    def repeats(self, step: int, local: LocalRound) -> bool:
        """Return whether a rank saves the step again that its round began with, as a restart after the last step does.

        Such a step is not committed a second time, and later steps may be of a life that is over.
        """
        return local.restore is not None and step <= local.restore.step and step in self.committed

    def persisted(self, round_number: int, step: int, record: ShardRecord) -> None:
        """Take note that the saver wrote this node's file."""
        self._reports.tell(m.StepPersisted(self._reports.node, self._reports.epoch, round_number, step, record))

    def persist_failed(self, round_number: int, step: int, error: str) -> None:
        """Take note that the saver could not write."""
        self._reports.tell(m.PersistFailed(self._reports.node, self._reports.epoch, round_number, step, error))

    def commit_done(self, round_number: int, step: int, seconds: float) -> None:
        """Take note that the saver wrote the manifest."""
        self.committed.add(step)
        self._reports.tell(m.ManifestWritten(self._reports.node, self._reports.epoch, round_number, step, seconds))
