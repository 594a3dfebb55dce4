"""The controller's part for failures: from the first sign until all ranks have done a step again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from resilio_hpc.launch.consensus.state import HANDSHAKES_PER_S
from resilio_hpc.launch.controller.facts.intents import CorruptionFound, HangFound, Intend, TryRound
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.recovery import Recovery, fields_of, on_own_clock
from resilio_hpc.launch.controller.facts.repeated_failure import SURVIVED_S
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.controller.faults.cause_records import tell_cause
from resilio_hpc.launch.controller.faults.rank_restarts import RankRestarts, SaidFailure
from resilio_hpc.launch.controller.faults.suspects import doubt, doubt_hang, suspect
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.root_cause import LEFT_OUT

ABSENT_S = 0.5  # seconds that the other agents have, at least, to find a new controller
ABSENT_SHARE = 0.2  # of the heartbeat timeout: agents do not all notice the silence at the same moment
LATE_SHARE = 0.125  # of the heartbeat timeout: a controller that was paused for longer reads queued messages first
PREPARATION_KINDS = ("store_lost", "spawner_lost", "spawn")  # failures that can come before any rank runs


class Failures:
    """Opens and closes recoveries. At most one is open; failures until it closes belong to it."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self.alone = RankRestarts(run, out, intend, self._all_failed)
        self._left_out: set[str] = set()  # members whose ranks ended with 0 and never attached
        self._furthest = -1  # the furthest step of any round when it failed
        self._none_silent_before = self._looked = self._judges_from = run.now()

    def starting_ranks(self) -> None:
        """Keep the failure that ended the last round, to compare it with one in this round."""
        run = self._run
        self._left_out.clear()
        run.cause, run.trace = None, False
        if run.recovery is not None:
            run.broke_before = run.recovery.repeatable()
            run.cause, run.trace = run.recovery.cause(), run.recovery.traces()
            tell_cause(run, self._out, run.recovery, run.cause)
            run.recovery.round_told()

    def reached(self, step: int) -> None:
        """Take note that a node's ranks had completed ``step`` when they were stopped."""
        recovery = self._run.recovery
        if recovery is not None:
            recovery.at_step = max(recovery.at_step, step)

    # -- signs of failure --------------------------------------------------------------------------------------

    def find_lost_nodes(self) -> None:
        """Declare nodes lost that were silent for too long. Several that went together are one recovery."""
        run = self._run
        now = run.now()
        late_s = LATE_SHARE * run.config.heartbeat_timeout_s
        if now - self._looked > late_s:
            self._judges_from = now + late_s
        self._looked = now
        if now < self._judges_from or not run.leads:
            return  # perhaps this node itself is cut off
        heard = self._silent_nodes(now) | self._absent_members(now)
        if not heard:
            return
        for node, last in heard.items():
            run.agents.pop(node, None)
            if node not in run.lost:
                run.losses[node] = run.losses.get(node, 0) + 1
                self._out.record("node_lost", node=node, silent_s=round(now - last, 3))
            run.lost.add(node)
        run.voters_changed = True
        self.nodes_gone(list(heard), run.unix() - (now - min(heard.values())))

    def _silent_nodes(self, now: float) -> dict[str, float]:
        """Return the agents that were silent for too long, each with when it was last heard."""
        if now < self._none_silent_before:
            return {}
        timeout = self._run.config.heartbeat_timeout_s
        heard = {node: agent.last_contact(timeout) for node, agent in self._run.agents.items()}
        silent = {node: last for node, last in heard.items() if last < now - timeout}
        others = (last for node, last in heard.items() if node not in silent)
        self._none_silent_before = min(others, default=now) + timeout
        return silent

    def _absent_members(self, now: float) -> dict[str, float]:
        """Return members of an earlier epoch that have not come to this one, after the end of their leases."""
        run = self._run
        timeout = run.config.heartbeat_timeout_s
        within = max(ABSENT_S, ABSENT_SHARE * timeout) + len(run.members) / HANDSHAKES_PER_S
        over = max(run.began + within, run.former_leases_end)
        if run.phase is not Phase.GATHERING or now < over:
            return {}
        last, known = run.began - run.former_silent_s, run.accounted
        return {x.node: last for x in run.members if x.node not in known}

    def nodes_gone(self, nodes: Sequence[str], since: float) -> None:
        """Handle nodes that are lost or have left; ``since`` in Unix seconds."""
        run = self._run
        members = [node for node in nodes if run.is_member(node)]
        if not members:
            return
        if run.with_ranks:
            self._open(since).lose(members, since)
            self._restart(counts=True)
        else:
            if run.recovery is not None:
                run.recovery.lose(members, since)
            if run.phase is Phase.PREPARING:  # no rank was started, so this is no restart
                self._restart(counts=False)

    def agent_restarted(self, node: str, heard: float) -> None:
        """Handle a member's new agent process: the ranks of the old one ended with it.

        ``heard``: when the old one was last heard, monotonic seconds.
        """
        run = self._run
        self._open(run.unix() - (run.now() - heard)).restarted_agents.append(node)
        self._restart(counts=True)

    def note_restarted(self, node: str, heard: float) -> None:
        """Take note that a member's agent is back whose loss was being handled, known from other ranks' errors only."""
        run, recovery = self._run, self._run.recovery
        if recovery is not None and node not in recovery.restarted_agents:
            recovery.restarted_agents.append(node)
            recovery.began = min(recovery.began, run.unix() - (run.now() - heard))

    def controller_changed(self, silent_s: float) -> None:
        """Handle the loss of the former controller, which was silent for ``silent_s``."""
        run = self._run
        self._open(run.unix() - silent_s).new_controller = True
        run.restarts += 1  # the ranks are restarted next
        run.without_progress += 1

    def rank_failed(self, message: m.RankFailed) -> None:
        """Handle a rank that failed, or could not be started."""
        if self.alone.take(message):
            return
        run, failure, recovery = self._run, message.failure, self._run.recovery
        if recovery is not None and recovery.knows(failure):
            return  # repeated after a broken connection
        if (agent := run.agents.get(failure.node)) is not None:
            failure = on_own_clock(failure, agent.clock, run.clock)
        before_ranks = run.phase is Phase.PREPARING and failure.kind in PREPARATION_KINDS
        ends_round = message.round == run.round and (run.with_ranks or before_ranks)
        counts = ends_round or recovery is not None or message.round > run.round
        # else a planned change stops the round: ranks of one node end a moment before their peers, which report errors
        self._out.record("rank_failed" if counts else "stopped_rank_failed", round=message.round, **fields_of(failure))
        if failure.bad_copy is not None:
            run.learn(bad_copies=[failure.bad_copy])
        if message.round > run.round:
            return
        if ends_round:
            doubt(run, failure)
            self._open(failure.time).take(failure, message.failure)
            suspect(run, failure)
            self._restart(counts=True)
        elif recovery is not None:  # the message was on its way at the time of the decision
            recovery.began = min(recovery.began, failure.time)
            recovery.take(failure, message.failure)
            if suspect(run, failure):
                self._restart(counts=False)

    def _all_failed(self, failed: Sequence[SaidFailure]) -> None:
        """Restart all ranks: each of them has failed, and their failures are recorded and counted.

        ``failed``: each with its time on the controller's clock, and as its agent said it.
        """
        recovery = self._open(min(failure.time for failure, _ in failed))
        for failure, said in failed:
            recovery.take(failure, said)
        self._run.restarts += 1
        self._restart(counts=False)

    def member_done(self, message: m.RanksDone) -> None:
        """Take note that all ranks of a member ended with 0 as plain programs do; a failure where other ranks train."""
        if not message.attached and not message.stopped:
            self._left_out.add(message.node)
        self.find_left_out()

    def find_left_out(self) -> None:
        """Find a member whose ranks ended with 0 and never reported a step, while other ranks train.

        Without its ranks, no step would ever be whole again.
        """
        run = self._run
        if not self._left_out or not run.with_ranks or run.max_step < 0:
            return
        others = (member.node for member in run.members if member.node not in self._left_out)
        if all(node in run.agents and run.agents[node].finishing for node in others):
            return  # they have done their last step: one rank may have reported the steps of all
        for member in run.members:
            if member.node in self._left_out:
                failure = m.RankFailure(member.node, member.first_rank, 0, "early_exit", run.unix(), 0, None, LEFT_OUT)
                self.rank_failed(m.RankFailed(member.node, run.epoch, run.round, failure))
                return

    def slow_start(self) -> None:
        """Handle a round whose ranks do not start in time."""
        self._open(self._run.unix())
        self._restart(counts=True)

    def ranks_blamed(self, hang: HangFound | CorruptionFound) -> None:
        """Handle ranks that hang, or have other values; the first to blame counts as the one that failed."""
        run, kind = self._run, hang.kind if isinstance(hang, HangFound) else "corruption"
        code = 0 if kind == "early_exit" else None
        doubt_hang(run, hang.ranks, hang.certain)
        at = [(member, rank) for rank in hang.ranks for member in run.members if rank in member.ranks]
        if at:
            member, rank = at[0]
            file, _, line = hang.place.rpartition(":") if isinstance(hang, HangFound) else ("", "", "")
            place = f'  File "{file}", line {line}' if line else ""
            failure = m.RankFailure(
                member.node, rank, rank - member.first_rank, kind, hang.since, code, None, hang.evidence, place
            )
            self.rank_failed(m.RankFailed(member.node, run.epoch, run.round, failure))
        else:
            self._open(hang.since).hung = True
            self._restart(counts=True)

    def node_unfit(self, node: str) -> None:
        """Plan again without a member whose ranks cannot start."""
        if self._run.is_member(node) and self._run.phase is not Phase.GATHERING:
            self._restart(counts=False)

    def forgive(self) -> None:
        """Forget old restarts where no step is ever durable: there, time without a failure counts as progress."""
        run = self._run
        if not run.without_progress or run.committed >= 0:
            return
        quiet_s = run.now() - max(run.phase_began, run.restarted_at)
        if quiet_s < run.config.forgiven_after_s:
            return
        if not run.steps_reported or run.max_step > self._furthest:
            self._out.record("forgiven", restarts=run.without_progress, quiet_s=round(quiet_s))
            run.without_progress = 0

    # -- open and close ----------------------------------------------------------------------------------------

    def _open(self, began: float) -> Recovery:
        """Return the open recovery, opened at ``began`` or before."""
        run, recovery = self._run, self._run.recovery
        now = run.unix()
        began = min(began, now)  # another node's clock may be ahead of ours
        ran_s = 0.0
        # that recovery had not closed: this is the next failure
        if recovery is not None and recovery.runs_since is not None:
            ran_s = run.now() - recovery.runs_since
            recovery = None
        elif recovery is None and not run.steps_reported:
            ran_s = run.now() - run.phase_began
        step = run.max_step if run.with_ranks else -1
        if recovery is None:
            survived = run.phase is Phase.RUNNING and ran_s >= SURVIVED_S
            recovery = run.recovery = Recovery(began, now, run.now(), step, survived)
        recovery.addresses |= {member.address: member.node for member in run.members}
        recovery.began = min(recovery.began, began)
        recovery.at_step = max(recovery.at_step, step)
        self._furthest = max(self._furthest, recovery.at_step)
        return recovery

    def _restart(self, counts: bool) -> None:
        run = self._run
        run.enter(Phase.GATHERING)
        if counts:
            run.restarts += 1
            run.without_progress += 1
        self._intend(TryRound())

    def tick(self) -> None:
        """Close the recovery when ranks that report no steps have run for long enough."""
        self.alone.tick()
        run, recovery = self._run, self._run.recovery
        if recovery is None or recovery.runs_since is None or run.phase is not Phase.RUNNING:
            return
        if run.attached:  # the first step will tell
            return
        if run.now() - recovery.runs_since >= SURVIVED_S:
            self.close(run.unix(), -1)

    def close(self, recovered_at: float, restored: int) -> None:
        """Close the recovery: all ranks train again (or have ended), from step ``restored``, -1 for a fresh start."""
        run, recovery = self._run, self._run.recovery
        run.recovery = None
        if recovery is None:
            return
        when_known, first = run.steps_reported, recovery.first_failure
        kind, node = recovery.kind()
        self._out.record(
            "recovered", kind=kind, node=node, round=run.round,
            detection_s=round(recovery.decided - recovery.began, 4),
            recovery_s=round(recovered_at - recovery.began, 4) if when_known else None, at=recovered_at,
            lost_steps=max(0, recovery.at_step - max(restored, 0)) if recovery.at_step >= 0 else None,
            plan=recovery.plan.rung.value if recovery.plan else "", restored=restored,
            rank=first.rank if first else None,
        )  # fmt: skip
