"""How this node's ranks stop: after a step that all ranks agree on, or because they are ended. Pure.

Orders for ranks that go on are passed on here, too.
"""

from __future__ import annotations

from typing_extensions import assert_never

from resilio_hpc.core import rank_link
from resilio_hpc.launch.agent.decisions.agent_ports import AT_ONCE, ServicePorts
from resilio_hpc.launch.agent.decisions.lone_restart import restart_alone
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_owner import StopHow

RankOrder = (
    m.ProposeStop | m.ConfirmStop | m.TerminateRanks | m.PauseRanks | m.ResumeRanks | m.SaveAtStep | m.RestartRank
    | m.DrillStrike
)  # fmt: skip


class StopState:
    """Whether ranks are being ended. ``since``: Unix seconds."""

    def __init__(self) -> None:
        self.under_way = False
        self.since = 0.0
        self._in_grace = False  # some may still run

    def order(self, how: StopHow, now: float) -> bool:
        """Take an order to end the ranks. Return whether it says more than the one before: no grace any more."""
        if self.under_way and not (self._in_grace and how == AT_ONCE):
            return False
        if not self.under_way:
            self.since = now
        self.under_way = True
        self._in_grace = how.grace_s > 0 or bool(how.keep)
        return True

    @property
    def at_once(self) -> bool:
        """Return whether they are being killed, without a grace."""
        return self.under_way and not self._in_grace

    def over(self) -> None:
        """Take note that every rank is gone."""
        self.under_way = self._in_grace = False


def carry_out(
    message: RankOrder,
    local: LocalRound,
    services: ServicePorts,
) -> list[m.ToController]:
    """Carry out an order for the ranks that run. Return what the controller hears of it."""
    match message:
        case m.ProposeStop():
            for rank in local.attached:
                services.tell_rank(rank, rank_link.StopAt(message.target))
            return local.propose_stop(message.target)
        case m.ConfirmStop():
            local.stop_confirmed = local.target == message.target
            for rank in local.attached:
                services.tell_rank(rank, rank_link.StopConfirmed(message.target))
        case m.PauseRanks():
            for rank in local.attached:
                services.tell_rank(rank, rank_link.PauseConfirmed(message.target, message.limit_s))
        case m.ResumeRanks():
            local.resume()
            for rank in local.attached:
                services.tell_rank(rank, rank_link.Resume())
        case m.SaveAtStep():
            for rank in local.attached:
                services.tell_rank(rank, rank_link.SaveAt(message.step))
        case m.TerminateRanks():
            if not local.terminating:
                local.terminating = True
                services.terminate_ranks()
        case m.RestartRank():
            return restart_alone(message, local, services)
        case m.DrillStrike():
            services.strike(message)
        case _:
            assert_never(message)
    return []
