"""Fault drills: one job, one fault, and whether the run came over it with the right result (OPS-8)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event
from resilio_hpc.demo import counting
from resilio_hpc.demo.scenario import Scenario
from resilio_hpc.demo.stage import SlurmStage, events_of
from resilio_hpc.slurm.devcluster import DevCluster

SCRIPT = Path(counting.__file__).resolve()
LIMIT_S = 180.0
POLL_S = 0.1


@dataclass(frozen=True)
class Drill:
    """What is done. ``at_step`` is when; ``verdict`` is what the run must end with."""

    name: str
    strike: str  # rank, agent, controller, power, scancel, "" (the script or Slurm strikes)
    nodes: int = 3  # of the allocation
    nnodes: str = "3"
    spares: int = 0
    steps: int = 250
    script_arguments: tuple[str, ...] = ()
    launch_arguments: tuple[str, ...] = ()
    verdict: str = "completed"
    kind: str = ""  # the recovery that the ledger must hold
    time_limit: int = 30  # minutes
    world_size: int = 6
    srun: bool = False  # the other way in: one srun for all agents


DRILLS = (
    Drill("rank SIGKILL", "rank", kind="rank_killed"),
    Drill("rank exception", "", script_arguments=("--raise-at", "60"), kind="rank_exception"),
    Drill("rank exits 0 too early", "", script_arguments=("--exit-at", "60"), kind="early_exit"),
    Drill("agent SIGKILL", "agent", kind="agent_lost"),
    Drill("controller's agent SIGKILL", "controller", kind="controller_lost"),
    Drill("node power cut, with a spare", "power", nodes=4, spares=1, kind="node_lost"),
    Drill("node power cut, no spare", "power", nnodes="2:3", kind="node_lost", world_size=4),
    Drill("time limit", "", steps=1200, launch_arguments=("--chain",), time_limit=1, kind="time_limit"),
    Drill("srun: rank SIGKILL", "rank", kind="rank_killed", srun=True),
    Drill("srun: agent SIGKILL", "agent", kind="agent_lost", srun=True),
    Drill("srun: node power cut, with a spare", "power", nodes=4, spares=1, kind="node_lost", srun=True),
    Drill("scancel", "scancel", verdict="cancelled", launch_arguments=("--chain",)),
)


@dataclass(frozen=True)
class DrillResult:
    """``recovery_s``: from the strike (or the rank's own failure) to the first step of all ranks after it."""

    name: str
    passed: bool
    why: str
    recovery_s: float | None
    detection_s: float | None
    lost_steps: int | None
    total_s: float


class DrillRun:
    """One drill on a cluster whose nodes are all idle."""

    def __init__(self, cluster: DevCluster, drill: Drill, name: str, python: str = sys.executable) -> None:
        self.cluster = cluster
        self.drill = drill
        self.directory = cluster.shared / name
        self.broken: str | None = None
        self._stage = SlurmStage(cluster, Scenario())
        self._name = name
        self._python = python
        self._struck_at: float | None = None
        self._job = 0

    def run(self) -> DrillResult:
        """Submit, strike, wait for the end, judge."""
        began = time.monotonic()
        self._job = self.cluster.submit(self._script())
        deadline = began + LIMIT_S
        while self._in_queue():
            time.sleep(POLL_S)
            events = events_of(self.directory)
            if self.drill.strike and self._struck_at is None and progressed(events):
                self._strike(events)
            if time.monotonic() > deadline:
                self.cluster.run("ctl", ["scancel", "--user=root"])
                return self._result(False, f"no end within {LIMIT_S:.0f} s", began)
        try:
            self._judge()
        except ResilioError as error:
            return self._result(False, str(error), began)
        return self._result(True, "", began)

    def _script(self) -> str:
        drill = self.drill
        launcher = Path(self._python).with_name("resilio-launch")
        arguments = [
            f"--nnodes={drill.nnodes}", f"--spares={drill.spares}", "--nproc-per-node=2",
            f"--run-dir=/shared/{self._name}", *drill.launch_arguments, str(SCRIPT), f"--steps={drill.steps}",
            f"--result=/shared/{self._name}.result", *drill.script_arguments,
        ]  # fmt: skip
        srun = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 " if drill.srun else ""
        return (
            f"#!/bin/bash\n#SBATCH --nodes={drill.nodes} --no-kill --time={drill.time_limit} --job-name=drill\n"
            f"#SBATCH --output=/shared/{self._name}.txt --open-mode=append\n"
            f"exec {srun}{launcher} {' '.join(arguments)}\n"
        )

    def _in_queue(self) -> bool:
        return bool(self.cluster.run("ctl", ["squeue", "-h", "-o", "%i"], timeout_s=20.0).stdout.strip())

    # -- strikes -----------------------------------------------------------------------------------------------

    def _strike(self, events: list[Event]) -> None:
        members = [str(node) for node in last(events, "round").fields["members"]]
        leader = str(last(events, "controller").fields["node"])
        batch_host = min(members)
        victims = [node for node in members if node not in (leader, batch_host)]
        actions: dict[str, Callable[[], None]] = {
            "rank": lambda: self._kill_rank(events, victims[0]),
            "agent": lambda: self._stage.kill_agent(victims[0]),
            "controller": lambda: self._stage.kill_agent(leader),
            "power": lambda: self._cut_power(victims[-1]),
            "scancel": lambda: self._scancel(),
        }
        self._struck_at = time.time()
        actions[self.drill.strike]()

    def _kill_rank(self, events: list[Event], node: str) -> None:
        ranks = [e for e in events if e.kind == "ranks" and e.fields["node"] == node][-1]
        self._stage.kill_rank(node, int(next(iter(ranks.fields["pids"].values()))))

    def _cut_power(self, node: str) -> None:
        self.broken = node
        self._stage.cut_power(node)

    def _scancel(self) -> None:
        self.cluster.run("ctl", ["scancel", str(self._job)])

    # -- judgement ---------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Raises ResilioError with what is wrong."""
        events = events_of(self.directory)
        if self.drill.strike and self._struck_at is None:
            raise ResilioError("the fault was never injected: training made no progress")
        self._judge_verdict()
        if self.drill.strike == "scancel" and not any(event.kind == "stop_agreed" for event in events):
            raise ResilioError("the ranks did not agree on a step to save before they ended")
        overlapping = rounds_overlap(events)
        if overlapping:
            raise ResilioError(overlapping)
        if self.drill.verdict == "completed":
            self._judge_value()
        kind = self.drill.kind
        if kind == "time_limit":
            if len({event.fields.get("job") for event in events if event.kind == "launch"}) < 2:
                raise ResilioError("the chain has only one job")
        elif kind and not any(e.kind == "recovered" and e.fields.get("kind") == kind for e in events):
            kinds = [e.fields.get("kind") for e in events if e.kind == "recovered"]
            raise ResilioError(f"the ledger holds {kinds}, not {kind}")

    def _judge_verdict(self) -> None:
        try:
            verdict = json.loads((self.directory / "verdict.json").read_text())["verdict"]
        except (OSError, ValueError, KeyError):
            raise ResilioError("there is no verdict") from None
        if verdict != self.drill.verdict and not (self.drill.verdict == "cancelled" and verdict == "terminated"):
            raise ResilioError(f"the verdict is {verdict}, not {self.drill.verdict}")

    def _judge_value(self) -> None:
        try:
            result = json.loads((self.cluster.shared / f"{self._name}.result").read_text())
        except (OSError, ValueError):
            raise ResilioError("there is no result") from None
        if self.drill.world_size != 6:
            return  # the world shrank in between: the value depends on when, the verdict says the rest
        right = [counting.expected(self.drill.steps, self.drill.world_size)]
        if result["values"] != right:
            raise ResilioError(f"the result is {result['values']}, not {right}: a step was lost, doubled or torn")

    def _result(self, passed: bool, why: str, began: float) -> DrillResult:
        recovered = [e for e in events_of(self.directory) if e.kind == "recovered"]
        fields = recovered[0].fields if recovered else {}
        seconds = fields.get("recovery_s")
        if self._struck_at is not None and "at" in fields:
            seconds = round(float(fields["at"]) - self._struck_at, 3)
        return DrillResult(
            self.drill.name, passed, why, seconds, fields.get("detection_s"), fields.get("lost_steps"),
            round(time.monotonic() - began, 1),
        )  # fmt: skip


def progressed(events: list[Event]) -> bool:
    """Whether training runs and has committed something, so that a fault now is a fault in the middle. Pure."""
    return any(event.kind == "committed" for event in events) and any(e.kind == "first_step" for e in events)


def last(events: list[Event], kind: str) -> Event:
    """The newest event of a kind. Raises ResilioError."""
    found = next((event for event in reversed(events) if event.kind == kind), None)
    if found is None:
        raise ResilioError(f"the ledger has no {kind} event")
    return found


def rounds_overlap(events: list[Event]) -> str:
    """Whether ranks of two rounds ran on reachable nodes at once; "" when not. Pure.

    On each node the ranks of a round must have been stopped before those of a later one start.
    """
    running: dict[str, int] = {}
    for event in events:
        node = str(event.fields.get("node", ""))
        if event.kind == "ranks":
            number = int(event.fields["round"])
            if running.get(node, number) != number:
                return f"on {node} ranks of round {number} started beside those of round {running[node]}"
            running[node] = number
        elif event.kind in ("ranks_stopped", "agent", "spawner_died"):
            running.pop(node, None)
    return ""
