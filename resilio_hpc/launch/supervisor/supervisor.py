"""The supervisor: what ``resilio-launch`` becomes after its checks. It keeps agents running and closes the run.

In a batch script it starts one srun step per node (so the death of one srun or node touches no other); as a task of
an srun step, or outside of Slurm, it keeps the agent of its own node. It decides nothing about the run: it restarts
agents until the controller's verdict appears in the run directory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from resilio_hpc.launch.allocation import placements as p
from resilio_hpc.launch.allocation.job_watch import JobWatch, known_end
from resilio_hpc.launch.allocation.placements import SiteMode
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.chain.chaining import Chain
from resilio_hpc.launch.chain.maintenance import EndBeforeMaintenance
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.rank_layout import planned_words
from resilio_hpc.launch.notify.notify import tell_verdict
from resilio_hpc.launch.process import announce
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.process.bounded import bounded
from resilio_hpc.launch.protocol.stop_reasons import STOP_EXIT_CODES, STOP_REASONS
from resilio_hpc.launch.resize import keeper as resize_keeper
from resilio_hpc.launch.resize.keeper import ResizeKeeper
from resilio_hpc.launch.rundir import final_report, notify_targets, run_directory
from resilio_hpc.launch.rundir.notify_targets import Target, masked
from resilio_hpc.launch.supervisor import layout_planning, node_check
from resilio_hpc.launch.supervisor.agent_signals import WARNINGS
from resilio_hpc.launch.supervisor.agent_supervisor import AgentKeeper
from resilio_hpc.launch.supervisor.farewell import Farewell
from resilio_hpc.launch.supervisor.greeting import greet
from resilio_hpc.launch.supervisor.supervisor_files import SupervisorFiles
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.allocation import detect

POLL_S = 0.05


class Supervisor:
    """Keeps the agents of one job (or of one node) running until there is a verdict."""

    def __init__(self, options: LaunchOptions, targets: tuple[Target, ...] = ()) -> None:
        self.options = options
        self._targets = targets
        self.allocation = detect(os.environ)
        self.site = p.site_of(options, self.allocation)
        self.run = run_directory.open_run(Path(options.run_dir))
        self.files = SupervisorFiles(self.run, self.site.key, f"{self.site.key}-supervisor-{self._own_name()}")
        self.ledger = self.files.ledger
        self.chain = Chain(options, self.site, self.run.path, self.ledger, self.files.show_life)
        self.last_words: list[str] = []
        self._told_gone = False
        self._clock_ahead_s = 0.0

    def _own_name(self) -> str:
        return self.allocation.node if self.allocation is not None and self.site.mode is SiteMode.STEP else "main"

    def run_to_verdict(self) -> int:
        """Run the launch to its verdict. Return the exit code."""
        over = self.chain.judge_predecessor()
        if over is not None:
            self.last_words = [over] if self.site.leads else []
            return 0
        notify_targets.put_away(self.run.path, self._targets)
        self.options = layout_planning.planned(self.options, self.site, self.run.path, self.ledger)
        end_time: float | None = None
        if self.site.mode is not SiteMode.LOCAL:
            end_time = known_end(commands.job_end_time(self.site.job))
            self._clock_ahead_s = commands.clock_ahead_s()
        self.chain.begin()
        signals = self._check_nodes()
        recipe = self._recipe(end_time)
        self.ledger.append(
            "launch", mode=self.site.mode, job=self.site.job, nodes=self.site.nodes, link=self.chain.number,
            end_time=end_time, argv=masked(sys.argv), layout=planned_words(os.environ),
            layouts=self.options.layouts,
            slurm="" if self.site.mode is SiteMode.LOCAL else commands.version(),
        )  # fmt: skip
        if self.site.leads:
            run_directory.expect_verdict(self.run.path, self.site.key)
            self._keep_stdin()
            joining.write_record(self.run.path, joining.record_of(self.options, self.site, self.chain.active))
        ends = EndBeforeMaintenance(os.environ.get("SLURM_JOB_RESERVATION", ""), clock=self._slurm_time)
        watch = JobWatch(self.site.job, ends)
        keeper = AgentKeeper(self.site, self.run, recipe, self.files, watch=watch if self.chain.active else None)
        keeper.signals.catch(self.options.signals_to_handle)
        if self.site.leads:
            greet(self.site, self.run, self.chain)
        for number in signals:
            os.kill(os.getpid(), number)
        resizer = self._keep_resizer()
        verdict: dict[str, Any] | None = None
        hopeless = False
        try:
            verdict = self._supervise(keeper)
            hopeless = keeper.hopeless
        except KeyboardInterrupt:
            verdict = self.files.verdict  # all processes are killed now, so the result may be known
        finally:
            keeper.kill()
            if resizer is not None:
                resizer.close()
        keeper.clean_up()
        return self._close(verdict or self._own_verdict(hopeless, keeper.signals.stop_order), verdict is None)

    def _check_nodes(self) -> list[int]:
        """Run the pair check, if it is asked for: nodes that it finds bad get no agent.

        Return the signals that came meanwhile. The chain keeps the job's own nodes: its next job is to have as many.
        """
        if not node_check.is_due(self.options, self.site, self.chain.number):
            return []
        say(f"pair check of {len(self.site.nodes)} nodes (--check-nodes), up to {node_check.BUDGET_S:.0f} s")
        check = node_check.NodeCheck(node_check.request_of(self.site, self.allocation))
        result = check.run(self.options.signals_to_handle)
        left = node_check.LeftOut(self.site.nodes, (), ())
        if isinstance(result, str):
            self.ledger.append("nodes_checked", no_result=result)
        else:
            left = node_check.leave_out(result, self.site.nodes, self.options.max_nodes)
            self.ledger.append(
                "nodes_checked", outcome=result.outcome, why=result.why, bad=result.bad, slow=result.slow,
                left_out=left.left_out, rounds=result.rounds, seconds=result.seconds,
                nodes=msgspec.to_builtins([one for one in result.nodes if one.state != "healthy"]),
            )  # fmt: skip
        node_check.tell(result, left)
        self.site = replace(self.site, nodes=left.nodes)
        return check.received

    def _keep_resizer(self) -> ResizeKeeper | None:
        """Keep the resizer of ``--resize`` running beside the launch."""
        if not self.options.resizing.resize or not self.site.leads or self.site.mode is SiteMode.LOCAL:
            return None
        resizer = ResizeKeeper(resize_keeper.command(self.options, self.run.path))
        resizer.start()
        return resizer

    def _recipe(self, end_time: float | None) -> p.Recipe:
        settings = AgentSettings(
            options=self.options, node="", job=self.site.key, expected=self.site.nodes, address="",
            begins=self.chain.begins, chained=self.chain.active,
            end_time=end_time, run_id=self.run.run_id, cwd=str(Path.cwd()),
            last_words=str(self.files.last_words) if self.site.mode is not SiteMode.BATCH else "",
        )  # fmt: skip
        return p.recipe_of(self.site, self.allocation, settings, self._clock_ahead_s)

    def _keep_stdin(self) -> None:
        """Keep standard input, so that a chain's later jobs get what the first one got."""
        if self.options.stdin_rank >= 0 and not (
            self.chain.number > 1 and (self.run.path / run_directory.STDIN).exists()
        ):
            with open(0, "rb", closefd=False) as source:
                run_directory.keep_stdin(self.run.path, source)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _supervise(self, keeper: AgentKeeper) -> dict[str, Any] | None:
        farewell: Farewell | None = None
        verdict: dict[str, Any] | None = None
        alone_since: float | None = None  # since then no agent runs any more, and none will
        while True:
            now = time.monotonic()
            self._keep_chain(keeper)
            alive = keeper.tend(now)
            if verdict is None and self.files.verdict is not None:
                verdict = self._named(self.files.verdict)
                farewell = Farewell(now, keeper.kept)
                bounded(partial(self.chain.close, verdict), None)
            if not alive and alone_since is None:
                alone_since = now
            self._tell_if_gone()
            if alone_since is not None and (verdict is not None or self._none_will_come(alone_since, now)):
                return verdict
            if verdict is None and (keeper.hopeless or keeper.signals.stop_overdue(now)):
                return None
            if farewell is not None and farewell.over(now, keeper.running, self.site):
                return verdict
            self.files.tick(now, wait_s=POLL_S)

    def _none_will_come(self, alone_since: float, now: float) -> bool:
        """Return whether no verdict is to be expected, once all agents have ended."""
        return self.files.gone or self.files.seen_since(alone_since, now)

    def _tell_if_gone(self) -> None:
        if self.files.gone and not self._told_gone:
            self._told_gone = True
            say(f"{self.run.path} was removed, with all that this run had saved; its ranks go on")

    def _slurm_time(self) -> float:
        """Return Unix seconds by slurmctld's clock, which ends jobs."""
        return time.time() - self._clock_ahead_s

    def _keep_chain(self, keeper: AgentKeeper) -> None:
        """Do the chain's work in bounded time: submitting a job reads and writes the run directory, which may hang."""
        if self.files.order is not None and self.files.verdict is None and self.chain.heed(self.files.order):
            keeper.signals.stop_in_order(time.monotonic())
        if keeper.signals.forward() & WARNINGS:
            bounded(lambda: self.chain.successor.submit_late(self._slurm_time()), None)
        if self.chain.successor.late:
            bounded(lambda: self.chain.successor.tick(self._slurm_time(), keeper.end_time), None)

    def _named(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Return the verdict with its cause, which Slurm knows: a time limit carries on, the user's cancel does not."""
        if verdict.get("verdict") != "terminated" or self.site.mode is SiteMode.LOCAL or not self.site.leads:
            return verdict
        code = verdict.get("exit_code", 1)
        if self.chain.stop_ordered:
            name, reason, code = "cancelled", "resilio chain stop", 0
        else:
            name = {"CANCELLED": "cancelled", "TIMEOUT": "time_limit"}.get(commands.job_state(self.site.job), "")
            reason = f"Slurm ended the job: {name.replace('_', ' ')}"
        if not name:
            return verdict
        named = {**verdict, "verdict": name, "reason": reason, "exit_code": code}
        bounded(lambda: run_directory.write_verdict(self.run.path, self.site.key, named), None)
        return named

    # -- the end -----------------------------------------------------------------------------------------------

    def _own_verdict(self, hopeless: bool, stop_order: str) -> dict[str, Any]:
        """Return the supervisor's own verdict, where the run directory has none."""
        told = self.files.told_verdict()
        if told is not None:
            return {"reason": "as its agents have told: the run directory did not take the verdict", **told}
        if stop_order:
            name = STOP_REASONS[stop_order]
            reason = f"SIG{stop_order}, while no agent could save"
            return self._named({"verdict": name, "exit_code": STOP_EXIT_CODES[name], "reason": reason})
        reason = "no agent could be started" if hopeless else "every agent ended without a verdict"
        if self.files.gone:
            reason = f"{self.run.path} was removed: no verdict could be written there"
        return {"verdict": "agents_lost", "exit_code": 1, "reason": reason}

    def _close(self, verdict: dict[str, Any], is_own: bool) -> int:
        """Close the run with its verdict. ``is_own``: no controller wrote it. Return the exit code."""
        if is_own and self.site.leads:
            if not self.files.gone:
                bounded(partial(run_directory.write_verdict, self.run.path, self.site.key, verdict), None)
            bounded(partial(self.chain.close, verdict), None)
            tell_verdict(self.run, self.site.key, self.ledger.append, verdict)
        code = self.chain.exit_code(verdict)
        bounded(self.chain.successor.avoid_faulty_nodes, None)
        if self.site.leads:
            words = partial(final_report.last_words, self.run.path, verdict, self.site.key, self.chain.next_job)
            self.last_words = bounded(words, final_report.verdict_lines(self.run.path, verdict, self.chain.next_job))
        self.ledger.append("launch_ends", verdict=verdict["verdict"], exit_code=code)
        return code


def run(options: LaunchOptions, targets: tuple[Target, ...] = (), at_end: Callable[[Path], None] | None = None) -> int:
    """Run a launch to its verdict.

    ``targets``: where it sends notifications; ``at_end``: gets the run directory when all of the ledger is there.
    """
    supervisor = Supervisor(options, targets)
    try:
        return _run(supervisor)
    finally:
        supervisor.files.close()
        if at_end is not None and supervisor.site.leads and not supervisor.files.gone:
            bounded(partial(at_end, supervisor.run.path), None)


def _run(supervisor: Supervisor) -> int:
    allocation = supervisor.allocation
    if supervisor.site.mode is SiteMode.STEP and allocation is not None and allocation.local_task > 0:
        say(f"task {allocation.task} ends: one resilio-launch per node is enough (use srun --ntasks-per-node=1)")
        return 0
    if supervisor.options.output.view and supervisor.site.leads:
        from resilio_hpc.launch.supervisor.live import with_view

        code = with_view(supervisor.run.path, supervisor.run_to_verdict)
    else:
        code = supervisor.run_to_verdict()
    announce.finish()
    final_report.show(supervisor.last_words)
    supervisor.chain.leave()
    return code
