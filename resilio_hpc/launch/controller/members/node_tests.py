"""The controller's part for tests of nodes in a run: ranks pause, nodes are tested, ranks go on or move. Pure (RES-4).

The probers start while training goes on, since that takes seconds. Then all ranks agree on a step boundary, as for a
stop, and wait there. A pause ends with the test's result, with its time limit, with a stop, or with the round.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from resilio_hpc.core.rank_link import PAUSED
from resilio_hpc.diagnose.result import CheckResult
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.intents import Intend, PartWithUnfit, PauseAndTest, TestSuspects
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import EndTest, Phase, RunTest, StartTest
from resilio_hpc.launch.controller.members.node_replacement import worth_replacing
from resilio_hpc.launch.controller.members.stopping import StopAgreement
from resilio_hpc.launch.protocol import messages as m

START_S = 120.0  # for the probers to start, beside training: they import torch
AGREE_S = 30.0  # for all agents to answer a proposal
ARRIVE_S = 60.0  # for all ranks to reach the boundary, or so many of the slowest node's steps:
ARRIVE_STEPS = 10
RESTART_START_S = 30.0  # for the probers to start where ranks wait for them
LEAST_NODES = 3
SLACK_S = 30.0  # a rank that hears nothing more waits so much longer than the test may take
AGAIN_S = 1.0  # orders without an effect are repeated
EVERY_S = 600.0  # a test that was not ordered by hand comes no sooner after another one
MOST_TOLD = 16  # nodes with their evidence in the ledger


class _Stage(Enum):
    IDLE = "none"
    STARTING = "starting the probers"
    AGREEING = "agreeing on a step"
    ARRIVING = "waiting for all ranks to reach that step"
    TESTING = "testing"


class NodeTests:
    """Carries out ``PauseAndTest``: at most one at a time."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._stage = _Stage.IDLE
        self._asked = PauseAndTest("")
        self._number = 0
        self._nodes: tuple[str, ...] = ()
        self._round = -1
        self._between = False  # no ranks run: the test comes before a restart
        self._agreement = StopAgreement()
        self._until = 0.0  # the stage's time limit
        self._next_again = 0.0
        self._proposed_at = self._paused_at = 0.0
        self._paused_round = -1  # the round in which ranks may still pause though they should not
        self._tested_at = float("-inf")

    def begin(self, asked: PauseAndTest | TestSuspects) -> None:
        """Begin a test, or record why it is not possible."""
        run = self._run
        if isinstance(asked, TestSuspects):
            self._begin_between_rounds()
            return
        why = self._why_not(asked)
        if why:
            self._record_tested(asked, "not_possible", why)
            return
        self._asked, self._round, self._between = asked, run.round, False
        self._number += 1
        members = [member.node for member in run.members]
        spares = [node for node in run.usable if not run.is_member(node) and run.agents[node].ready]
        self._nodes = tuple(members + spares)
        self._enter(_Stage.STARTING, START_S)
        self._out.record("test_begun", round=run.round, reason=asked.reason, nodes=len(self._nodes),
                         **self._of(asked))  # fmt: skip
        self._out.act(StartTest(self._number, self._nodes, run.config.test_s))

    def _begin_between_rounds(self) -> None:
        """Test the nodes while no rank runs; with the result, or without one in time, the round goes on."""
        run = self._run
        if self._stage is not _Stage.IDLE:
            return
        self._nodes = tuple(node for node in run.usable if run.is_member(node) or run.agents[node].ready)
        if len(self._nodes) < LEAST_NODES or run.config.mode is not Mode.RECOVER:
            run.in_doubt.clear()  # of two nodes, neither is the measure
            return
        self._asked, self._round, self._between = PauseAndTest(_reason(run.in_doubt), replace=True), run.round, True
        self._number += 1
        self._enter(_Stage.STARTING, RESTART_START_S + SLACK_S)
        self._out.record("test_begun", round=run.round, reason=self._asked.reason, nodes=len(self._nodes))
        self._out.act(StartTest(self._number, self._nodes, run.config.test_s, RESTART_START_S))

    def _why_not(self, asked: PauseAndTest) -> str:
        run = self._run
        if self._stage is not _Stage.IDLE:
            return "another test is under way"
        if run.config.mode is not Mode.RECOVER:
            return f"--mode {run.config.mode} leaves the ranks alone"
        if run.phase is not Phase.RUNNING or run.stopping or not run.leads:
            return "the ranks do not train now"
        if not run.steps_reported:
            return "the script reports no steps, so its ranks cannot pause between two of them"
        if len(run.members) + len(run.usable) < 2:
            return "there is one node: a test needs two"
        if not asked.asked and run.now() < self._tested_at + EVERY_S:
            return f"the last test was less than {EVERY_S:.0f} s ago"
        return ""

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Go on with the test, or end it when the run has other things to do."""
        now = self._run.now()
        if self._stage is _Stage.IDLE:
            if self._paused_round >= 0 and now >= self._next_again:
                self._resume_again(now)
            return
        if interrupted := self._interrupted():
            self._end("interrupted", interrupted)
        elif now > self._until:
            self._end("failed", f"{self._stage.value} took too long")
        elif self._stage is _Stage.AGREEING and now >= self._next_again:
            self._propose()
        elif self._stage is _Stage.ARRIVING:
            self._await_ranks(now)

    def _interrupted(self) -> str:
        """Return why the test cannot go on, "" where it can."""
        run = self._run
        if run.stopping:
            return "the run stops"
        if run.phase is not (Phase.PREPARING if self._between else Phase.RUNNING) or run.round != self._round:
            return "the round ended"
        if not run.leads:
            return "no quorum stands with the controller"
        if self._stage in (_Stage.AGREEING, _Stage.ARRIVING):
            agents = [run.agents.get(member.node) for member in run.members]
            if any(agent is not None and (agent.finishing or agent.done is not None) for agent in agents):
                return "training ends"
        return ""

    def _await_ranks(self, now: float) -> None:
        """Begin the test itself when all ranks wait at the boundary."""
        run = self._run
        absent = [x.node for x in run.members if x.node not in run.agents or run.agents[x.node].section != PAUSED]
        if not absent:
            self._paused_at = now
            self._out.record("paused", round=run.round, step=self._agreement.target, reason=self._asked.reason,
                             waited_s=round(now - self._proposed_at, 3))  # fmt: skip
            self._run_test()
        elif now >= self._next_again:
            self._next_again = now + AGAIN_S
            for node in absent:
                self._confirm(node)

    def _run_test(self) -> None:
        self._enter(_Stage.TESTING, self._run.config.test_s)
        self._out.act(RunTest(self._number))

    # -- the probers' coordinator ------------------------------------------------------------------------------

    def ready(self, number: int) -> None:
        """Take note that all probers are ready, or as many as will be: now ranks pause."""
        run = self._run
        if number != self._number or self._stage is not _Stage.STARTING or self._interrupted():
            return
        if self._between:
            self._run_test()
            return
        self._proposed_at, run.pausing, self._paused_round = run.now(), True, run.round
        self._enter(_Stage.AGREEING, AGREE_S)
        self._agreement = StopAgreement()
        self._agreement.propose([member.node for member in run.members], run.max_step)
        self._propose()

    def tested(self, number: int, result: CheckResult | str) -> None:
        """Take the result, or why there is none."""
        if number != self._number or self._stage is _Stage.IDLE:
            return
        if isinstance(result, str):
            self._end("failed", result)
        elif self._stage is not _Stage.TESTING:
            self._end("failed", "the test ended before it began")
        else:
            self._act_on(result)

    def _act_on(self, result: CheckResult) -> None:
        run, asked = self._run, self._asked
        unfit = worth_replacing(result, [x.node for x in run.members], run.usable, run.config.shape)
        replaced = sorted(unfit) if asked.replace else []
        ratios = {one.node: max(one.compute_ratio or 0.0, one.collective_ratio or 0.0) for one in result.nodes}
        slowest = sorted(ratios.items(), key=lambda item: -item[1])
        told = {one.node: one.evidence for one in result.nodes if one.state in ("bad", "slow")}
        self._record_tested(
            asked, result.outcome, result.why, nodes=len(result.nodes), bad=list(result.bad), slow=list(result.slow),
            evidence=dict(list(told.items())[:MOST_TOLD]), rounds=result.rounds, seconds=result.seconds,
            replaced=replaced, slowest=dict(slowest[:MOST_TOLD]),
        )  # fmt: skip
        self._finish("")
        if replaced:
            run.flagged |= set(replaced)
            at_once = self._between or any(run.is_member(node) for node in replaced if node in result.bad)
            self._intend(PartWithUnfit(at_once))

    # -- ranks -------------------------------------------------------------------------------------------------

    def answer(self, message: m.StopAnswer) -> None:
        """Take a member's answer to the proposed step."""
        if self._stage is not _Stage.AGREEING:
            return
        outcome = self._agreement.answer(message.node, message.target, message.accepted, message.step, message.attached)
        if outcome == "repropose":
            self._propose()
        elif outcome == "plain":
            self._end("not_possible", "no rank reports steps any more")
        elif outcome:
            steps_s = ARRIVE_STEPS * max((agent.step_time for agent in self._run.agents.values()), default=0.0)
            self._enter(_Stage.ARRIVING, max(ARRIVE_S, steps_s))
            for member in self._run.members:
                self._confirm(member.node)

    def _propose(self) -> None:
        run = self._run
        self._next_again = run.now() + AGAIN_S
        for member in run.members:
            self._out.send(member.node, m.ProposeStop(run.epoch, run.round, self._agreement.target))

    def _confirm(self, node: str) -> None:
        run = self._run
        self._next_again = run.now() + AGAIN_S
        limit_s = max(0.0, self._until - run.now()) + run.config.test_s + SLACK_S
        self._out.send(node, m.PauseRanks(run.epoch, run.round, self._agreement.target, limit_s))

    def _resume_again(self, now: float) -> None:
        """Repeat the order to go on where a node's ranks still pause: the connection may have lost it."""
        run, self._next_again = self._run, now + AGAIN_S
        paused = [node for node, agent in run.agents.items() if agent.section == PAUSED]
        if run.round != self._paused_round or run.stopping or not paused:
            self._paused_round = -1
            return
        for node in paused:
            self._out.send(node, m.ResumeRanks(run.epoch, run.round))

    # -- the end -----------------------------------------------------------------------------------------------

    def _end(self, outcome: str, why: str) -> None:
        """End a test without a result."""
        self._record_tested(self._asked, outcome, why)
        self._finish(why)

    def _finish(self, why: str) -> None:
        """Let the probers end and the ranks go on."""
        run, now = self._run, self._run.now()
        self._out.act(EndTest(run.epoch, self._number, self._nodes))
        if self._stage in (_Stage.AGREEING, _Stage.ARRIVING, _Stage.TESTING):
            if (
                run.round == self._round and not run.stopping and not self._between
            ):  # an agreed stop moves them on by itself
                for member in run.members:
                    self._out.send(member.node, m.ResumeRanks(run.epoch, run.round))
            if self._stage is _Stage.TESTING and not self._between:
                self._out.record("pause_ended", round=self._round, step=self._agreement.target,
                                 seconds=round(now - self._paused_at, 3), why=why)  # fmt: skip
        run.pausing = False
        run.in_doubt.clear()
        self._stage, self._tested_at, self._next_again = _Stage.IDLE, now, now + AGAIN_S

    def _enter(self, stage: _Stage, limit_s: float) -> None:
        if self._between:  # probers, their test, and the start of the ranks have to come within the start timeout
            limit_s = min(limit_s, self._run.config.start_timeout_s / 3)
        self._stage, self._until = stage, self._run.now() + limit_s

    def _record_tested(self, asked: PauseAndTest, outcome: str, why: str, **fields: Any) -> None:
        self._out.record(
            "tested", round=self._run.round, reason=asked.reason, outcome=outcome, why=why, **fields, **self._of(asked)
        )

    @staticmethod
    def _of(asked: PauseAndTest) -> dict[str, str]:
        return {"asked": asked.asked} if asked.asked else {}


def _reason(suspects: set[str]) -> str:
    """Return why a restart waits for a test."""
    some = sorted(suspects)[:MOST_TOLD]
    return f"{', '.join(some)}{' and others' if len(suspects) > len(some) else ''} in doubt before ranks start"
