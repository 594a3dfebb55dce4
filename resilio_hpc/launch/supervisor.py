"""The supervisor: what ``resilio-launch`` becomes after its checks. It keeps agents running and closes the run.

In a batch script it starts one srun step per node (so the death of one srun or node touches no other); as a task of
an srun step, or outside of Slurm, it keeps the agent of its own node. It decides nothing about the run: it restarts
agents until the controller's verdict appears in the run directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch import closing, leftovers, process_tree, run_directory
from resilio_hpc.launch import placements as p
from resilio_hpc.launch.announce import say
from resilio_hpc.launch.chaining import Chain
from resilio_hpc.launch.notify import tell_verdict
from resilio_hpc.launch.notify_targets import masked
from resilio_hpc.launch.options import LaunchOptions
from resilio_hpc.slurm import commands
from resilio_hpc.slurm.allocation import detect

POLL_S = 0.05
VERDICT_POLL_S = 0.3
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # sbatch --signal=B:…: the time limit is near
FAREWELL_S = 20.0  # how long agents may take to end after the verdict


class Supervisor:
    """Keeps the agents of one job (or of one node) running until there is a verdict."""

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        self.allocation = detect(os.environ)
        self.site = p.site_of(options, self.allocation)
        self.run = run_directory.open_run(Path(options.run_dir))
        self.ledger = Ledger(self.run.path / "ledger", f"{self.site.key}-supervisor-{self._own_name()}")
        self.chain = Chain(options, self.site, self.run.path, self.ledger)
        self.placements: list[p.Placement] = []
        self.last_words: list[str] = []
        self.end_time: float | None = None
        self._received: list[int] = []
        self._forwarded = 0

    def _own_name(self) -> str:
        return self.allocation.node if self.allocation is not None and self.site.mode == "step" else "main"

    def run_to_verdict(self) -> int:
        """The whole life of a launch. Returns the exit code."""
        over = self.chain.judge_predecessor()
        if over is not None:
            self.last_words = [over] if self.site.leads else []
            return 0
        self.end_time = end_time = commands.job_end_time(self.site.job) if self.site.mode != "local" else None
        self.chain.begin()
        self.placements = p.placements(self.options, self.site, self.allocation, self.chain.active, end_time)
        self.ledger.append(
            "launch", mode=self.site.mode, job=self.site.job, nodes=self.site.nodes, link=self.chain.number,
            end_time=end_time, argv=masked(sys.argv), slurm=commands.version() if self.site.mode != "local" else "",
        )  # fmt: skip
        if self.site.leads:
            self._greet()
        self._catch_signals()
        try:
            verdict = self._supervise()
        finally:
            for placement in self.placements:
                placement.kill()
        return self._close(verdict)

    def _greet(self) -> None:
        where = {"local": "on this machine", "batch": f"in job {self.site.job}", "step": f"in job {self.site.job}"}
        link = f", link {self.chain.number}" if self.chain.number > 1 or self.chain.active else ""
        say(f"run {self.run.run_id} {where[self.site.mode]}{link}; everything is kept in {self.run.path}")
        if self.site.mode == "step":
            command = p.our_srun(os.environ)
            missing = p.missing_survival_flags(command) if command else []
            if missing:
                say(f"warning: this srun lacks {' '.join(missing)}: the loss of one node or task will end them all")
            say("note: the death of this srun ends all agents; plain resilio-launch in the batch script survives it")

    # -- the loop ----------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        names = {*WARNINGS, *(signal.Signals[name] for name in self.options.signals_to_handle)}
        for number in names:
            signal.signal(number, lambda received, _frame: self._received.append(received))

    def _supervise(self) -> dict[str, Any] | None:
        next_look = 0.0
        farewell: float | None = None
        verdict: dict[str, Any] | None = None
        while True:
            now = time.monotonic()
            self._forward_signals()
            self.chain.tick(time.time(), self.end_time)
            alive = self._tend_agents(now, verdict is not None)
            if verdict is None and (now >= next_look or not alive):
                next_look = now + VERDICT_POLL_S
                verdict = run_directory.read_verdict(self.run.path, self.site.key)
                if verdict is not None:
                    verdict = self._named(verdict)
                    farewell = now + FAREWELL_S
                    self.chain.close(verdict)
            if not alive and (verdict is not None or all(placement.given_up for placement in self.placements)):
                return verdict
            if farewell is not None and (now > farewell or self._only_lost_nodes_left(verdict, now, farewell)):
                return verdict
            time.sleep(POLL_S)

    def _named(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """SIGTERM does not tell its cause, Slurm does: a time limit carries on, the user's cancel does not."""
        if verdict.get("verdict") != "terminated" or self.site.mode == "local" or not self.site.leads:
            return verdict
        name = {"CANCELLED": "cancelled", "TIMEOUT": "time_limit"}.get(commands.job_state(self.site.job))
        if name is None:
            return verdict
        named = {**verdict, "verdict": name, "reason": f"Slurm ended the job: {name.replace('_', ' ')}"}
        run_directory.write_verdict(self.run.path, self.site.key, named)
        return named

    def _tend_agents(self, now: float, over: bool) -> bool:
        """Restart what ended too early; returns whether any agent runs or will."""
        alive = False
        for placement in self.placements:
            code = placement.ended(now)
            if code is not None and not over:
                over = run_directory.read_verdict(self.run.path, self.site.key) is not None
                if not over:
                    self._agent_ended(placement, code)
            if placement.process is None and not placement.given_up and not over and now >= placement.next_start:
                placement.start(now)
            alive = alive or placement.process is not None or not (placement.given_up or over)
        return alive

    def _agent_ended(self, placement: p.Placement, code: int) -> None:
        self.ledger.append("agent_ended", node=placement.node, exit_code=code, starts=len(placement.starts))
        if self.site.mode == "batch":  # srun ends with 0 or 1 when its node dies: ask whether we still have the node
            nodes = commands.job_nodes(self.site.job)
            if nodes is not None and placement.node not in nodes:
                placement.given_up = True
                self.ledger.append("node_left_job", node=placement.node)
        if placement.given_up:
            say(f"the agent on {placement.node} ends again and again (exit code {code}): not started any more")

    def _only_lost_nodes_left(self, verdict: dict[str, Any] | None, now: float, farewell: float) -> bool:
        """An srun to a node that is gone does not end by itself: do not wait for it once the others have left."""
        waited = now - (farewell - FAREWELL_S)
        running = [placement for placement in self.placements if placement.process is not None]
        return bool(verdict) and waited > 5.0 and self.site.mode == "batch" and len(running) < len(self.placements)

    def _forward_signals(self) -> None:
        while self._received:
            number = self._received.pop(0)
            self._forwarded += 1
            self.ledger.append("signal", signal=signal.Signals(number).name, to="agents")
            if number == signal.SIGINT and self._forwarded > 1:
                say("interrupted again: everything is killed at once")
                raise KeyboardInterrupt
            if number in WARNINGS:
                self.chain.submit_late(time.time())
            target = number if number == signal.SIGINT else signal.SIGUSR2 if number in WARNINGS else signal.SIGTERM
            if self.site.mode == "batch":
                self._signal_steps("USR2" if target == signal.SIGUSR2 else "TERM")
            else:
                for placement in self.placements:
                    placement.signal(target)

    def _signal_steps(self, name: str) -> None:
        try:  # srun turns SIGTERM into a kill; scancel reaches the agents themselves
            commands.cancel(self.site.job, name)
        except SlurmError as error:
            say(f"could not pass on SIG{name}: {error}")

    # -- the end -----------------------------------------------------------------------------------------------

    def _close(self, verdict: dict[str, Any] | None) -> int:
        for placement in self.placements:
            if placement.settings.supervisor_pid:
                process_tree.sweep(f"{self.run.run_id}:{placement.node}")
                for directory in run_directory.node_directories(self.run.run_id, placement.node)[1:]:
                    leftovers.remove(directory)
        if verdict is None:
            verdict = {"verdict": "agents_lost", "exit_code": 1, "reason": "every agent ended without a verdict"}
            if self.site.leads:
                run_directory.write_verdict(self.run.path, self.site.key, verdict)
                self.chain.close(verdict)
                tell_verdict(self.run, self.site.key, self.ledger.append, verdict)  # no controller did
        code = self.chain.exit_code(verdict)
        if self.site.leads:
            self.last_words = closing.last_words(self.run.path, verdict, self.site.job, self.chain.successor)
        self.ledger.append("launch_ends", verdict=verdict["verdict"], exit_code=code)
        return code


def run(options: LaunchOptions) -> int:
    """Run a launch to its verdict."""
    supervisor = Supervisor(options)
    allocation = supervisor.allocation
    if supervisor.site.mode == "step" and allocation is not None and allocation.local_task > 0:
        say(f"task {allocation.task} ends: one resilio-launch per node is enough (use srun --ntasks-per-node=1)")
        return 0
    if options.view and supervisor.site.leads:
        from resilio_hpc.launch.live import with_view

        code = with_view(supervisor.run.path, supervisor.run_to_verdict)
    else:
        code = supervisor.run_to_verdict()
    closing.show(supervisor.last_words)
    supervisor.chain.requeue_instead()
    return code
