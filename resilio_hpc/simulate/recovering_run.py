"""A run under resilio-launch. The product's own code decides; only what it costs in time is from the constants. Pure.

Real are: the recovery ladder (``recovery_policy``), the class of a fault and what follows from it (``Recovery``,
``suspects``, fault_actions.toml), which nodes take part (``rendezvous``), who copies whose snapshots and what can be
restored (``replica_placement``), the count of restarts (``RunState``), and whether the next job goes on
(``continuation_policy``). Without messages, and without the state of single ranks, so 12,500 nodes take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import assert_never

from resilio_hpc.events.rungs import Rung
from resilio_hpc.launch.chain.continuation_policy import PredecessorEvidence, judge
from resilio_hpc.launch.controller.facts.recovery import Recovery
from resilio_hpc.launch.controller.facts.recovery_policy import Budgets, Failure, RecoveryPlan, World, decide
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import MAX_LOSSES, Clock, ControllerConfig
from resilio_hpc.launch.controller.faults.suspects import suspect
from resilio_hpc.launch.controller.members.gathering import RETURN_S
from resilio_hpc.launch.protocol.membership import Membership
from resilio_hpc.launch.protocol.vote import Term
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.simulate.constants import Constants
from resilio_hpc.simulate.fault_trace import SimulatedFault
from resilio_hpc.simulate.fleets import FaultKind
from resilio_hpc.simulate.node_places import NodePlaces, name_of
from resilio_hpc.simulate.rank_failures import rank_failure
from resilio_hpc.simulate.save_times import SaveTimes
from resilio_hpc.simulate.state_places import StatePlaces
from resilio_hpc.simulate.virtual_run import SimulatedSetup, VirtualRun


def resilio_saves(setup: SimulatedSetup, constants: Constants) -> SaveTimes:
    """Return how long the product's saves take."""
    node_gb = constants["gb_per_gpu"] * setup.gpus_per_node
    return SaveTimes(
        max(1, round(setup.save_every_s * 1e6)),
        round(constants["gb_per_gpu"] * constants["snapshot_s_per_gb"] * 1e6),
        round(node_gb * constants["fetch_s_per_gb"] * 1e6) if setup.partner_copies else 0,
        round(node_gb * setup.nodes / constants["store_gb_s"] * 1e6),
    )


