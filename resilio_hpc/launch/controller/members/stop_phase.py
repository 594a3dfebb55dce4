"""Stops the ranks before training is complete: time limit, SIGTERM, Ctrl-C (CARD-5, NVX-5). Pure.

A time limit is an ordinary event. The stop begins as late as the measured saving time allows, all ranks agree on one
step, save there, and exit; the next job of the chain resumes from it.
"""

from __future__ import annotations

from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.intents import EndRun, Intend
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.controller.members.stopping import StopAgreement
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.stop_reasons import STOP_EXIT_CODES, STOP_REASONS


class StopPhase:
    """Stops all ranks for the end of this job's part.

    It begins by the wall clock, by which Slurm ends jobs. Its deadline counts by the monotonic clock, which is never
    set.
    """

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._reason = ""
        self._agreement = StopAgreement()
        self._urgent = False  # begin at once, instead of as late as possible
        self._deadline: float | None = None  # monotonic seconds
        self._overdue = False
        self._proposed_round = -1

    def warned(self, signal: str, node: str) -> None:
        """Take a warning signal. A repeated warning can only bring the stop forward."""
        reason = STOP_REASONS.get(signal, "terminated")
        if self._reason and (self._run.stopping or reason == "time_limit"):
            return
        self._reason = reason
        config = self._run.config
        self._urgent = reason != "time_limit" or config.end_time is None
        self._out.record("warned", signal=signal, node=node, reason=reason, urgent=self._urgent)

    def _latest_begin(self, end_time: float) -> float:
        """Return when to begin, so that a save, as measured so far, fits before the end with a margin."""
        step_s = max((agent.step_time for agent in self._run.agents.values()), default=0.0)
        return end_time - self._run.config.save_margin_s - 2 * self._run.save_s - 4 * step_s

    def tick(self) -> None:
        """Begin when it is time; kill the ranks when the deadline has passed."""
        run = self._run
        monotonic, unix, end_time = run.now(), run.unix(), run.config.end_time
        due = self._urgent or (end_time is not None and unix >= self._latest_begin(end_time))
        if due and not self._reason:
            self._reason = "time_limit"
            self._out.record("time_limit_near", end_time=end_time, save_s=round(run.save_s, 3), **self._not_acted())
        if due and not run.stopping and not (self._only_observes and self._reason == "time_limit"):
            self._begin(monotonic, unix)
        if run.stopping:
            self._proceed(monotonic)

    @property
    def _only_observes(self) -> bool:
        return self._run.config.mode == Mode.OBSERVE

    def _not_acted(self) -> dict[str, bool]:
        return {"acted": False} if self._only_observes else {}

    def _begin(self, monotonic: float, unix: float) -> None:
        run, config = self._run, self._run.config
        run.stopping = True
        left_s = config.stop_grace_s
        if self._reason == "time_limit" and config.end_time is not None:
            left_s = max(left_s, config.end_time - unix)
        self._deadline = monotonic + left_s
        self._out.record("stopping", reason=self._reason, step=run.max_step, **self._not_acted())
        if run.phase in (Phase.GATHERING, Phase.PREPARING):
            self.end()

    def _proceed(self, monotonic: float) -> None:
        run = self._run
        if self._deadline is not None and monotonic >= self._deadline:
            if not self._overdue:
                self._overdue = True
                self._out.record("stop_overdue", reason=self._reason)
            self.end()
        elif run.with_ranks and self._proposed_round != run.round:
            self._proposed_round = run.round
            self._agreement = StopAgreement()
            if self._only_observes:  # as plain srun does: SIGTERM, and no agreed step
                for member in run.members:
                    self._out.send(member.node, self._final_word())
                return
            self._agreement.propose([member.node for member in run.members], run.max_step)
            self._propose()

    def _propose(self) -> None:
        run = self._run
        for member in run.members:
            self._out.send(member.node, m.ProposeStop(run.epoch, run.round, self._agreement.target))

    def answer(self, message: m.StopAnswer) -> None:
        """Take a member's answer to the proposed step."""
        self._take(message.node, message.target, message.accepted, message.step, message.attached)

    def _take(self, node: str, target: int, accepted: bool, step: int, attached: int) -> None:
        outcome = self._agreement.answer(node, target, accepted, step, attached)
        if outcome == "repropose":
            self._propose()
        elif outcome:
            if self._agreement.attached:
                self._out.record("stop_agreed", step=self._agreement.target)
            for member in self._run.members:
                self._out.send(member.node, self._final_word())

    def _final_word(self) -> m.ConfirmStop | m.TerminateRanks:
        """Return what ends the ranks: the agreed step, or, where no rank knows of steps, SIGTERM."""
        run = self._run
        if self._agreement.attached:
            return m.ConfirmStop(run.epoch, run.round, self._agreement.target)
        return m.TerminateRanks(run.epoch, run.round, run.config.stop_grace_s)

    def member_done(self, message: m.RanksDone) -> None:
        """Stop waiting for a member: its ranks have ended."""
        self._take(message.node, self._agreement.target, True, message.step, 0)

    def repeat(self, node: str) -> None:
        """Repeat the stop orders to ``node``, which may have missed them."""
        run = self._run
        if self._proposed_round != run.round:
            return
        if self._only_observes:
            self._out.send(node, self._final_word())
            return
        self._out.send(node, m.ProposeStop(run.epoch, run.round, self._agreement.target))
        if self._agreement.confirmed:
            self._out.send(node, self._final_word())

    def end(self) -> None:
        """End this job's part of the run: all ranks are gone, or are being killed."""
        words = {
            "time_limit": "the job's time limit is near",
            "terminated": "SIGTERM (scancel, preemption, the time limit) or SIGHUP (its terminal is gone)",
            "interrupted": "Ctrl-C",
        }
        # the ranks were stopped by an earlier controller, whose reason is not known
        reason = self._reason or "terminated"
        self._intend(EndRun(reason, STOP_EXIT_CODES[reason], words[reason]))
