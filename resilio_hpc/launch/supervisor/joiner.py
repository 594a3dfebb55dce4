"""The supervisor of nodes that join a run from another job: ``resilio-launch --join RUN_DIR``.

It keeps agents on its own nodes as any supervisor does. It never judges the run: it submits no next job, and ends when
the run's part that it joined has its verdict, or when its nodes have left. It writes no verdict but ``cancelled``,
where the run's own job was cancelled and no agent there could write it.
"""

from __future__ import annotations

import os
import time
from functools import partial

from resilio_hpc.core.errors import UsageError
from resilio_hpc.events.phrases import names
from resilio_hpc.launch.allocation import placements as p
from resilio_hpc.launch.allocation.job_watch import known_end
from resilio_hpc.launch.allocation.placements import SiteMode
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.cli.join_plan import JoinPlan, join_plan
from resilio_hpc.launch.cli.options_parser import JoinRequest
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.process import announce
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.process.bounded import bounded
from resilio_hpc.launch.rundir import final_report, run_claim, run_directory
from resilio_hpc.launch.rundir.controller_view import ControllerView
from resilio_hpc.launch.supervisor.agent_supervisor import AgentKeeper
from resilio_hpc.launch.supervisor.farewell import Farewell
from resilio_hpc.launch.supervisor.owner_watch import OwnerWatch, state_of
from resilio_hpc.launch.supervisor.supervisor import POLL_S
from resilio_hpc.launch.supervisor.supervisor_files import SupervisorFiles
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.allocation import detect
from resilio_hpc.slurm.runs import run_names

LOOK_S = 0.25
LEAST_WAIT_S = 3.0  # a controller's pulse shows twice a second that it lives, so even without patience look that long