class RecoveringRun(VirtualRun):
    """One run with the product's decisions."""

    def __init__(
        self, setup: SimulatedSetup, constants: Constants, faults: Sequence[SimulatedFault],
        watch: Callable[[float], None] = lambda _share: None,
    ) -> None:  # fmt: skip
        super().__init__(setup, constants, faults, resilio_saves(setup, constants), watch)
        self.shape = NodeCounts(setup.min_nodes or setup.nodes, setup.nodes)
        self.places = NodePlaces(self.shape, setup.spares, setup.gpus_per_node)
        self.run = self._new_run()
        self.state = StatePlaces(self, self.places, lambda: self.run, constants)
        self.job, self._fruitless, self._job_began_us, self._grows_us = 1, 0, 0, self.account.end_us
        self._opened_us = 0

    def _new_run(self) -> RunState:
        """Return a controller's knowledge of a new job."""
        config = ControllerConfig(
            self.shape, (), self.constants["heartbeat_timeout_s"], max_without_progress=self.setup.max_restarts,
            chained=self.setup.chained,
        )  # fmt: skip
        seconds = self._seconds
        return RunState(config, Term(1, name_of(0), "", Membership()), Clock(seconds, seconds))

    def _seconds(self) -> float:
        return self.account.at_us / 1e6

    # -- jobs ----------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Begin a job on whole nodes."""
        self.places.fill()
        self.state.all_lost()
        self.forget_returns()
        committed, self.run = self.run.committed_steps, self._new_run()
        self.run.learn(committed)
        self._job_began_us = self.account.at_us
        self._count()
        self.working = self.setup.nodes
        self._start(TimeCause.START, self.constants.us("launch_s"))

    def due_us(self) -> int:
        """Return when the job's time limit comes, or more nodes can take part."""
        job_s = self.setup.job_s
        limit = self.account.end_us if job_s is None else self._job_began_us + round(job_s * 1e6)
        return min(limit, self._grows_us)

    def act(self) -> None:
        """Save and end at the time limit; else go on with more nodes."""
        if self._grows_us <= self.account.at_us:
            self.state.note(self.in_round_us)
            self._resize()
            self._start(TimeCause.START, 0)
            return
        self.account.spend(TimeCause.SAVE, self.saves.blocked_us + self.saves.durable_us)
        self.state.saved(self.position)
        self._next_job("time_limit")

    def _next_job(self, verdict: str) -> None:
        """Let the next job of the chain judge this one's end."""
        self.account.counts[f"verdict {verdict}"] += 1
        evidence = PredecessorEvidence(str(self.job), chained=self.setup.chained, verdict=verdict,
                                       fruitless=self._fruitless)  # fmt: skip
        goes_on = judge(evidence).goes_on and self.setup.chained
        by_hand = self.constants.known("by_hand_s")
        if not goes_on and by_hand is None:
            self.ended = f"stopped with {verdict}"
            return
        self.account.counts["jobs by the chain" if goes_on else "jobs by hand"] += 1
        self.places.empty()
        self._count()
        self.wait(TimeCause.QUEUE, self.constants.us("queue_s") if goes_on else round((by_hand or 0.0) * 1e6))
        self.job += 1
        self.between_jobs = True

    def _count(self) -> None:
        self.account.held = len(self.places.members) + len(self.places.spares) - len(self.places.lost)
        self.account.working = len(self.places.members) - len(self.places.lost)

    # -- faults --------------------------------------------------------------------------------------------------

    def strikes(self, fault: SimulatedFault) -> bool:
        """Take the loss of spares; return whether members are struck."""
        for place in fault.places:
            spare = place - self.setup.nodes
            if 0 <= spare < len(self.places.spares) and (fault.kind is FaultKind.NODE or fault.lasting):
                self.absent(self.places.spares.pop(spare), fault.back_us)
                self.account.counts["spares lost"] += 1
        self._count()
        return any(place < len(self.places.members) and place not in self.places.lost for place in fault.places)

    def back(self, node: int) -> None:
        """Keep a node that is sound again as a spare."""
        self.places.broken.discard(node)
        if self.run.losses.get(name_of(node), 0) <= MAX_LOSSES and not self.places.has(node):
            self.places.spares.append(node)
            self.run.lost.discard(name_of(node))
        self._count()
        self._plan_growth()

    def recover(self, fault: SimulatedFault) -> None:
        """Restart the ranks, on other nodes where the ladder says so, until they train."""
        self.state.note(self.in_round_us)
        self._open()
        self._handle(fault, with_ranks=True)

    def _open(self) -> None:
        now = self._seconds()
        self._opened_us = self.account.at_us
        self.run.recovery = Recovery(now, now, now, self.position)

    def _handle(self, fault: SimulatedFault | None, with_ranks: bool) -> None:
        """Go on until no fault strikes any more."""
        while fault is not None and not self.account.over:
            detect_us = self._take(fault)
            if with_ranks:
                self.run.restarts += 1
                self.run.without_progress += 1
            fault, with_ranks = self.spend([(TimeCause.DETECT, detect_us)]), False
            if fault is None:
                if not self._gather():
                    return
                fault, with_ranks = self._start_ranks(TimeCause.RECOVER, self.constants.us("rank_end_s")), True

    def _take(self, fault: SimulatedFault) -> int:
        """Tell the controller of a fault; return how long it takes to know."""
        run, recovery, account = self.run, self.run.recovery, self.account
        assert recovery is not None
        account.counts["faults"] += 1
        account.counts[f"faults: {fault.kind.value}"] += 1
        if fault.kind is FaultKind.NODE:
            for place in fault.places:
                if place < len(self.places.members) and place not in self.places.lost:
                    node = self.places.lose(place)
                    name = name_of(node)
                    run.lost.add(name)
                    run.losses[name] = run.losses.get(name, 0) + 1
                    recovery.lose([name], self._seconds())
                    self.state.lost_at(place)
                    self.absent(node, fault.back_us)
            self._count()
            return round((self.constants["heartbeat_timeout_s"] + self.constants["silent_node_s"]) * 1e6)
        place = fault.places[0]
        node = self.places.members[place]
        if fault.lasting and node not in self.places.broken:
            self.places.broken.add(node)
            self.absent(node, fault.back_us)
        rank, number = place * self.setup.gpus_per_node, account.counts["faults"]
        failure = rank_failure(fault.kind, name_of(node), rank, self._seconds(), number)
        recovery.take(failure, failure)
        suspect(run, failure)
        return self.constants.us("hang_s") if fault.kind is FaultKind.HANG else 0

    # -- decisions -----------------------------------------------------------------------------------------------

    def _plan(self) -> RecoveryPlan:
        run, recovery, places = self.run, self.run.recovery, self.places
        assert recovery is not None
        first = recovery.last_failure() if recovery.moves else None
        usable = places.usable(self.setup.evict_devices)
        sound = sum(name_of(node) not in run.suspects for node in usable) if run.suspects else len(usable)
        since_s = (self.account.at_us - self._opened_us) / 1e6
        just_lost = sum(run.losses.get(name, 0) <= MAX_LOSSES for name in recovery.lost_nodes) * (since_s < RETURN_S)
        return decide(
            Failure(tuple(recovery.lost_nodes), first.node if first is not None else "", recovery.moves),
            World(len(places.members), len(usable), 0, self.shape, 0, just_lost, sound),
            Budgets(run.without_progress, run.config.max_without_progress, run.config.chained),
        )  # fmt: skip

    def _gather(self) -> bool:
        """Carry the ladder's decision out. Return whether ranks are to start in this job."""
        run = self.run
        while not self.account.over:
            if run.recovery is not None and run.recovery.repeated(run.broke_before) is not None:
                self._next_job("no_progress")
                return False
            plan = self._plan()
            self.account.counts[plan.rung.value] += 1
            match plan.rung:
                case Rung.RESTART | Rung.REPLACE | Rung.SHRINK:
                    self._resize()
                    return True
                case Rung.WAIT:
                    until = min(self.next_return_us, self._opened_us + round(RETURN_S * 1e6))
                    fault = self.spend([(TimeCause.RECOVER, max(1, until - self.account.at_us))])
                    if fault is not None:
                        self._take(fault)
                case Rung.NEXT_JOB:
                    self._next_job("needs_new_job")
                    return False
                case Rung.STOP:
                    spent = run.without_progress > run.config.max_without_progress
                    self._next_job("no_progress" if spent else "not_enough_nodes")
                    return False
                case Rung.RESTART_RANK:
                    raise AssertionError("a rank that starts again alone needs no round")
                case _:
                    assert_never(plan.rung)
        return False

    def _resize(self) -> None:
        """Choose the members of the next round."""
        before = len(self.places.members)
        changed = self.places.choose(self.run.suspects, self.setup.evict_devices)
        self.account.counts["nodes replaced"] += len(changed)
        if len(self.places.members) != before:
            self.state.size_changes()
        for place in changed:
            self.state.lost_at(place)
        self._count()

    # -- starts --------------------------------------------------------------------------------------------------

    def _start(self, cause: TimeCause, before_us: int) -> None:
        """Start ranks where none failed, and recover from what strikes meanwhile."""
        fault = self._start_ranks(cause, before_us)
        if fault is not None:
            self._open()
            self._handle(fault, with_ranks=True)

    def _start_ranks(self, cause: TimeCause, before_us: int) -> SimulatedFault | None:
        """Start the ranks of a round. Return the fault that strikes before they train."""
        constants, nodes = self.constants, len(self.places.members)
        recovery = self.run.recovery
        restore = self.state.restore(recovery, self.run.committed)
        if recovery is not None:
            self.run.broke_before = recovery.repeatable()
            self.run.cause = recovery.cause()
            recovery.round_told()
        us = before_us + restore.save_us + round(nodes * constants["round_s_per_node"] * 1e6)
        us += round(nodes * self.setup.gpus_per_node * constants["communicators_s_per_gpu"] * 1e6)
        fault = self.spend([(cause, us + constants.us("program_start_s"))])
        fault = fault or self.places.fault_again(self.account.at_us) or self.spend([(TimeCause.LOAD, restore.load_us)])
        if fault is not None or self.account.over:
            return fault
        self.go_back(self.state.furthest - restore.position)
        self.working = nodes
        self.run.goes_on_from(restore.position)
        self.account.counts[f"restored from {restore.source}"] += 1
        self.begin_round(restore.position)
        self.state.begin_round(restore)
        self.run.recovery = None
        self._plan_growth()
        return None

    def _plan_growth(self) -> None:
        """Take more nodes in after the next commit, where a round could be larger."""
        self._grows_us = self.account.end_us
        members = len(self.places.members)
        usable = self.places.usable(self.setup.evict_devices)
        if members < self.setup.nodes and self.shape.trim(len(usable)) > members:
            self._grows_us = self.round_began_us + self.saves.next_durable_us(max(0, self.in_round_us))
