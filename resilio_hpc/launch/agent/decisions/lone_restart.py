"""A rank that failed starts again alone: the agent's part of ``--restart-policy failed``. Pure.

The controller decides, since the budget of restarts is the run's. The order may come twice.
"""

from __future__ import annotations

from resilio_hpc.launch.agent.decisions.agent_ports import ServicePorts
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound


def restart_alone(order: m.RestartRank, local: LocalRound, services: ServicePorts) -> list[m.ToController]:
    """Start a rank of this round again. Return what the controller hears of it."""
    number = order.local_rank
    rank = local.ranks.get(number)
    if rank is None:
        return []
    if order.restart <= rank.restarts:
        return restarted(local, number)  # the answer may have been lost
    if rank.failed_at is None:
        return []
    said = local.begin_again(number, order.restart)
    if local.ranks[number].restarts == order.restart:
        services.restart_rank(local, number)
    return said


def restarted(local: LocalRound, number: int, at: float | None = None) -> list[m.ToController]:
    """Return that a rank runs again, if it does. ``at``: Unix seconds, where that is new."""
    rank = local.ranks[number]
    if at is not None:
        rank.restarted_s = round(max(0.0, at - rank.again_since), 4)
    if rank.restarted_s is None:
        return []
    return [m.RankRestarted(local.node, local.epoch, local.number, rank.rank, rank.restarts, rank.restarted_s)]