class Joiner:
    """One job's nodes in another job's part of a run."""

    def __init__(self, request: JoinRequest) -> None:
        self.request = request
        self.run = joining.find_run(run_names.run_path(request.run))
        self.path = self.run.path
        self.allocation = detect(os.environ)
        self.site = p.joining_site(self.allocation, request.local_nodes)
        self._view = ControllerView(self.path)

    def wait_for_run(self) -> joining.LaunchRecord:
        """Wait until the run can be joined. Raises UsageError when it never can, or not within the join timeout."""
        began = time.monotonic()
        said = ""
        patience = self.request.join_timeout_s
        while True:
            facts = joining.look(self.path, self._view)
            why = joining.judge(facts, self.path, self.site.nodes, self.site.mode is SiteMode.LOCAL)
            waited = time.monotonic() - began
            if not why:
                assert facts.record is not None
                return facts.record
            if waited > max(patience, LEAST_WAIT_S):
                raise UsageError(f"--join {self.path}: {why}, and has not changed for {waited:.0f} s (--join-timeout)")
            if why != said and waited > LEAST_WAIT_S:
                said = why
                if self.site.leads:
                    say(f"waiting: {why}; for up to {patience:.0f} s (--join-timeout)")
            time.sleep(LOOK_S)

    def plan(self) -> JoinPlan:
        """Return what joining would do. Raises UsageError as joining would."""
        deadline = time.monotonic() + LEAST_WAIT_S
        while True:
            facts = joining.look(self.path, self._view)
            why = joining.judge(facts, self.path, self.site.nodes, self.site.mode is SiteMode.LOCAL)
            if not why or time.monotonic() > deadline:
                return join_plan(facts, self.path, self.site, why)
            time.sleep(LOOK_S)

    def run_to_end(self) -> int:
        """Run from the join to the end of this job's nodes. Return the exit code."""
        record = self.wait_for_run()
        try:
            os.chdir(record.cwd)
        except OSError as error:
            raise UsageError(f"--join: the run works in {record.cwd}, which is not here: {error.strerror}") from None
        name = self.allocation.node if self.allocation is not None and self.site.mode is SiteMode.STEP else "main"
        files = SupervisorFiles(self.run, record.key, f"{self.site.key}-joiner-{name}")
        try:
            return self._take_part(record, files)
        finally:
            files.close()

    def _take_part(self, record: joining.LaunchRecord, files: SupervisorFiles) -> int:
        recipe = self._recipe(record)
        files.ledger.append(
            "joins", mode=self.site.mode, job=self.site.job, nodes=self.site.nodes, part=record.key,
            end_time=recipe.settings.end_time,
        )  # fmt: skip
        if self.site.leads:
            say(f"{names(self.site.nodes)} of job {self.site.job} join run {self.run.run_id} in {self.run.path}")
        keeper = AgentKeeper(self.site, self.run, recipe, files, leaves=True)
        keeper.signals.catch(record.options.signals_to_handle)
        owner = OwnerWatch(partial(state_of, self.path, record.key))
        if self.site.mode is not SiteMode.LOCAL and self.site.leads:
            owner.start()
        try:
            self._keep(keeper, files, owner)
            left = keeper.left_in_order
        finally:
            keeper.kill()
            owner.close()
        keeper.clean_up()
        if owner.cancelled and files.verdict is None:
            bounded(partial(self._end_the_run, record.key, owner.cancelled), None)
        return self._last_words(left, files)

    def _end_the_run(self, part: str, reason: str) -> None:
        """Write the verdict, so that all other joiners' nodes end too."""
        newest = next(iter(run_claim.newest(self.path)), None)
        begun_anew = newest is not None and newest.part != part
        if not begun_anew and run_directory.read_verdict(self.path, part) is None:
            verdict = {"verdict": "cancelled", "exit_code": 1, "reason": reason}
            run_directory.write_verdict(self.path, part, verdict)

    def _recipe(self, record: joining.LaunchRecord) -> p.Recipe:
        request = self.request
        settings = AgentSettings(
            options=joining.options_for(record, self.run.path, request.local_nodes, request.join_timeout_s),
            node="", job=record.key, expected=self.site.nodes, address="", chained=record.chained,
            end_time=known_end(commands.job_end_time(self.site.job)) if self.site.mode is not SiteMode.LOCAL else None,
            join=True, own_job=self.site.key, run_id=self.run.run_id, cwd=record.cwd,
        )  # fmt: skip
        ahead_s = commands.clock_ahead_s() if self.site.mode is not SiteMode.LOCAL else 0.0
        return p.recipe_of(self.site, self.allocation, settings, ahead_s)

    def _keep(self, keeper: AgentKeeper, files: SupervisorFiles, owner: OwnerWatch) -> None:
        farewell: Farewell | None = None
        epoch: object = None
        while True:
            now = time.monotonic()
            if files.status.get("epoch") != epoch:
                epoch = files.status.get("epoch")
                owner.look_now()
            if farewell is None and owner.cancelled:
                return
            keeper.signals.forward()
            alive = keeper.tend(now)
            if farewell is None and files.verdict is not None:
                farewell = Farewell(now, keeper.kept)
            if not alive or (farewell is None and (keeper.hopeless or keeper.signals.stop_overdue(now))):
                return
            if farewell is not None and farewell.over(now, keeper.running, self.site):
                return
            files.tick(now, wait_s=POLL_S)

    def _last_words(self, left: bool, files: SupervisorFiles) -> int:
        verdict = files.last_look()
        if verdict is not None:
            name = str(verdict.get("verdict"))
            title = final_report.ENDINGS.get(name, final_report.UNKNOWN).title
            line, code = f"the run ended while these nodes took part: {title}: {verdict.get('reason')}", 0
        elif left:
            line, code = f"left in good order: the run goes on without {names(self.site.nodes)}", 0
        else:
            line, code = "the agents were lost, and the run goes on without them: see the lines above", 1
        files.ledger.append("joiner_ends", verdict=verdict.get("verdict") if verdict else None, exit_code=code)
        if self.site.leads:
            announce.finish()
            final_report.show([line, f"see: resilio ledger {self.run.path}"])
        return code


def run(request: JoinRequest) -> int:
    """Join a run with this job's nodes."""
    joiner = Joiner(request)
    if joiner.site.mode is SiteMode.STEP and joiner.allocation is not None and joiner.allocation.local_task > 0:
        say(f"task {joiner.allocation.task} ends: one resilio-launch per node is enough (use srun --ntasks-per-node=1)")
        return 0
    if request.dry_run:
        plan = joiner.plan()
        print(plan.as_json() if request.json else plan.as_text(), flush=True)
        return 0
    return joiner.run_to_end()
