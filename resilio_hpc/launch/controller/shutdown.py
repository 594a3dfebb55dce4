"""The controller's part for the end: the verdict, and letting every agent go, its own last. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilio_hpc.events.event_text import RUNGS
from resilio_hpc.launch.controller.recovery_policy import Plan
from resilio_hpc.launch.controller.state import Finish, Phase
from resilio_hpc.launch.protocol import messages as m

if TYPE_CHECKING:
    from resilio_hpc.launch.controller.controller import Controller

FAREWELL_S = 3.0  # how long the other agents may take to leave before the controller's own agent does


class Ending:
    """A verdict is decided, waits for a quorum, is written by the host, and then said to everybody."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._waiting: Finish | None = None  # for a quorum
        self._end: m.End | None = None
        self._own_due: float | None = None
        self._own_said = False

    def finish(self, verdict: str, exit_code: int, reason: str, failure: m.RankFailure | None = None) -> None:
        """End the run, or this job's part of it."""
        if self._controller.phase is Phase.ENDED:
            return
        fields = self._fields()
        if failure is not None:
            fields["first_failure"] = {k: getattr(failure, k) for k in failure.__struct_fields__ if k != "bad_copy"}
        self._waiting = Finish(verdict, exit_code, reason, fields)
        self.finish_when_led()

    def give_up(self, plan: Plan) -> None:
        """No restart helps, once it is known what failed first."""
        controller = self._controller
        if not controller.incidents.awaits_cause():
            spent = controller.without_progress > controller.config.max_without_progress
            first = controller.incidents.first_failure()
            self.finish("no_progress" if spent else "not_enough_nodes", 1, plan.reason, first)

    def finish_unrecovered(self, plan: Plan) -> None:
        """--mode observe, checkpoint: what we would have done is in the ledger; the failure ends the run."""
        first = self._controller.incidents.first_failure()
        code = first.exit_code if first is not None and first.exit_code else 1
        mode = self._controller.config.mode
        would = f"--mode recover would {RUNGS[plan.rung.value]} ({plan.reason})"
        self.finish("failed", code, f"with --mode {mode} a failure ends the run; {would}", first)

    def finish_alone(self, verdict: str, exit_code: int, reason: str) -> None:
        """End a job in which no quorum ever came together."""
        self._end_with(Finish(verdict, exit_code, reason, self._fields()))

    def finish_when_led(self) -> None:
        """A verdict is said by whoever has a quorum."""
        if self._waiting is not None and self._controller.enrolment.leads:
            self._end_with(self._waiting)

    def forget(self) -> None:
        """What was decided in an earlier phase is void."""
        self._waiting = None

    def adopt(self, verdict: str, exit_code: int) -> None:
        """An earlier controller said it, and not all have heard it."""
        self._controller.set_phase(Phase.ENDED)
        self._end = m.End(self._controller.epoch, verdict, exit_code)
        self.release()

    def _fields(self) -> dict[str, Any]:
        controller = self._controller
        return {
            "round": controller.round, "restarts": controller.restarts, "committed": controller.checkpoints.committed,
            "epoch": controller.epoch, "steps_reported": controller.rounds.steps_reported,
            "trained": self._has_trained(),
        }  # fmt: skip

    def _has_trained(self) -> bool:
        """False where no rank was started, or where ranks report steps and none was completed: there was less time than
        the start takes."""
        rounds = self._controller.rounds
        return rounds.steps_reported or (rounds.has_started and not rounds.attached)

    def _end_with(self, finish: Finish) -> None:
        self._controller.set_phase(Phase.ENDED)
        self._end = m.End(self._controller.epoch, finish.verdict, finish.exit_code)
        self._controller.act(finish)

    def release(self) -> None:
        """The verdict is durable: every agent may go, our own last, so that no message dies with us."""
        controller = self._controller
        if self._end is None or self._own_due is not None:
            return
        self._own_due = controller.now() + FAREWELL_S
        for node in sorted(controller.agents.keys() - {controller.node}):
            controller.send(node, self._end)
        self.let_go()

    def say_again(self, node: str) -> None:
        """``node`` may have missed it."""
        if self._end is not None and self._own_due is not None and (node != self._controller.node or self._own_said):
            self._controller.send(node, self._end)

    def let_go(self) -> None:
        """Our own agent goes when all others have gone, or have had time enough."""
        controller = self._controller
        if self._end is None or self._own_due is None or controller.node not in controller.agents:
            return  # our own agent has not presented itself yet
        alone = not controller.agents.keys() - {controller.node}
        if not self._own_said and (alone or controller.now() >= self._own_due):
            self._own_said = True
            controller.send(controller.node, self._end)
