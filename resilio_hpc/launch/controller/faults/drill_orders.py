"""The controller's part for a drill that a user orders (``resilio drill run --run``). Pure.

Only the controller knows whether the run can take a fault now, so it decides; the agent of the rank's node carries it
out. The drill is recorded first, so that the ledger says of the failure that it was made on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping

from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Action, Phase, Record, Send
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.drill_messages import Blow
from resilio_hpc.launch.rundir.user_orders import UserOrder

BLOWS: Mapping[str, Blow] = {
    "kill_rank": "kill_rank",
    "abort_rank": "abort_rank",
    "stop_rank": "stop_rank",
    "kill_agent": "kill_agent",
    "kill_controller": "kill_agent",
}
ORDER_S = 300.0  # an older order was left behind by a command that was killed; clocks of nodes may differ
LEAST_LEFT = 2  # restarts without progress that must be left: a drill must not end the run


def actions(run: RunState, order: UserOrder) -> list[Action]:
    """Return what follows from an order: its record, and the message to the agent where it can be carried out."""
    member = next((one for one in run.members if _meets(run, order, one)), None)
    why = why_not(run, order) or ("" if member is not None else f"no rank {order.rank} in this round")
    rank = order.rank if member is not None and order.rank in member.ranks else -1
    fields = {
        "asked": order.mark, "by": order.by, "fault": order.fault, "node": member.node if member is not None else "",
        "rank": rank, "step": run.max_step, "round": run.round, "why": why,
    }  # fmt: skip
    done: list[Action] = [Record("drill", fields)]
    if not why and member is not None:
        run.drilled[member.node] = run.now()
        local_rank = max(0, order.rank - member.first_rank)
        done.append(Send(member.node, m.DrillStrike(run.epoch, run.round, BLOWS[order.fault], local_rank)))
    return done


def _meets(run: RunState, order: UserOrder, member: m.Member) -> bool:
    return member.node == run.node if order.fault == "kill_controller" else order.rank in member.ranks


def why_not(run: RunState, order: UserOrder) -> str:
    """Return why the run must not be struck now; "" where it may."""
    if order.fault not in BLOWS:
        return f"this launcher knows no fault {order.fault!r}"
    if abs(run.unix() - order.at) > ORDER_S:
        return f"the order is {run.unix() - order.at:.0f} s old"
    if run.config.mode is not Mode.RECOVER:
        return f"--mode {run.config.mode} restarts nothing"
    if run.stopping or run.phase is Phase.ENDED:
        return "the run is ending"
    if run.phase is not Phase.RUNNING or run.recovery is not None or not run.leads:
        return "the run does not train now: it starts, or recovers from a fault"
    if run.pausing:
        return "its ranks pause for a test of the nodes"
    if order.force:
        return ""
    if run.committed < 0:
        return "no checkpoint is committed yet, so all steps would be lost (--force does it nevertheless)"
    if run.config.max_without_progress - run.without_progress < LEAST_LEFT:
        return "too few restarts without progress are left (--force does it nevertheless)"
    return ""
