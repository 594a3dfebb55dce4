"""The course of the demo: an undisturbed run, then the same run with faults, then the comparison of every bit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event
from resilio_hpc.devtools.demo import stage as s
from resilio_hpc.devtools.demo.scenario import STRIKES, FaultOutcome, Scenario, Strike, outcome, time_limits

Say = Callable[[Text], None]
FAULT, RECOVERED = "red", "green"  # as in the live view
POLL_S = 0.25
QUIET_S = 15.0  # after so long without a line, one tells how far the run is
UNDISTURBED_LIMIT_S = 900.0
DISTURBED_LIMIT_S = 1500.0


@dataclass(frozen=True)
class Blow:
    """A fault that was carried out. ``at``: Unix seconds."""

    strike: Strike
    node: str
    at: float


@dataclass(frozen=True)
class DemoResult:
    """The contents of ``summary.json``."""

    identical: bool
    faults: list[FaultOutcome]
    links: int
    slurm_version: str
    goodput: float | None
    steps: int
    undisturbed: dict[str, Any]
    disturbed: dict[str, Any]

    def as_json(self) -> str:
        """Return the summary file's text."""
        return json.dumps(asdict(self), indent=1)

    @property
    def success(self) -> bool:
        """Return whether all faults were overcome, and the bits are the same."""
        return self.identical and all(fault.recovered for fault in self.faults)


def launch_command(stage: s.DemoStage, scenario: Scenario, name: str, chained: bool) -> list[str]:
    """Return the command of the batch script, as a user would write it."""
    run_directory = stage.visible(stage.directory / name)
    hash_file = stage.visible(stage.directory / f"{name}.json")
    return [
        str(Path(sys.prefix) / "bin" / "resilio-launch"),
        f"--nnodes={scenario.training_nodes}",
        f"--spares={scenario.spares}",
        f"--nproc-per-node={scenario.ranks_per_node}",
        *(["--chain"] if chained and stage.slurm_version else []),
        f"--run-dir={run_directory}",
        str(s.EXAMPLE),
        *scenario.script_arguments(hash_file, throttled=chained),
    ]  # fmt: skip


