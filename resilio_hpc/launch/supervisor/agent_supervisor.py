"""Keeps the agents of one job (or of one node) running.

A leading supervisor does this until there is a verdict, a joiner until its nodes have left the run. Nothing here waits
for Slurm or for the run directory: one dead srun, a slurmctld that does not answer, or a shared file system that hangs
does not delay other agents.
"""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

from resilio_hpc.core.ledger import Ledger
from resilio_hpc.events.event_text import words
from resilio_hpc.events.phrases import names
from resilio_hpc.launch.allocation import placements as p
from resilio_hpc.launch.allocation import srun_groups
from resilio_hpc.launch.allocation.job_watch import JobView, JobWatch, known_end
from resilio_hpc.launch.allocation.placements import SiteMode
from resilio_hpc.launch.allocation.restart_policy import VERDICT_WAIT_S, Attempts, Launches, Pace
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.process.helper_watch import HelperWatch
from resilio_hpc.launch.process.output_relay import Outputs
from resilio_hpc.launch.rundir import identity, node_directories, stale_directories
from resilio_hpc.launch.rundir.controller_view import ControllerView
from resilio_hpc.launch.rundir.run_directory import RunIdentity
from resilio_hpc.launch.supervisor.agent_signals import AgentSignals

STATUS_INTERVAL_S = 1.0
GROUP_RESTART_S = 1.0  # Slurm needs this time to end the rest of a group whose srun was killed
OWN_STARTS = 3  # starts of a node's own srun, for a node of a group
LOOK_PATIENCE_S = 0.5  # for a look at the run directory, before a crashed agent is started again


class Files(Protocol):
    """What a keeper needs of the run directory; ``SupervisorFiles`` provides it."""

    ledger: Ledger
    verdict: dict[str, Any] | None
    status: dict[str, Any]

    @property
    def gone(self) -> bool:
        """Return whether the run directory was removed."""

    def seen_since(self, moment: float, now: float) -> bool:
        """Return whether ``verdict`` and ``status`` were read after ``moment``."""

    def move_end(self, key: str, end_time: float | None) -> None:
        """Tell the agents of job ``key`` the new end of the job."""


