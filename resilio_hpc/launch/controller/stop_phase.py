"""How a job's part of a run ends before training does: time limit, SIGTERM, Ctrl-C (CARD-5, NVX-5). Pure.

The wall-time limit is an ordinary event. The stop begins as late as the measured saving time allows, all ranks agree
on one step, save there, and exit; the next job of the chain resumes from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilio_hpc.launch.config.options import Mode
from resilio_hpc.launch.controller.state import WITH_RANKS, Phase
from resilio_hpc.launch.controller.stopping import StopAgreement
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.stop_reasons import STOP_EXIT_CODES, STOP_REASONS

if TYPE_CHECKING:
    from resilio_hpc.launch.controller.controller import Controller


class StopPhase:
    """The controller's part for stopping. It begins by the wall clock, by which Slurm ends jobs; what it then waits is
    counted by a clock that nobody sets."""

    def __init__(self, controller: Controller) -> None:
        self.reason = ""
        self.terminating = False
        self.save_s = 0.0
        self._controller = controller
        self._agreement = StopAgreement()
        self._urgent = False  # begin at once, not as late as possible
        self._deadline: float | None = None  # monotonic
        self._overdue = False
        self._proposed_round = -1
        self._snapshots: dict[int, float] = {}  # step → monotonic time of its first snapshot

    def warned(self, signal: str, node: str) -> None:
        """A warning arrived. Repeated warnings may only hasten the end."""
        reason = STOP_REASONS.get(signal, "terminated")
        if self.reason and (self.terminating or reason == "time_limit"):
            return
        self.reason = reason
        config = self._controller.config
        self._urgent = reason != "time_limit" or config.end_time is None
        self._controller.record("warned", signal=signal, node=node, reason=reason, urgent=self._urgent)

    def _latest_begin(self, end_time: float) -> float:
        """When to begin so that saving, as measured so far, still fits before the end with a margin."""
        step_s = max((agent.step_time for agent in self._controller.agents.values()), default=0.0)
        return end_time - self._controller.config.save_margin_s - 2 * self.save_s - 4 * step_s

    def tick(self, monotonic: float, unix: float) -> None:
        """Begin when it is time; end by force when the deadline has passed."""
        end_time = self._controller.config.end_time
        due = self._urgent or (end_time is not None and unix >= self._latest_begin(end_time))
        if due and not self.reason:
            self.reason = "time_limit"
            self._controller.record(
                "time_limit_near", end_time=end_time, save_s=round(self.save_s, 3), **self._not_acted()
            )
        if due and not self.terminating and not (self._only_observes and self.reason == "time_limit"):
            self._begin(monotonic, unix)
        if self.terminating:
            self._proceed(monotonic)

    @property
    def _only_observes(self) -> bool:
        return self._controller.config.mode == Mode.OBSERVE

    def _not_acted(self) -> dict[str, bool]:
        return {"acted": False} if self._only_observes else {}

    def _begin(self, monotonic: float, unix: float) -> None:
        config = self._controller.config
        self.terminating = True
        left_s = config.stop_grace_s
        if self.reason == "time_limit" and config.end_time is not None:
            left_s = max(left_s, config.end_time - unix)
        self._deadline = monotonic + left_s
        self._controller.record("stopping", reason=self.reason, step=self._controller.max_step, **self._not_acted())
        if self._controller.phase in (Phase.GATHERING, Phase.PREPARING):
            self.ended()

    def _proceed(self, monotonic: float) -> None:
        controller = self._controller
        if self._deadline is not None and monotonic >= self._deadline:
            if not self._overdue:
                self._overdue = True
                controller.record("stop_overdue", reason=self.reason)
            self.ended()
        elif controller.phase in WITH_RANKS and self._proposed_round != controller.round:
            self._proposed_round = controller.round
            self._agreement = StopAgreement()
            if self._only_observes:  # what plain srun does: SIGTERM, and no agreed step
                for member in controller.members:
                    controller.send(member.node, self._final_word())
                return
            self._agreement.propose([member.node for member in controller.members], controller.max_step)
            self._propose()

    def _propose(self) -> None:
        controller = self._controller
        for member in controller.members:
            controller.send(member.node, m.ProposeStop(controller.epoch, controller.round, self._agreement.target))

    def answer(self, message: m.StopAnswer) -> None:
        """A member answered a proposal."""
        self._take(message.node, message.target, message.accepted, message.step, message.attached)

    def _take(self, node: str, target: int, accepted: bool, step: int, attached: int) -> None:
        controller = self._controller
        outcome = self._agreement.answer(node, target, accepted, step, attached)
        if outcome == "repropose":
            self._propose()
        elif outcome:
            if self._agreement.attached:
                controller.record("stop_agreed", step=self._agreement.target)
            for member in controller.members:
                controller.send(member.node, self._final_word())

    def _final_word(self) -> m.ConfirmStop | m.TerminateRanks:
        """What ends the ranks: the agreed step, or, where no rank knows of steps, SIGTERM."""
        controller = self._controller
        if self._agreement.attached:
            return m.ConfirmStop(controller.epoch, controller.round, self._agreement.target)
        return m.TerminateRanks(controller.epoch, controller.round, controller.config.stop_grace_s)

    def member_done(self, message: m.RanksDone) -> None:
        """A member's ranks have ended: it holds nobody up."""
        self._take(message.node, self._agreement.target, True, message.step, 0)

    def connection_renewed(self, node: str) -> None:
        """``node`` may have missed what it was told."""
        controller = self._controller
        if self._proposed_round != controller.round:
            return
        if self._only_observes:
            controller.send(node, self._final_word())
            return
        controller.send(node, m.ProposeStop(controller.epoch, controller.round, self._agreement.target))
        if self._agreement.confirmed:
            controller.send(node, self._final_word())

    def saw_snapshot(self, step: int, monotonic: float) -> None:
        """The first node holds ``step`` in memory: the save of it has begun."""
        self._snapshots.setdefault(step, monotonic)

    def saw_commit(self, step: int, monotonic: float) -> None:
        """``step`` is durable: measures how long a save takes."""
        began = self._snapshots.get(step)
        if began is not None:
            self.save_s = max(self.save_s * 0.8, monotonic - began)
        self._snapshots = {s: t for s, t in self._snapshots.items() if s > step}

    def ended(self) -> None:
        """All ranks are gone, or will be: close this job's part of the run."""
        words = {
            "time_limit": "the job's time limit is near",
            "terminated": "SIGTERM (scancel, preemption or the time limit)",
            "interrupted": "Ctrl-C",
        }
        reason = self.reason or "terminated"  # stopped at an earlier controller's word
        self._controller.ending.finish(reason, STOP_EXIT_CODES[reason], words[reason])