class Play:
    """One performance on one stage."""

    def __init__(
        self, stage: s.DemoStage, scenario: Scenario, say: Say, look: Callable[[Path], None] | None = None
    ) -> None:
        """Take where, what, and how to print. ``look`` gets the disturbed run's directory while all is well again."""
        self._look = look
        self._stage = stage
        self._scenario = scenario
        self._print = say
        self._said_at = 0.0  # monotonic seconds
        self._blows: list[Blow] = []
        self._broken: str | None = None
        self._told: dict[str, int] = {}  # number of events of each run that were printed

    def _say(self, line: str, style: str = "") -> None:
        self._print(Text(line, style))
        self._said_at = time.monotonic()

    def perform(self, goodput: Callable[[list[Event]], float | None]) -> DemoResult:
        """Do both runs and the comparison. Raises ResilioError when a run does not end as it should."""
        undisturbed = self._undisturbed()
        disturbed = self._disturbed()
        events = s.events_of(self._stage.directory / "disturbed")
        faults = [outcome(blow.strike.kind, blow.node, blow.at, events) for blow in self._blows]
        faults += time_limits(events)
        links = len({event.writer.split("-")[0] for event in events if event.kind == "launch"})
        if not self._stage.slurm_version:
            links = sum(event.kind == "launch" for event in events)
        identical = undisturbed["hash"] == disturbed["hash"] and undisturbed["step"] == disturbed["step"]
        return DemoResult(
            identical, faults, links, self._stage.slurm_version, goodput(events), self._scenario.steps, undisturbed,
            disturbed,
        )  # fmt: skip

    def _undisturbed(self) -> dict[str, Any]:
        self._say("first the undisturbed run, for comparison")
        began = time.monotonic()
        self._stage.begin("undisturbed", launch_command(self._stage, self._scenario, "undisturbed", False), False)
        self._follow("undisturbed", UNDISTURBED_LIMIT_S, lambda events, step: None)
        final = self._final("undisturbed")
        self._say(f"undisturbed: {final['step']} steps in {time.monotonic() - began:.0f} s, hash {final['hash'][:16]}…")
        return final

    def _disturbed(self) -> dict[str, Any]:
        strikes = list(STRIKES)
        self._say("now the same run with faults" + (f" and a time limit of {self._scenario.time_limit} min for each job"
                  if self._stage.slurm_version else ""))  # fmt: skip
        self._stage.begin("disturbed", launch_command(self._stage, self._scenario, "disturbed", True), True)

        def act(events: list[Event], step: int) -> None:
            if self._look is not None and self._blows and self._calm(events):
                self._look(self._stage.directory / "disturbed")
            if self._broken is not None and (self._calm(events) or self._job_ended_since_the_blow(events)):
                self._say(f"{self._broken} is repaired and powered on: a spare from now on")
                self._stage.repair(self._broken)
                self._broken = None
            if strikes and step >= strikes[0].at * self._scenario.steps and self._calm(events):
                self._strike(strikes.pop(0), events, step)

        self._follow("disturbed", DISTURBED_LIMIT_S, act)
        if isinstance(self._stage, s.LocalStage) and not (self._stage.directory / "disturbed.json").exists():
            self._say("the next job carries on")
            self._stage.begin("disturbed", launch_command(self._stage, self._scenario, "disturbed", True), True)
            self._follow("disturbed", DISTURBED_LIMIT_S, act)
        return self._final("disturbed")

    def _follow(self, name: str, limit_s: float, act: Callable[[list[Event], int], None]) -> None:
        """Watch a run until none of its jobs runs any more; print its events about faults."""
        deadline = time.monotonic() + limit_s
        told = self._told.get(name, 0)
        warned = False
        while self._stage.running():
            time.sleep(POLL_S)
            if time.monotonic() - self._said_at > QUIET_S:
                done = self._step(name)
                self._say(f"  step {done} of {self._scenario.steps}" if done >= 0 else "  the ranks start")
            events = s.events_of(self._stage.directory / name)
            if isinstance(self._stage, s.LocalStage):
                self._stage.note(events)
            step = self._step(name)
            act(events, step)
            for event in events[told:]:
                self._tell(event)
            told = self._told[name] = len(events)
            if isinstance(self._stage, s.LocalStage) and name == "disturbed" and not warned:
                warned = step > 0.6 * self._scenario.steps and self._calm(events) and self._warn_local()
            if time.monotonic() > deadline:
                raise ResilioError(f"the {name} run did not end within {limit_s:.0f} s: {self._tail(name)}")

    def _warn_local(self) -> bool:
        launches = [e for e in s.events_of(self._stage.directory / "disturbed") if e.kind == "launch"]
        if isinstance(self._stage, s.LocalStage) and len(launches) == 1:
            self._say("no Slurm here: its warning before the time limit is sent by hand")
            self._stage.warn()
        return True

    def _tell(self, event: Event) -> None:
        fields = event.fields
        if event.kind == "recovered":
            lost = fields.get("lost_steps")
            again = f", {lost} step(s) done again" if lost else ""
            self._say(f"  recovered{again}", RECOVERED)
        elif event.kind == "decision":
            self._say(f"  decision: {str(fields.get('rung')).replace('_', ' ')}: {fields.get('reason')}")
        elif event.kind == "launch" and fields.get("link", 1) != 1:
            self._say(f"job {fields.get('job')} carries on (link {fields.get('link')} of the chain)")
        elif event.kind == "stop_agreed":
            self._say(f"time limit near: all ranks stop after step {fields.get('step')}, which is saved")

    def _calm(self, events: list[Event]) -> bool:
        """Return whether the run has recovered from the last fault and made a step since: the next fault may come."""
        last = self._blows[-1].at if self._blows else 0.0
        recovered = not self._blows or outcome("", "", last, events).recovered
        verdicts = [e for e in events if e.kind in ("first_step", "stopping", "launch", "rank_failed", "node_lost")]
        return recovered and bool(verdicts) and verdicts[-1].kind == "first_step"

    def _job_ended_since_the_blow(self, events: list[Event]) -> bool:
        """Return whether the time limit came first: the next job may need the broken node in order to begin."""
        return any(e.kind == "launch_ends" and e.time > self._blows[-1].at for e in events)

    def _strike(self, strike: Strike, events: list[Event], step: int) -> None:
        controller = next((e for e in reversed(events) if e.kind == "controller"), None)
        leader = str(controller.fields["node"]) if controller else ""
        start = next(e for e in reversed(events) if e.kind == "round")
        members = [str(node) for node in start.fields["members"]]
        batch_host = members[0]
        others = [node for node in members if node != batch_host]
        others = [node for node in others if node != leader] or others
        node = {"controller_lost": leader, "rank_killed": members[1]}.get(strike.kind, others[-1])
        at = time.time()
        if strike.kind == "rank_killed":
            ranks = next(e for e in reversed(events) if e.kind == "ranks" and e.fields["node"] == node)
            self._stage.kill_rank(node, int(next(iter(ranks.fields["pids"].values()))))
        elif strike.kind == "node_lost":
            if not self._stage.cut_power(node):
                self._say("(no power cut without a dev cluster)")
                return
            self._broken = node
        else:
            self._stage.kill_agent(node)
        self._blows.append(Blow(strike, node, at))
        self._say(f"step {step}: {strike.title}, on {node}", FAULT)

    def _step(self, name: str) -> int:
        try:
            status = json.loads((self._stage.directory / name / "status.json").read_text())
            return max((int(agent["step"]) for agent in status["agents"].values()), default=-1)
        except (OSError, ValueError, KeyError):
            return -1

    def _final(self, name: str) -> dict[str, Any]:
        try:
            final = json.loads((self._stage.directory / f"{name}.json").read_text())
        except (OSError, ValueError):
            raise ResilioError(f"the {name} run did not finish: {self._tail(name)}") from None
        return dict(final)

    def _tail(self, name: str) -> str:
        try:
            lines = (self._stage.directory / f"{name}.txt").read_text(errors="replace").splitlines()
        except OSError:
            return "it left no output"
        return "\n    ".join(["its last lines:", *lines[-15:]])
