"""A campaign: one long run on a dev cluster under faults drawn by chance, beside a twin that has none.

    with campaign_cluster(plan, "soak") as cluster:
        result = PoissonCampaign(cluster, plan, on_fault=print).run()

Start reading at ``PoissonCampaign.run``. Faults are those of ``campaign_faults``; what became of the time is computed
from the ranks' own stamps (``stamped_time``), and said by the run's ledger as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines
from resilio_hpc.drills.campaign_faults import CampaignFault, FaultDraw, chosen
from resilio_hpc.drills.campaign_plan import CampaignPlan
from resilio_hpc.drills.campaign_result import CampaignResult, StruckFault, concluded
from resilio_hpc.drills.campaign_run import CampaignRun
from resilio_hpc.drills.kind import HURTS, Act

POLL_S = 0.05
BEGIN_S = 180.0  # for all runs to commit their first step
SIGNALS = ("kill_rank", "stop_rank", "kill_agent", "stop_saver")
END_S = 120.0  # for all runs to end, from when they may


def campaign_cluster(plan: CampaignPlan, name: str) -> DevCluster[RackMachines]:
    """Start a cluster for the run and its twin; the caller takes it down."""
    return devcluster.start(
        name,
        nodes=plan.nodes * (2 if plan.twin else 1),
        slurm=plan.slurm,
        binds=binds(),
        shared_mount="fuse" if plan.fuse else "bind",
        timeout_s=120.0,
    )


class PoissonCampaign:
    """One run of a campaign. ``on_fault`` is called when a fault has struck, ``say`` with words about what happens."""

    def __init__(
        self, cluster: DevCluster[RackMachines], plan: CampaignPlan, name: str = "campaign", part: int = 0,
        on_fault: Callable[[StruckFault], None] = lambda _: None, say: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Take a cluster whose nodes are idle. ``part``: how many parts there were before: each draws other faults."""
        self.cluster = cluster
        self.plan = plan
        nodes = cluster.nodes
        self.run_under_faults = CampaignRun(cluster, plan, name, nodes[: plan.nodes])
        twin = CampaignRun(cluster, plan, f"{name}-twin", nodes[plan.nodes : 2 * plan.nodes]) if plan.twin else None
        self.twin = twin
        self.struck: list[StruckFault] = []
        self._draw = FaultDraw(f"{plan.seed} {part}", plan.mtbf_s, chosen(plan.weights, plan.fuse))
        self._on_fault = on_fault
        self._say = say
        self._waiting: list[tuple[float, Act, str]] = []  # acts that follow, with when and on which node
        self._down: dict[str, float] = {}  # nodes that were taken, with when they are given back
        self._failed = ""

    def run(self) -> CampaignResult:
        """Begin both runs, strike until the time is over, end them, and account for the time.

        ^C (KeyboardInterrupt) ends it sooner; the result is that of the time until then. A second one ends it at once.
        Raises ResilioError where the runs do not begin.
        """
        runs = [run for run in (self.run_under_faults, self.twin) if run is not None]
        for run in runs:
            run.submit()
        interrupted = False
        began = 0.0
        try:
            self._wait_until_begun(runs)
            began = time.time()
            self._strike_until(began + self.plan.duration_s)
        except KeyboardInterrupt:
            interrupted = True
            self._say("interrupted: the runs end, and what there is so far is kept")
        self._repair()
        for run in runs:
            run.end()
        interrupted = self._wait_for_ends(runs, interrupted)
        struck_s = time.time() - began if began else 0.0
        return concluded(self.plan, self.run_under_faults, self.twin, self.struck, struck_s, self._failed, interrupted)

    def _wait_until_begun(self, runs: list[CampaignRun]) -> None:
        deadline = time.monotonic() + BEGIN_S
        while not all(run.has_begun() for run in runs):
            if time.monotonic() > deadline:
                raise ResilioError(f"the runs have not saved within {BEGIN_S:.0f} s: see {runs[0].output}")
            time.sleep(POLL_S)
        self._say("training has begun, and a step is committed")

    def _strike_until(self, end: float) -> None:
        due = time.time() + self._draw.gap_s()
        while (now := time.time()) < end:
            self._follow_up(now)
            if self.run_under_faults.is_over():
                self._failed = "the run ended by itself"
                return
            if now >= due:
                due += self._draw.gap_s()
                self._strike(now)
            time.sleep(POLL_S)

    def _strike(self, now: float) -> None:
        run = self.run_under_faults
        run.look()
        up = [node for node in run.members() if node not in self._down]
        fault = self._draw.fault(may_take_node=self._may_take(up))
        if fault is None or not up:
            return
        # the batch host holds the launcher's first process; that it dies is a drill of its own
        others = [node for node in up if node != run.nodes[0]] or up
        target = self._draw.one_of(others if fault.takes_node else up)
        run.actor.draw = self._draw.rank
        hits = run.actor.hits
        leader = run.leader()
        run.actor.roles = {"": (), "target": (target,), "leader": (leader,), "batch_host": (run.nodes[0],)}
        try:
            run.actor.do(fault.acts[0], run.events)
        except ResilioError as error:  # its process is just being replaced
            self._say(f"{fault.name}: not done: {error}")
            return
        if fault.acts[0].do in SIGNALS and hits == run.actor.hits:
            self._say(f"{fault.name}: not done: the process on {target} had just ended")
            return
        self._waiting += [(now + act.after_s, act, target) for act in fault.acts[1:]]
        if fault.takes_node:
            self._down[target] = now + max(act.after_s for act in fault.acts)
        self._note(fault, now, leader if fault.acts[0].to == "leader" else target)

    def _note(self, fault: CampaignFault, at: float, node: str) -> None:
        run = self.run_under_faults
        of_rank = fault.acts[0].do in ("kill_rank", "stop_rank")
        struck = StruckFault(
            name=fault.name, time=at, node=node if fault.acts[0].to else "",
            rank=run.actor.struck if of_rank else None, in_recovery=not run.trains(),
            hurts=fault.acts[0].do in HURTS,
        )  # fmt: skip
        self.struck.append(struck)
        self._on_fault(struck)

    def _may_take(self, up: list[str]) -> bool:
        """Return whether a node more may be lost: enough would be left, and all others are back."""
        return len(up) > self.plan.min_nodes and not self._down

    def _follow_up(self, now: float) -> None:
        for item in [item for item in self._waiting if item[0] <= now]:
            self._waiting.remove(item)
            self._undo(item[1], item[2])
        members = set(self.run_under_faults.members())
        self._down = {node: at for node, at in self._down.items() if now < at or node not in members}

    def _undo(self, act: Act, node: str) -> None:
        actor = self.run_under_faults.actor
        actor.roles = {"": (), "target": (node,)}
        try:
            actor.do(act, self.run_under_faults.events)
        except ResilioError as error:
            self._say(f"{act.do} {node}: {error}")

    def _repair(self) -> None:
        """Give back what was taken, at once."""
        for _, act, node in self._waiting:
            self._undo(act, node)
        self._waiting.clear()

    def _wait_for_ends(self, runs: list[CampaignRun], interrupted: bool) -> bool:
        """Return whether it was interrupted. A first ^C does not end the wait, a second one does."""
        deadline = time.monotonic() + END_S
        while True:
            try:
                while not all(run.is_over() for run in runs):
                    if time.monotonic() > deadline:
                        self._failed = self._failed or f"the runs did not end within {END_S:.0f} s"
                        break
                    for run in runs:
                        run.end()  # a node that was booted meanwhile
                    time.sleep(POLL_S)
                return interrupted
            except KeyboardInterrupt:
                if interrupted:
                    self._failed = self._failed or "interrupted before the runs had ended"
                    return True
                interrupted = True
                self._say("interrupted: the runs are ending; a second time ends them at once")
