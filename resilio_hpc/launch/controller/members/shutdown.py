"""The controller's part for the end: the verdict, then the release of every agent, its own last. Pure."""

from __future__ import annotations

from typing import Any

from resilio_hpc.launch.controller.facts.intents import EndAlone, EndRun
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.recovery import fields_of, origin_fields
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Finish, Phase
from resilio_hpc.launch.protocol import messages as m

FAREWELL_S = 3.0  # time for the other agents to leave before the controller's own agent does


class Shutdown:
    """Ends the run: a verdict is decided, waits for a quorum, is written by the host, then sent to all agents."""

    def __init__(self, run: RunState, out: Outbox) -> None:
        self._run = run
        self._out = out
        self._end: m.End | None = None
        self._own_due: float | None = None
        self._own_said = False

    def end_run(self, wanted: EndRun) -> None:
        """End the run, or this job's part of it, as soon as a quorum stands with the controller."""
        if self._run.phase is Phase.ENDED:
            return
        fields, failure = self._fields(), wanted.failure
        found = self._run.recovery.last_origin(self._run.world_size) if self._run.recovery is not None else None
        if found is not None and found[1] > 1 and self._run.waiting_verdict is None:
            self._out.record("origin", round=self._run.round, **origin_fields(*found))
        if failure is not None:
            fields["first_failure"] = fields_of(failure)
        self._run.waiting_verdict = Finish(wanted.verdict, wanted.exit_code, wanted.reason, fields)
        self.end_when_led()

    def end_alone(self, wanted: EndAlone) -> None:
        """End a job in which a quorum never came together."""
        self._end_with(Finish(wanted.verdict, wanted.exit_code, wanted.reason, self._fields()))

    def end_when_led(self) -> None:
        """End with the verdict that waits. Only a controller with a quorum calls this."""
        if self._run.waiting_verdict is not None and self._run.leads:
            self._end_with(self._run.waiting_verdict)

    def adopt(self, verdict: str, exit_code: int) -> None:
        """End with the verdict of an earlier controller, of which some agents have not heard."""
        self._run.enter(Phase.ENDED)
        self._end = m.End(self._run.epoch, verdict, exit_code)
        self.release()

    def _fields(self) -> dict[str, Any]:
        run = self._run
        furthest = max(run.max_step, run.recovery.at_step if run.recovery is not None else -1)
        return {
            "round": run.round, "restarts": run.restarts, "committed": run.committed, "epoch": run.epoch,
            "step": furthest, "steps_reported": run.steps_reported, "trained": self._has_trained(),
        }  # fmt: skip

    def _has_trained(self) -> bool:
        """Return whether this part made progress: ranks were started and, if they report steps, completed one.

        Without it, the time was too short even for the start.
        """
        run = self._run
        return run.steps_reported or (run.has_started and not run.attached)

    def _end_with(self, finish: Finish) -> None:
        self._run.enter(Phase.ENDED)
        recovery = self._run.recovery
        cause = recovery.cause() if recovery is not None else None
        self._end = m.End(self._run.epoch, finish.verdict, finish.exit_code, cause)
        self._out.act(finish)

    def release(self) -> None:
        """Release all agents, the controller's own last, so that no message is lost with it. The verdict is durable."""
        run = self._run
        if self._end is None or self._own_due is not None:
            return
        self._own_due = run.now() + FAREWELL_S
        for node in sorted(run.agents.keys() - {run.node}):
            self._out.send(node, self._end)
        self.let_go()

    def say_again(self, node: str) -> None:
        """Repeat the release to ``node``, which may have missed it."""
        if self._end is not None and self._own_due is not None and (node != self._run.node or self._own_said):
            self._out.send(node, self._end)

    def let_go(self) -> None:
        """Release the controller's own agent when all others have left, or had time enough."""
        run = self._run
        if self._end is None or self._own_due is None or run.node not in run.agents:
            return  # the controller's own agent has not said Hello yet
        alone = not run.agents.keys() - {run.node}
        if not self._own_said and (alone or run.now() >= self._own_due):
            self._own_said = True
            self._out.send(run.node, self._end)
