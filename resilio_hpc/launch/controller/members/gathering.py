"""The controller's part between rounds: the rung of the recovery ladder, and the members of the next round. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import assert_never

from resilio_hpc.events.rungs import Rung
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.intents import EndRun, EndStopped, Intend, PrepareRound
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.recovery_policy import Budgets, Failure, RecoveryPlan, World, decide
from resilio_hpc.launch.controller.facts.rendezvous import AvailableNode, choose, places_on_disk, whole_first
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import MAX_LOSSES, Phase
from resilio_hpc.launch.protocol.messages import Member

WAITING_SAID_AFTER_S = 10.0
MOST_NAMED = 4  # nodes in the reason of a verdict
PAST_PATIENCE_S = 2.0  # seconds that the run directory has to tell what agents know as well
DISKS_S = 2.0  # seconds that the first round of a job waits for agents to tell what their disks hold
MOST_PLACED = 16  # nodes that an event names
RETURN_S = 20.0  # seconds that a node that was just lost has to come back before the run gives up for lack of nodes


class Gathering:
    """Leads from ``gathering`` to ``preparing``, or to the end of the run."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._join_until = run.now() + run.config.join_timeout_s
        self._waiting_said = False
        self._disks_until: float | None = None
        self._order = {node: order for order, node in enumerate(run.config.expected)}

    def adopt(self) -> None:
        """Wait a while for the nodes of an earlier controller, before the world shrinks."""
        self._join_until = self._run.now() + self._run.config.heartbeat_timeout_s

    def came(self) -> None:
        """Try for a round after an agent has come."""
        if not self._more_must_come():
            self.try_round()

    def inform(self, committed: Sequence[int], last_round: int) -> None:
        """Take what the run directory tells of earlier rounds."""
        run = self._run
        run.learn(committed)
        if run.phase is Phase.GATHERING:
            run.round = max(run.round, last_round)
        if not run.informed:
            run.informed = run.may_prepare = True
            self._out.record("informed", committed=sorted(committed), last_round=last_round)

    def go_on_uninformed(self, adopted: bool) -> None:
        """Go on without the run directory, which hangs after a change of controller: agents know nearly all of it."""
        run = self._run
        if adopted and not run.may_prepare and run.now() - run.began > PAST_PATIENCE_S:
            run.may_prepare = True
            self._out.record("uninformed", committed=sorted(run.committed_steps))

    def try_round(self) -> None:
        """Prepare the next round if the nodes that it needs are in; otherwise carry out what else is decided."""
        run = self._run
        if run.phase is not Phase.GATHERING:
            return
        if run.stopping:
            self._intend(EndStopped())
            return
        if not run.may_prepare or not run.leads:
            return
        usable = run.usable
        coming = self._coming()
        shape = run.config.shape
        if run.members:
            if not self._carry_out(self._plan(len(usable), coming)):
                return
            coming = 0  # the plan has counted them already
        elif coming == 0 and not shape.trim(len(usable)):
            reason = f"{len(usable)} usable node(s) joined within --join-timeout, {shape.minimum} needed{self._unfit()}"
            self._intend(EndRun("not_enough_nodes", 1, reason))
            return
        if coming:
            self._say_waiting(len(usable))
        if shape.trim(len(usable)) < max(1, shape.trim(len(usable) + coming)):
            return  # ``choose`` would find the same, but slowly
        candidates = whole_first([self._candidate(node) for node in usable], shape)
        if self._waits_for_disks(candidates):
            return
        before = [member.node for member in run.members]
        disks = {node: run.disk_of(node) or () for node in usable}
        on_disk = places_on_disk(candidates, disks, run.committed, shape.trim(len(candidates)))
        members = choose(candidates, before, shape, coming, on_disk)
        if members:
            self._tell_places(members, on_disk)
            self._intend(PrepareRound(tuple(members)))

    def _waits_for_disks(self, candidates: Sequence[AvailableNode]) -> bool:
        """Return whether to wait a moment for what the nodes' disks hold: it decides on the places of a job's nodes."""
        run = self._run
        if run.members or not run.config.local_disks or run.committed < 0:
            return False
        if all(run.disk_of(one.node) is not None for one in candidates):
            return False
        if self._disks_until is None:
            self._disks_until = run.now() + DISKS_S
        return run.now() < self._disks_until

    def _tell_places(self, members: Sequence[Member], on_disk: dict[str, int]) -> None:
        """Record which nodes come to the ranks whose state their own disks have."""
        run = self._run
        former = {member.node: member.node_rank for member in run.members}
        placed = {x.node: x.node_rank for x in members if on_disk.get(x.node) == x.node_rank != former.get(x.node)}
        if placed:
            named = dict(list(placed.items())[:MOST_PLACED])
            self._out.record("placed", round=run.round + 1, step=run.committed, places=named, count=len(placed))

    # -- nodes -------------------------------------------------------------------------------------------------

    def _more_must_come(self) -> bool:
        """Return whether a count shows that a round is not possible yet. ``tick`` finds what the count overlooks."""
        run = self._run
        known = len(run.agents) + len(run.lost) + len(run.left)
        return known < len(run.members or run.config.expected) and run.now() < self._join_until

    def _absent(self) -> list[str]:
        gone = self._run.accounted
        return [node for node in self._run.config.expected if node not in gone]

    def _coming(self) -> int:
        """Count nodes that may still come: members whose agent restarts, and others while the join window is open."""
        run, absent = self._run, self._absent()
        if run.now() >= self._join_until:
            absent = [node for node in absent if run.recovery is not None and run.is_member(node)]
        return len(absent)

    def _say_waiting(self, usable: int) -> None:
        """Record once, after a while, which nodes have not come, so that the user sees what the run waits for."""
        run = self._run
        if self._waiting_said or run.now() - run.began < WAITING_SAID_AFTER_S:
            return
        self._waiting_said = True
        until = round(max(0.0, self._join_until - run.now()))
        want = run.config.shape.minimum
        self._out.record("waiting", have=usable, want=want, absent=self._absent(), up_to_s=until)

    def _unfit(self) -> str:
        """Return which nodes take no part since ranks cannot run there, and why."""
        return "".join(f"; {node}: {why}" for node, why in sorted(self._run.unfit.items())[:MOST_NAMED])

    def _candidate(self, node: str) -> AvailableNode:
        hello = self._run.agents[node].hello
        order = self._order.get(node, len(self._order))
        return AvailableNode(
            node, order, hello.address, hello.local_world_size, hello.topology, hello.evicted,
            node in self._run.suspects,
        )  # fmt: skip

    # -- the recovery ladder -----------------------------------------------------------------------------------

    def _plan(self, usable: int, coming: int) -> RecoveryPlan:
        run = self._run
        gone, recovery = run.accounted, run.recovery
        first = recovery.last_failure() if recovery is not None and recovery.moves else None
        sound = sum(node not in run.suspects for node in run.usable)
        returning = sum(member.node not in gone for member in run.members)
        return decide(
            Failure(
                tuple(recovery.lost_nodes) if recovery is not None else (),
                first.node if first is not None else "",
                recovery.moves if recovery is not None else "",
            ),
            World(len(run.members), usable, coming, run.config.shape, returning, self._just_lost(), sound),
            Budgets(run.without_progress, run.config.max_without_progress, run.config.chained),
        )

    def _just_lost(self) -> int:
        run, recovery = self._run, self._run.recovery
        if recovery is None or run.now() - recovery.opened > RETURN_S:
            return 0
        return sum(x in run.lost and run.losses.get(x, 0) <= MAX_LOSSES for x in recovery.lost_nodes)

    def _carry_out(self, plan: RecoveryPlan) -> bool:
        """Act on a plan. Return True when a round is to be prepared."""
        self._note(plan)
        if self._run.config.mode != Mode.RECOVER and plan.rung is not Rung.WAIT:
            self._end_unrecovered(plan)
            return False
        match plan.rung:
            case Rung.RESTART_RANK:
                raise AssertionError("a rank that starts again alone needs no round")
            case Rung.RESTART | Rung.REPLACE | Rung.SHRINK:
                return True
            case Rung.WAIT:
                return False
            case Rung.NEXT_JOB:
                self._intend(EndRun("needs_new_job", 75, f"{plan.reason}{self._unfit()}"))
            case Rung.STOP:
                self._give_up(plan)
            case _:
                assert_never(plan.rung)
        return False

    def _note(self, plan: RecoveryPlan) -> None:
        """Record the decision about the open recovery."""
        run, recovery = self._run, self._run.recovery
        if recovery is not None and plan != recovery.plan:
            recovery.plan = plan
            self._out.record(
                "decision", rung=plan.rung.value, reason=plan.reason, round=run.round,
                without_progress=run.without_progress, acted=run.config.mode == Mode.RECOVER,
            )  # fmt: skip

    def _give_up(self, plan: RecoveryPlan) -> None:
        """End the run, since no restart helps, once its first failure is known."""
        run, recovery = self._run, self._run.recovery
        if self._awaits_cause():
            return
        spent = run.without_progress > run.config.max_without_progress
        first = recovery.first_failure if recovery is not None else None
        self._intend(EndRun("no_progress" if spent else "not_enough_nodes", 1, f"{plan.reason}{self._unfit()}", first))

    def _awaits_cause(self) -> bool:
        run, recovery = self._run, self._run.recovery
        return recovery is not None and recovery.awaits_cause(run.now())

    def _end_unrecovered(self, plan: RecoveryPlan) -> None:
        """End the run for its failure, as --mode observe and checkpoint do, once its first failure is known.

        The ledger has what recover would do.
        """
        run = self._run
        if self._awaits_cause():
            return
        first = run.recovery.first_failure if run.recovery is not None else None
        code = first.exit_code if first is not None and first.exit_code else 1
        mode = run.config.mode
        would = f"--mode recover would {plan.rung.words} ({plan.reason})"
        self._intend(EndRun("failed", code, f"with --mode {mode} a failure ends the run; {would}", first))
