"""The ends of this node's ranks, and what the controller hears of them. Pure."""

from __future__ import annotations

from resilio_hpc.launch.agent.decisions.controller_reports import ControllerReports
from resilio_hpc.launch.agent.decisions.lone_restart import restarted
from resilio_hpc.launch.agent.decisions.rank_stopping import StopState
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.root_cause import reads_like_echo
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_evidence import NO_EVIDENCE, RankEvidence


class RankEnds:
    """Takes the ends of ranks.

    ``echoes``: ranks of the last round whose error reads like an echo of another one's end. ``before``: the local ranks
    of the last round, once they are being stopped.
    """

    def __init__(self, reports: ControllerReports, stop: StopState) -> None:
        self._reports = reports
        self._stop = stop
        self.echoes = 0
        self.before: LocalRound | None = None

    def begin(self) -> None:
        """Take note that another round begins."""
        self.echoes, self.before = 0, None

    def completed(self, life: m.Life) -> int:
        """Return the most steps that a local rank had completed before ranks were ended; -1: not of that life."""
        return self.before.furthest if self.before is not None and self.before.life == life else -1

    def exited(
        self, local: LocalRound | None, local_rank: int, how: tuple[int | None, int | None], at: float,
        error: tuple[str, str], evidence: RankEvidence = NO_EVIDENCE,
    ) -> None:  # fmt: skip
        """Take note that a rank ended. ``local``: the round whose ranks run, if any; ``how``: exit code or signal.

        ``at``: Unix seconds, of its exception where it recorded one. A rank that ends because it is stopped is ignored,
        unless it had failed before. Its peers' errors, which follow from its own, may have come first.
        """
        if how[0] != 0 and reads_like_echo(error[0]):
            self.echoes += 1
        if self._stop.under_way:
            local, how = self.before, (how[0] or 1, None)
            if not error[1] or at > self._stop.since:
                return
        if local is not None and local_rank in local.ranks:
            self._reports.tell_all(local.exited(local_rank, *how, at, error, evidence))

    def restarted(self, local: LocalRound | None, local_rank: int, at: float) -> None:
        """Take note that a rank runs again, whose failure has not ended the round."""
        if local is not None and local_rank in local.ranks and not self._stop.under_way:
            self._reports.tell_all(restarted(local, local_rank, at))

    def raised(
        self, local: LocalRound, local_rank: int, at: float, error: tuple[str, str], evidence: RankEvidence
    ) -> None:
        """Take note that a rank's function ended with an error, and its process waits for the next round."""
        if not self._stop.under_way and local_rank in local.ranks:
            self.echoes += reads_like_echo(error[0])
            self._reports.tell_all(local.raised(local_rank, at, error, evidence))