class AgentKeeper:
    """Keeps the agents of one site running until the run's part has its verdict (``files``).

    ``leaves``: an agent that ends with 0 has left in good order and is not started again (joiners).
    """

    def __init__(
        self,
        site: p.Site,
        run: RunIdentity,
        recipe: p.Recipe,
        files: Files,
        leaves: bool = False,
        watch: JobWatch | None = None,
    ) -> None:
        self.site = site
        self.placements = p.placements(site, recipe, os.environ)
        self._run = run
        self._files = files
        self._ledger = files.ledger
        # exit code and time; first see if there is a verdict
        self._ended_now: dict[p.Placement, tuple[int, float]] = {}
        self._leaves = leaves
        self._outputs = Outputs()
        self._pace = Pace()
        self._launches = Launches(len(self.placements))
        self.end_time = recipe.settings.end_time
        self._watch = watch or JobWatch(site.job)
        self._watched = 0  # answers of the watch that were taken
        self._controller = ControllerView(run.path)  # ``files`` updates it
        self._next_look = 0.0
        self._own_starts: dict[str, int] = {}
        self._said: set[str] = set()
        self.signals = AgentSignals(site, self.placements, self._ledger)
        self._helpers = HelperWatch(self._helper_stopped)
        if site.mode is SiteMode.BATCH or (site.mode is SiteMode.STEP and site.leads):
            self._watch.start()

    def tend(self, now: float) -> bool:
        """Start agents that are due, restart those that ended too early. Return whether any agent runs or will."""
        self._helpers.tick(now)
        over = self._files.verdict is not None
        if self._watched != self._watch.answers and self._watch.view is not None:
            self._watched = self._watch.answers
            self._job_seen(self._watch.view)
        if not over:
            self._look_after_groups(now)
            self.signals.repeat(now)
        for placement in list(self.placements):
            code = placement.exit_code()
            if code is not None:
                self._ended_now[placement] = (code, now)
        if not over:
            for placement, (code, at) in list(self._ended_now.items()):
                if self._files.seen_since(at, now) or now - at > LOOK_PATIENCE_S:
                    del self._ended_now[placement]
                    self._ended(placement, code, now)
        for placement in self.placements:
            if not over and placement.due(now) and self._may_start(placement, now):
                placement.start(now, self._outputs, self.signals.stop_order)
        return any(placement.process is not None or self._may_come(placement) for placement in self.placements)

    def _may_come(self, placement: p.Placement) -> bool:
        """Return whether an agent that does not run may still be started, or its end is not handled yet."""
        if placement in self._ended_now and self._files.verdict is None:
            return True
        if placement.done or self._files.verdict is not None or self.signals.stop_order:
            return False
        return not (self._files.gone and placement.attempts.in_order)  # it knew of a verdict that cannot be read

    def _may_start(self, placement: p.Placement, now: float) -> bool:
        attempts = placement.attempts
        if placement in self._ended_now:
            return False
        if attempts.in_order and not self._no_verdict(attempts, now):
            return False
        if self.signals.stop_order and not self.running:
            return False  # one more agent could not bring the run to a good end
        return self.site.mode is not SiteMode.BATCH or self._pace.take(now, self._watch.answering)

    def _no_verdict(self, attempts: Attempts, now: float) -> bool:
        """Return whether an agent that ended in order has to be started again.

        Most likely it knew of a verdict, which may be seen late, or when a run directory that hangs is back. If other
        agents run, though, the controller had lost its node.
        """
        if self._files.gone:
            return False
        waited = self.running > 0 or now >= attempts.ended_at + VERDICT_WAIT_S
        return waited and self._files.seen_since(attempts.next_start, now)

    @property
    def running(self) -> int:
        """Return how many of the agents' processes run."""
        return sum(placement.process is not None for placement in self.placements)

    @property
    def kept(self) -> int:
        """Return how many agents run, or would be started again if the run went on."""
        return sum(not placement.done for placement in self.placements)

    @property
    def left_in_order(self) -> bool:
        """Return whether every agent ended well, or its node left the job."""
        return all(placement.left for placement in self.placements)

    @property
    def hopeless(self) -> bool:
        """Return whether no agent could ever be started, though Slurm answers."""
        now = time.monotonic()
        return self._watch.answering and self._launches.hopeless(each.running_s(now) for each in self.placements)

    def _helper_stopped(self, name: str, pid: int, action: str) -> None:
        self._ledger.append("helper_stopped", helper=name, pid=pid, action=action)
        say(words("helper_stopped", {"helper": name, "pid": pid, "action": action}))

    # -- one that ended ----------------------------------------------------------------------------------------

    def _ended(self, placement: p.Placement, code: int, now: float) -> None:
        if placement.left:
            return
        ran = placement.attempts.ended(now, code, placement.recipe.by_srun)
        self._launches.count(ran)
        for node in placement.nodes:
            if ran:
                self._ledger.append("agent_ended", node=node, exit_code=code, starts=placement.attempts.starts)
            else:
                self._ledger.append("launch_failed", node=node, exit_code=code, starts=placement.attempts.starts)
        if self._leaves and code == 0:
            placement.left = True
            return
        if self.site.mode is SiteMode.BATCH:
            self._watch.look_now()  # asks whether the job still has the node
        attempts = placement.attempts
        if len(placement.nodes) > 1:
            attempts.next_start = max(attempts.next_start, now + GROUP_RESTART_S)
            if attempts.failed_launches > 1:  # one dead node would delay all of them
                self._give_own_sruns(placement, placement.nodes, now)
                return
        self._tell(placement, code, ran)
        if attempts.given_up and placement.group is not None and not placement.group.done:
            placement.left = True
            placement.group.nodes += placement.nodes  # its agent may still run in the group's srun

    def _tell(self, placement: p.Placement, code: int, ran: bool) -> None:
        who = f"the agent on {placement.label}" if len(placement.nodes) == 1 else f"agents on {names(placement.nodes)}"
        if placement.attempts.given_up:
            how = "ends again and again" if ran else "could not be started for too long"
            self._say_once(f"{who} {how} (exit code {code}): not started any more")
        elif not ran and placement.attempts.failed_launches == 1:
            patience = placement.attempts.patience_s
            self._say_once(f"srun could not start {who} (exit code {code}): trying again, for up to {patience:.0f} s")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(line)

    # -- groups ------------------------------------------------------------------------------------------------

    def _look_after_groups(self, now: float) -> None:
        """Give a node its own srun when its agent ends: its group's srun goes on."""
        groups = [each for each in self.placements if each.covers_group and each.process is not None]
        if not groups or now < self._next_look:
            return
        self._next_look = now + STATUS_INTERVAL_S
        if not self._controller.take(self._files.status):
            return
        for placement in groups:
            absent = srun_groups.absent_agents(
                placement.nodes, self._controller.agents, self._controller.lost, placement.running_s(now)
            )
            wanted = tuple(node for node in absent if self._own_starts.get(node, 0) < OWN_STARTS)
            if wanted:
                self._watch.look_now()
                self._give_own_sruns(placement, wanted, now)

    def _give_own_sruns(self, placement: p.Placement, nodes: tuple[str, ...], now: float) -> None:
        group = placement if placement.process is not None else None
        for node in nodes:
            self._own_starts[node] = self._own_starts.get(node, 0) + 1
            alone = p.Placement((node,), placement.recipe, group)
            alone.attempts.next_start = max(now, placement.attempts.next_start)
            self.placements.append(alone)
            self._ledger.append("own_srun", node=node)
        placement.nodes = tuple(node for node in placement.nodes if node not in nodes)
        if not placement.nodes:
            placement.left = True

    # -- what Slurm says ---------------------------------------------------------------------------------------

    def _job_seen(self, view: JobView) -> None:
        if self.site.mode is SiteMode.BATCH:
            for placement in self.placements:
                for node in [node for node in placement.nodes if node not in view.nodes]:
                    self._node_left(placement, node)
        self._end_seen(view.end_time)

    def _end_seen(self, told: float | None) -> None:
        """Take the job's end; where Slurm does not tell it, keep the former one."""
        if told is None:
            if self.end_time is None:
                self._say_once(f"warning: Slurm does not tell when job {self.site.job} ends: no save precedes that")
            return
        limit = known_end(told)
        if limit != self.end_time:
            self._ledger.append("end_time", job=self.site.job, end_time=limit, before=self.end_time)
            self.end_time = limit
            self._files.move_end(self.site.key, limit)

    def _node_left(self, placement: p.Placement, node: str) -> None:
        if placement.left:
            return
        self._ledger.append("node_left_job", node=node)
        if len(placement.nodes) == 1:
            placement.kill()  # an srun to a lost node may hang
        else:
            placement.nodes = tuple(each for each in placement.nodes if each != node)

    # -- the end -----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill all agents for good."""
        self._watch.close()
        for placement in self.placements:
            placement.kill()
        self._outputs.close()

    def clean_up(self) -> None:
        """Remove what killed agents on this machine have left, except what ranks that ended well have started."""
        if self.site.mode is SiteMode.BATCH:
            return
        ended_well = (self._files.verdict or {}).get("verdict") == "completed"
        for placement in self.placements:
            for node in placement.nodes:
                if not ended_well:
                    process_tree.sweep(f"{self._run.run_id}:{node}")
                local, arenas = node_directories.found(self._run.run_id, node)
                if local is not None:
                    identity.forget(local)
                if arenas is not None:
                    stale_directories.remove(arenas)
