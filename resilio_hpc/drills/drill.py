"""Fault drills: one job, its faults, and whether the run came over them with the right result (OPS-8)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES
from resilio_hpc.drills import judge as drill_judge
from resilio_hpc.drills.acts import CPU_GROUPS, Actor
from resilio_hpc.drills.enough import enough
from resilio_hpc.drills.kind import HEARTBEAT_S, HURTS, LOCAL, PREEMPTION, Act, Drill
from resilio_hpc.drills.script import counting
from resilio_hpc.drills.stamps import first_end_after, longest_pause, read_lives, repeated_steps

SCRIPT = Path(counting.__file__).resolve()
LIMIT_S = 240.0  # for one job; each further one of a chain may take as long
POLL_S = 0.05
QUEUE_POLL_S = 1.0
NODES = 4  # of a drill's own cluster
PRELOAD = ("numpy", "resilio_hpc.ckpt", "resilio_hpc.train")  # of ranks without torch
SMALL_TESTS = "cpu_matrix = 256\ncpu_message_bytes = 65536\nblock_s = 0.3\n"  # longer than what makes a node slow
NOT_CHECKED = "not checked: the run did not complete"
JITTERS = 10  # a jitter's span is cut into so many parts


@dataclass(frozen=True)
class DrillResult:
    """What one drill came to; times in seconds.

    ``recovery_s``: from the last act that hurt until a step was done again by ranks that started after it (of a rank
    that failed by itself: what the ledger says). ``pause_s``: the longest time in which no rank ended a step.
    ``lives``: how often all ranks were started. ``two_at_once``: what speaks against one round at a time; "": nothing.
    ``lost_steps``: of the first recovery, by the ledger; ``repeated_steps``: of all, by the ranks' stamps.
    ``state``: whether the ranks computed what they would have without a fault.
    """

    name: str
    passed: bool
    why: str
    recovery_s: float | None
    detection_s: float | None
    lost_steps: int | None
    pause_s: float
    lives: int
    two_at_once: str
    total_s: float
    repeated_steps: int | None = None
    state: str = NOT_CHECKED


def cluster_for(drill: Drill, name: str, slurm: str = HOST_SERIES) -> DevCluster[RackMachines]:
    """Start a cluster that the drill can be done on; the caller takes it down."""
    return devcluster.start(
        name,
        nodes=max(NODES, drill.nodes),
        slurm=slurm,
        binds=[*binds(), *([CPU_GROUPS] if drill.slow and CPU_GROUPS.is_dir() else [])],
        shared_mount=drill.shared_mount,
        gpus=drill.gpus,
        conf=PREEMPTION if drill.preemption else (),
        timeout_s=120.0,
    )


class DrillRun:
    """One drill on a cluster whose nodes are all idle. ``repeat`` chooses the jitter of acts that have one.

    ``torch`` False: the ranks sum over plain sockets, so that nothing imports torch.
    """

    def __init__(
        self, cluster: DevCluster[RackMachines], drill: Drill, name: str, repeat: int = 0, torch: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.drill = drill
        self.directory = cluster.shared / name
        self._repeat = repeat
        self._torch = torch or drill.torch
        self._say = say
        self._name = name
        self._reader = LedgerReader(self.directory / "ledger")
        self._events: list[Event] = []
        self._done: list[float] = []  # when each act was done, Unix seconds
        self._seen = 0  # events that were there when the last act was done
        self._next_look = 0.0
        self._progressed_at = 0.0
        self._told = False  # the ranks, that they may end

    def run(self, started: Callable[[], None] = lambda: None) -> DrillResult:
        """Submit, act, wait for the end, judge. ``started`` is called, more than once, when training has begun."""
        began = time.monotonic()
        job = self.cluster.submit(self._script())
        actor = Actor(self.cluster, job, self._joiner(), self.directory)
        try:
            while not self._over():
                time.sleep(POLL_S)
                self._events += self._reader.read_new()
                if any(event.kind in ("first_step", "verdict") for event in self._events):
                    started()
                self._act(actor)
                self._end_when_enough()
                if time.monotonic() > began + LIMIT_S * self.drill.jobs:
                    raise ResilioError(f"no end within {LIMIT_S * self.drill.jobs:.0f} s")
            self._judge(actor.struck, actor.slowed)
        except ResilioError as error:
            return self._result(str(error), began)
        finally:
            actor.end()
            actor.clean()
        return self._result("", began)

    @property
    def acts_at(self) -> list[float]:
        """Return when each act was done, in Unix seconds."""
        return list(self._done)

    # -- the job -----------------------------------------------------------------------------------------------

    def _script(self) -> str:
        drill = self.drill
        no_torch = () if self._torch else (f"--no-torch --preload={','.join(PRELOAD)}",)
        without = () if self._torch else ("--without-torch",)
        arguments = [
            f"--nnodes={drill.nnodes}", f"--spares={drill.spares}", "--nproc-per-node=2",
            f"--run-dir=/shared/{self._name}", f"--heartbeat-timeout={HEARTBEAT_S:g}", *drill.launch_arguments,
            *no_torch, str(SCRIPT), *without, f"--steps={drill.steps}", f"--step-seconds={drill.step_s}",
            f"--result=/shared/{self._name}.result", f"--stamps=/nvme/{self._name}",
            f"--enough=/nvme/{self._name}.enough", *drill.script_arguments,
        ]  # fmt: skip
        gpus = [f"--gpus-per-node={drill.gpus}"] if drill.gpus else []
        if any(act.do == "fill_local" for act in drill.acts):
            for node in self.cluster.nodes:
                self.cluster.run(node, ["mkdir", "-p", LOCAL])
        srun = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 " if drill.srun else ""
        return self._batch_script("drill", [f"--nodes={drill.nodes}", *gpus, *drill.sbatch], srun, arguments)

    def _joiner(self) -> str:
        """Return a job of one node that joins the run; of a node that the run does not have."""
        return self._batch_script(
            "joiner", ["--nodes=1", "--no-kill", "--exclusive"], "", [f"--join=/shared/{self._name}"]
        )

    def _batch_script(self, name: str, options: Sequence[str], before: str, arguments: Sequence[str]) -> str:
        launcher = Path(sys.executable).with_name("resilio-launch")
        return (
            f"#!/bin/bash\n#SBATCH --job-name={name} --time={self.drill.time_limit} {' '.join(options)}\n"
            f"#SBATCH --output=/shared/{self._name}.txt --open-mode=append\n{self._policy()}"
            f"exec {before}{launcher} {' '.join(arguments)}\n"
        )

    def _policy(self) -> str:
        """Return the line that gives tests of nodes a policy of small work, where the drill has such a test."""
        if not any(act.do == "test_nodes" for act in self.drill.acts):
            return ""
        (self.cluster.shared / f"{self._name}.toml").write_text(SMALL_TESTS)
        return f"export OMP_NUM_THREADS=1 RESILIO_PAIR_POLICY=/shared/{self._name}.toml\n"

    def _over(self) -> bool:
        """Whether no job is in the queue any more; slurmctld, when it can be asked, is asked now and then."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + QUEUE_POLL_S
        states = "PD,R,S,CF,CG" if self.drill.jobs > 1 else "PD,R,S,CF"  # a requeued job completes, then pends
        asked = self.cluster.run("ctl", ["squeue", "-h", "-t", states, "-o", "%i"], check=False)
        return asked.returncode == 0 and not asked.stdout.strip()

    # -- acts --------------------------------------------------------------------------------------------------

    def _act(self, actor: Actor) -> None:
        while len(self._done) < len(self.drill.acts):
            act = self.drill.acts[len(self._done)]
            if not self._is_due(act):
                return
            if not self._done:
                actor.settle_roles(self._events, self._batch_host())
            at = time.time()
            self._seen = len(self._events)
            actor.do(act, self._events)
            self._done.append(at)
            self._say(f"{act.do.replace('_', ' ')} {' '.join(actor.roles[act.to])}".rstrip())

    def _end_when_enough(self) -> None:
        if not self._told and enough(self.drill, self._events, self._done, time.time()):
            self._told = True
            for node in self.cluster.nodes:
                (self.cluster.layout.nvme(node) / f"{self._name}.enough").touch()

    def _is_due(self, act: Act) -> bool:
        if not self._done:
            if not self._progressed_at and progressed(self._events):
                self._progressed_at = time.time()
                self._say("it trains, and a step is committed")
            return 0.0 < self._progressed_at <= time.time() - act.after_s
        wait_s = act.after_s + act.jitter_s * (self._repeat % JITTERS) / JITTERS
        happened = not act.on or any(event.kind == act.on for event in self._events[self._seen :])
        return happened and time.time() >= self._done[-1] + wait_s

    def _batch_host(self) -> str:
        launch = next(event for event in self._events if event.kind == "launch")
        return str(launch.fields["nodes"][0])

    # -- judgement ---------------------------------------------------------------------------------------------

    def _judge(self, struck: int, slowed: str) -> None:
        """Raise ResilioError with what is wrong. ``struck``: the rank that got a signal; ``slowed``: the slow node."""
        self._events += self._reader.read_new()
        acts = self.drill.acts
        if len(self._done) < len(acts):
            raise ResilioError(f"the run ended before {acts[len(self._done)].do!r} was done")
        lives = read_lives(self._stamps())
        shared, name = self.cluster.shared, self._name
        drill_judge.judge(
            self.drill, self._events, lives, self.directory, shared / f"{name}.result", self._done, struck, slowed
        )

    def _stamps(self) -> list[tuple[str, Path]]:
        return [(node, self.cluster.layout.nvme(node) / self._name) for node in self.cluster.nodes]

    def _result(self, why: str, began: float) -> DrillResult:
        recovered = next((event.fields for event in self._events if event.kind == "recovered"), {})
        lives = read_lives(self._stamps())
        hurt = [at for act, at in zip(self.drill.acts, self._done, strict=False) if act.do in HURTS]
        again = first_end_after(lives, hurt[-1]) if hurt else None
        recovery_s = round(again - hurt[-1], 3) if again is not None else None
        return DrillResult(
            name=self.drill.full_name,
            passed=not why,
            why=why,
            recovery_s=recovery_s if hurt else recovered.get("recovery_s"),
            detection_s=recovered.get("detection_s"),
            lost_steps=recovered.get("lost_steps"),
            pause_s=round(longest_pause(lives), 3),
            lives=len(lives),
            two_at_once=drill_judge.two_at_once(self._events, lives),
            total_s=round(time.monotonic() - began, 1),
            repeated_steps=repeated_steps(lives),
            state=self._state(),
        )

    def _state(self) -> str:
        """Return whether the ranks' number is that of as many steps without a fault."""
        try:
            result = json.loads((self.cluster.shared / f"{self._name}.result").read_text())
            steps, values = int(result["steps"]), result["values"]
        except (OSError, ValueError, KeyError):
            return NOT_CHECKED
        right = values == [counting.expected(steps)]
        return f"{'right' if right else 'WRONG'}: the number that all ranks hold after {steps} steps"


def progressed(events: Sequence[Event]) -> bool:
    """Whether training runs and has committed something, so that a fault now is a fault in the middle. Pure."""
    return any(event.kind == "committed" for event in events) and any(e.kind == "first_step" for e in events)
