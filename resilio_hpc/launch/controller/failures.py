"""The controller's part for failures: from the first sign to the first step of all ranks after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilio_hpc.launch.config.options import Mode
from resilio_hpc.launch.consensus.state import HANDSHAKES_PER_S
from resilio_hpc.launch.controller.recovery_policy import Plan
from resilio_hpc.launch.controller.repeated_failure import SURVIVED_S, Repeatable, repeatable
from resilio_hpc.launch.controller.state import WITH_RANKS, Phase
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.root_cause import LEFT_OUT, may_be_consequence, origin

if TYPE_CHECKING:
    from resilio_hpc.launch.controller.controller import Controller

ABSENT_S = 0.5  # how long the agents that are left may take to find a new controller, at least
ABSENT_SHARE = 0.2  # of the heartbeat timeout: they do not all find it silent at the same moment
LATE_SHARE = 0.125  # of it: whoever looked away for longer was stopped or starved, and hears what waited first
CAUSE_S = 1.0  # a rank that failed first may take so long to end; its peers hear of it before we do
KINDS = {"signal": "rank_killed", "exit": "rank_exception"}
PREPARATION_KINDS = ("store_lost", "spawner_lost", "spawn")  # failures that can come before any rank runs


@dataclass
class Incident:
    """``began``: Unix seconds of the first sign, for a silent node when it was last heard; ``decided``: when known."""

    began: float
    decided: float
    opened: float  # as ``decided``, monotonic
    at_step: int  # the most steps that any rank had completed, -1 when unknown
    survived: bool = False  # ranks that tell of no steps had run for SURVIVED_S
    failures: list[m.RankFailure] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    restarted_agents: list[str] = field(default_factory=list)
    new_controller: bool = False
    plan: Plan | None = None
    runs_since: float | None = None  # ranks that tell of no steps run since then, monotonic: is it over?

    def kind(self) -> tuple[str, str]:
        """What broke, and on which node ("" when it was none)."""
        first = origin(self.failures)
        if self.lost_nodes:
            return "node_lost", self.lost_nodes[0]
        if self.restarted_agents:
            return "agent_lost", self.restarted_agents[0]
        if self.new_controller:
            return "controller_lost", ""
        return ("slow_start", "") if first is None else (KINDS.get(first.kind, first.kind), first.node)


class Incidents:
    """At most one incident is open; what happens until it closes belongs to it."""

    def __init__(self, controller: Controller) -> None:
        self.current: Incident | None = None
        self._controller = controller
        self._left_out: set[str] = set()  # members whose ranks ended with 0 and never attached
        self._before: Repeatable | None = None  # what broke the round before
        self._furthest = -1  # the step that any round had reached when it failed
        self._none_silent_before = self._looked = self._judges_from = controller.now()

    def first_failure(self) -> m.RankFailure | None:
        """The rank failure to blame for the open incident."""
        return origin(self.current.failures) if self.current else None

    # -- failures that come again ------------------------------------------------------------------------------

    def adopt(self, before: str) -> None:
        """An earlier controller knew what broke the round before."""
        self._before = Repeatable.from_text(before)

    def _repeatable(self) -> Repeatable | None:
        """What the open incident is, as far as it is ranks' own doing."""
        incident, first = self.current, self.first_failure()
        if incident is None or first is None:
            return None
        if incident.lost_nodes or incident.restarted_agents or incident.new_controller:
            return None
        return repeatable(first, incident.at_step, incident.survived)

    def ends_the_run(self) -> bool:
        """Whether this is what broke the round before, and the program's own mistake: then a restart does not help.

        To be asked when the ranks have stopped: by then all that they had to say is known."""
        now, first = self._repeatable(), self.first_failure()
        if now is None or first is None or self._before is None or not now.is_again(self._before):
            return False
        what = (first.message.strip().splitlines() or [""])[0]
        reason = f"the same failure again, so that another restart does not help: {what}"
        self._controller.ending.finish("no_progress", 1, reason, first)
        return True

    def awaits_cause(self) -> bool:
        """Whether all that is known may be the echo of another rank's end, which may be told in a moment."""
        incident, first = self.current, self.first_failure()
        if incident is None or first is None or incident.lost_nodes or incident.restarted_agents:
            return False
        return may_be_consequence(first) and self._controller.now() - incident.opened < CAUSE_S

    @property
    def broken_by(self) -> str:
        """What broke the round before, as text for the next controller; "": nothing that may come again."""
        return self._before.to_text() if self._before is not None else ""

    def restarts(self) -> None:
        """The ranks start again: what broke their last round is kept, to be compared when this one breaks."""
        self._left_out.clear()
        if self.current is not None:
            self._before = self._repeatable()

    def planned(self, plan: Plan) -> None:
        """What is done about the open incident."""
        controller = self._controller
        if self.current is not None and plan != self.current.plan:
            self.current.plan = plan
            controller.record(
                "decision", rung=plan.rung.value, reason=plan.reason, round=controller.round,
                without_progress=controller.without_progress, acted=controller.config.mode == Mode.RECOVER,
            )  # fmt: skip

    def reached(self, step: int) -> None:
        """A node's ranks had completed ``step`` when they were stopped."""
        if self.current is not None:
            self.current.at_step = max(self.current.at_step, step)

    # -- signs of failure --------------------------------------------------------------------------------------

    def find_lost_nodes(self) -> None:
        """Nodes that were silent for too long are lost for good; several that went together are one incident."""
        controller = self._controller
        now = controller.now()
        late_s = LATE_SHARE * controller.config.heartbeat_timeout_s
        if now - self._looked > late_s:
            self._judges_from = now + late_s
        self._looked = now
        if now < self._judges_from or not controller.enrolment.leads:
            return  # it may be we who are cut off
        heard = self._silent_nodes(now) | self._absent_members(now)
        if not heard:
            return
        for node, last in heard.items():
            controller.agents.pop(node, None)
            if node not in controller.lost:
                controller.losses[node] = controller.losses.get(node, 0) + 1
                controller.record("node_lost", node=node, silent_s=round(now - last, 3))
            controller.lost.add(node)
        controller.enrolment.changed = True
        self.nodes_gone(list(heard), controller.unix() - (now - min(heard.values())))

    def _silent_nodes(self, now: float) -> dict[str, float]:
        """Agents that were silent for too long, and when they were last heard."""
        if now < self._none_silent_before:
            return {}
        timeout = self._controller.config.heartbeat_timeout_s
        heard = {node: agent.last_contact(timeout) for node, agent in self._controller.agents.items()}
        silent = {node: last for node, last in heard.items() if last < now - timeout}
        others = (last for node, last in heard.items() if node not in silent)
        self._none_silent_before = min(others, default=now) + timeout
        return silent

    @property
    def former_leases_end(self) -> float:
        """From then on no rank runs on what an earlier controller leased, whoever holds it."""
        controller = self._controller
        timeout = controller.config.heartbeat_timeout_s
        return controller.began + timeout - min(controller.term.silent_s, timeout)

    def absent_may_train(self) -> bool:
        """Whether a voter that has not come to this epoch may have ranks by a start that nobody here has heard of."""
        controller = self._controller
        voters = controller.term.membership
        if voters.epoch == 0 or controller.now() >= self.former_leases_end:
            return False  # nobody ever led, or it is long ago
        return bool(voters.nodes - controller.agents.keys() - controller.left)

    def _absent_members(self, now: float) -> dict[str, float]:
        """Members of an earlier epoch that did not come to us, once the leases that they may hold are over."""
        controller = self._controller
        timeout = controller.config.heartbeat_timeout_s
        silent = min(controller.term.silent_s, timeout)
        within = max(ABSENT_S, ABSENT_SHARE * timeout) + len(controller.members) / HANDSHAKES_PER_S
        over = max(controller.began + within, self.former_leases_end)
        if controller.phase is not Phase.GATHERING or now < over:
            return {}
        known = controller.agents.keys() | controller.lost | controller.left
        return {x.node: controller.began - silent for x in controller.members if x.node not in known}

    def nodes_gone(self, nodes: Sequence[str], since: float) -> None:
        """Nodes are lost or left; ``since`` in Unix seconds."""
        controller = self._controller
        members = [node for node in nodes if controller.is_member(node)]
        if not members:
            return
        if controller.phase in WITH_RANKS:
            self._open(since).lost_nodes += members
            self._restart(counts=True)
        else:
            if self.current is not None:
                self.current.lost_nodes += members
            if controller.phase is Phase.PREPARING:  # no rank was started: not a restart
                self._restart(counts=False)

    def agent_restarted(self, node: str, heard: float) -> None:
        """A member's agent is a new process: the ranks of the old one went with it. ``heard``: monotonic seconds."""
        controller = self._controller
        self._open(controller.unix() - (controller.now() - heard)).restarted_agents.append(node)
        self._restart(counts=True)

    def note_restarted(self, node: str, heard: float) -> None:
        """A member's agent came back while its loss, known by its echoes only, was being dealt with."""
        if self.current is not None and node not in self.current.restarted_agents:
            self.current.restarted_agents.append(node)
            self.current.began = min(self.current.began, self._controller.unix() - (self._controller.now() - heard))

    def controller_changed(self, silent_s: float) -> None:
        """We are the controller now, the former one was silent for so long."""
        controller = self._controller
        self._open(controller.unix() - silent_s).new_controller = True
        controller.restarts += 1  # what follows is a restart of the ranks
        controller.without_progress += 1

    def rank_failed(self, message: m.RankFailed) -> None:
        """A rank ended wrongly, or could not be started."""
        controller = self._controller
        failure = message.failure
        if self.current is not None and failure in self.current.failures:
            return  # said again after a broken connection
        fields = {name: getattr(failure, name) for name in failure.__struct_fields__ if name != "bad_copy"}
        controller.record("rank_failed", round=message.round, **fields)
        if failure.bad_copy is not None:
            controller.checkpoints.learn(bad_copies=[failure.bad_copy])
        if message.round > controller.round:
            return
        breaks = message.round == controller.round and (
            controller.phase in WITH_RANKS
            or (controller.phase is Phase.PREPARING and failure.kind in PREPARATION_KINDS)
        )
        if breaks:
            self._open(failure.time).failures.append(failure)
            self._restart(counts=True)
        elif self.current is not None:  # it was on its way when we decided
            self.current.began = min(self.current.began, failure.time)
            self.current.failures.append(failure)

    def member_done(self, message: m.RanksDone) -> None:
        """A member's ranks have ended as plain programs do. That is wrong where others train."""
        if not message.attached and not message.stopped:
            self._left_out.add(message.node)
        self.find_left_out()

    def find_left_out(self) -> None:
        """A member whose ranks ended with 0 and never told of a step, while others train: no step would ever be whole
        again."""
        controller = self._controller
        if not self._left_out or controller.phase not in WITH_RANKS or controller.max_step < 0:
            return
        for member in controller.members:
            if member.node not in self._left_out:
                continue
            failure = m.RankFailure(
                member.node, member.first_rank, 0, "early_exit", controller.unix(), 0, None, LEFT_OUT
            )
            self.rank_failed(m.RankFailed(member.node, controller.epoch, controller.round, failure))
            return

    def slow_start(self) -> None:
        """The round does not come up."""
        self._open(self._controller.unix())
        self._restart(counts=True)

    def forgive(self) -> None:
        """Where no step is ever durable, restarts long ago do not count: time without a failure is progress then."""
        controller = self._controller
        if not controller.without_progress or controller.checkpoints.committed >= 0:
            return
        quiet_s = controller.now() - controller.phase_began
        if quiet_s < controller.config.forgiven_after_s:
            return
        further = not controller.rounds.steps_reported or controller.max_step > self._furthest
        if further:
            controller.record("forgiven", restarts=controller.without_progress, quiet_s=round(quiet_s))
            controller.without_progress = 0

    # -- open and close ----------------------------------------------------------------------------------------

    def _open(self, began: float) -> Incident:
        """The open incident, which began at ``began`` or before."""
        now = self._controller.unix()
        began = min(began, now)  # another node's clock may be ahead of ours
        ran_s = 0.0
        if self.current is not None and self.current.runs_since is not None:  # that one is not over: this is the next
            ran_s = self._controller.now() - self.current.runs_since
            self.current = None
        elif self.current is None and not self._controller.rounds.steps_reported:
            ran_s = self._controller.now() - self._controller.phase_began
        step = self._controller.max_step if self._controller.phase in WITH_RANKS else -1
        if self.current is None:
            survived = self._controller.phase is Phase.RUNNING and ran_s >= SURVIVED_S
            self.current = Incident(began, now, self._controller.now(), step, survived)
        self.current.began = min(self.current.began, began)
        self.current.at_step = max(self.current.at_step, step)
        self._furthest = max(self._furthest, self.current.at_step)
        return self.current

    def _restart(self, counts: bool) -> None:
        controller = self._controller
        controller.set_phase(Phase.GATHERING)
        if counts:
            controller.restarts += 1
            controller.without_progress += 1
        controller.rounds.try_round()

    def runs_again(self) -> None:
        """Ranks that tell of no steps have started; whether they train will show."""
        if self.current is not None:
            self.current.runs_since = self._controller.now()

    def tick(self) -> None:
        """Ranks that tell of no steps, and have run for a while, have survived what happened."""
        incident, controller = self.current, self._controller
        if incident is None or incident.runs_since is None or controller.phase is not Phase.RUNNING:
            return
        if controller.rounds.attached:  # then the first step tells
            return
        if controller.now() - incident.runs_since >= SURVIVED_S:
            self.close(controller.unix(), -1)

    def close(self, recovered_at: float, restored: int) -> None:
        """All ranks train again (or have ended), from the state of step ``restored``, -1 for a fresh start."""
        incident, self.current = self.current, None
        if incident is None:
            return
        when_known = self._controller.rounds.steps_reported
        controller = self._controller
        first = origin(incident.failures)
        kind, node = incident.kind()
        controller.record(
            "recovered", kind=kind, node=node, round=controller.round,
            detection_s=round(incident.decided - incident.began, 4),
            recovery_s=round(recovered_at - incident.began, 4) if when_known else None, at=recovered_at,
            lost_steps=max(0, incident.at_step - max(restored, 0)) if incident.at_step >= 0 else None,
            plan=incident.plan.rung.value if incident.plan else "", restored=restored,
            rank=first.rank if first else None,
        )  # fmt: skip
