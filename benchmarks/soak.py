#!/usr/bin/env python3
"""Hours of faults of all kinds on a real Slurm dev cluster: nothing lost, nothing leaked, and goodput counted twice.

    python benchmarks/soak.py --seconds 7200 --mtbf 60 --keep DIR       # two hours
    python benchmarks/soak.py --keep DIR --judge                        # judge again what is there

Needs root and Slurm (see docs/devcluster.md). A chain of jobs trains on four nodes. Faults come at times drawn by
chance, each of a kind and on a node drawn by chance, also while the run recovers from the one before. Ranks stamp each
step on their own node's disk. At the end soak_account.py judges: the result is exact, no two rounds trained at once,
no step is missing, processes, memory, descriptors and files are as few as at the beginning. Goodput by the report
stands beside that of the stamps and of slurmctld's times, and beside the simulator's.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import soak_account
from resilio_hpc.core import process_title
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines
from resilio_hpc.drills.acts import Actor
from resilio_hpc.drills.kind import HEARTBEAT_S, Act
from resilio_hpc.drills.script import counting
from soak_faults import STRIKES

NODES = 4
STEP_S = 0.2
SAMPLE_S = 30.0
END_S = 240.0  # for the run to end when it may
RETRY_S = 2.0  # where there is nothing to strike just now
UNDO = ("boot", "heal", "start_slurmd", "start_slurmctld", "release_shared", "continue_agent")
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "STOPPED")
PRELOAD = "numpy,resilio_hpc.ckpt,resilio_hpc.train"


class Soak:
    """One chain of jobs on a cluster of its own, what is done to it, and what is written down of it in ``place``."""

    def __init__(self, cluster: DevCluster[RackMachines], place: Path, options: argparse.Namespace) -> None:
        self.cluster, self.place, self.options = cluster, place, options
        self.run = cluster.shared / "soak"
        self._draw = random.Random(options.seed)
        self._reader = LedgerReader(self.run / "ledger")
        self._events: list[Event] = []
        self._due: list[tuple[float, int, Act, dict[str, tuple[str, ...]], str]] = []
        self._number = 0
        self._jobs: dict[str, str] = {}
        self._next_look = 0.0
        self._over = False  # no job of the run is in the queue
        self._actor = Actor(cluster, 0, "", self.run)

    def go(self) -> None:
        """Run all of it; ^C ends it sooner, in order."""
        with contextlib.suppress(KeyboardInterrupt):
            self._strike_on()
        self._end()

    def _strike_on(self) -> None:
        self._sample("before")
        self.cluster.submit(self._script())
        began = time.time()
        next_fault, next_sample = began + self._draw.expovariate(1 / self.options.mtbf), began + SAMPLE_S
        while True:
            time.sleep(0.1)
            now = time.time()
            self._events += self._reader.read_new()
            self._watch_jobs()
            if self._over:
                self._note("faults", at=now, strike="", why="the run ended by itself")
                break
            if now > began + self.options.seconds:
                break
            if now > next_fault:
                next_fault = now + (self._draw.expovariate(1 / self.options.mtbf) if self._strike(now) else RETRY_S)
            while self._due and self._due[0][0] <= now:
                self._do(*heapq.heappop(self._due)[2:])
            if now > next_sample:
                next_sample += SAMPLE_S
                self._sample("during")

    def _script(self) -> str:
        launcher = Path(sys.executable).with_name("resilio-launch")
        words = [
            f"--nnodes=2:{NODES}", "--nproc-per-node=2", "--run-dir=/shared/soak", "--chain",
            f"--heartbeat-timeout={HEARTBEAT_S:g}", "--hang-timeout=20", "--max-restarts=1000", "--chain-max=1000",
            "--no-torch", f"--preload={PRELOAD}", str(Path(counting.__file__).resolve()), "--without-torch",
            "--steps=10000000", f"--step-seconds={STEP_S}", "--every=25", "--elements=20000",
            "--result=/shared/soak.result", "--stamps=/nvme/soak", "--enough=/nvme/soak.enough",
        ]  # fmt: skip
        return (
            f"#!/bin/bash\n#SBATCH --job-name=soak --time={self.options.job_minutes} --nodes={NODES}\n"
            "#SBATCH --no-kill --exclusive\n"
            "#SBATCH --output=/shared/soak.txt --open-mode=append --chdir=/nvme\n"
            f"exec {launcher} {' '.join(words)}\n"
        )

    # -- faults ----------------------------------------------------------------------------------------------------

    def _strike(self, now: float) -> bool:
        """Draw a fault and begin it; return whether there was anything to strike."""
        if not self._trains_or_recovers():
            return False
        strike = self._draw.choices(STRIKES, [one.weight for one in STRIKES])[0]
        try:
            batch_host = [event for event in self._events if event.kind == "launch"][-1].fields["nodes"][0]
            self._actor.settle_roles(self._events, str(batch_host))
        except (ResilioError, IndexError):
            return False  # one node is left, or the run starts
        roles, at = dict(self._actor.roles), now
        for act in strike.acts:
            at += act.after_s + self._draw.uniform(0.0, act.jitter_s)
            self._number += 1
            heapq.heappush(self._due, (at, self._number, act, roles, strike.name))
        self._note("faults", at=now, strike=strike.name, kind=strike.simulated,
                   nodes=sorted({node for act in strike.acts for node in roles[act.to]}))  # fmt: skip
        return True

    def _trains_or_recovers(self) -> bool:
        """Return whether a job of the run is there and has had ranks."""
        newest = [event.kind for event in self._events if event.kind in ("launch", "ranks", "launch_ends")]
        return bool(newest) and newest[-1] == "ranks"

    def _do(self, act: Act, roles: dict[str, tuple[str, ...]], name: str) -> None:
        self._actor.roles = roles
        why = ""
        try:
            if act.do == "continue_agent":
                self._continue_agents(roles[act.to])
            else:
                self._actor.do(act, self._events)
            if act.do in ("boot", "heal"):
                self._resume(roles[act.to])
        except (ResilioError, OSError, ValueError) as error:
            why = str(error)
        self._note("acts", at=time.time(), strike=name, act=act.do, to=list(roles[act.to]), why=why)

    def _continue_agents(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            for process in self.cluster.machines.pids(node):
                if process_title.is_agent(process.argv):
                    os.kill(process.host_pid, signal.SIGCONT)

    def _resume(self, nodes: Sequence[str]) -> None:
        """Do what an administrator does with nodes that are back: those that Slurm holds for down can have jobs."""
        for node in nodes:
            self.cluster.run("ctl", ["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)

    # -- what is written down --------------------------------------------------------------------------------------

    def _note(self, what: str, **fields: Any) -> None:
        with (self.place / f"{what}.jsonl").open("a") as file:
            file.write(json.dumps(fields) + "\n")
        if what == "faults":
            print(
                time.strftime("%H:%M:%S"), fields["strike"] or fields.get("why"), *fields.get("nodes", []), flush=True
            )

    def _watch_jobs(self) -> None:
        """Write down the times of each job, as slurmctld gives them, whenever they change."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        asked = self.cluster.run("ctl", ["scontrol", "--oneliner", "show", "jobs"], check=False)
        if asked.returncode != 0:
            return  # slurmctld is dead just now
        self._over = not any(f"JobState={state} " in asked.stdout for state in LIVE)
        for line in asked.stdout.splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "JobId" not in fields:
                continue
            row = {key: fields.get(key, "") for key in ("JobId", "JobState", "StartTime", "EndTime", "Restarts")}
            if self._jobs.get(row["JobId"]) != (said := json.dumps(row)):
                self._jobs[row["JobId"]] = said
                self._note("jobs", seen=time.time(), **row)

    def _sample(self, when: str) -> None:
        """Write down each process of the nodes: role, memory, descriptors; and what lies in their shared memory."""
        for node in self.cluster.nodes:
            processes = self.cluster.machines.pids(node)
            rows = [row for process in processes if (row := look(process.host_pid, process.argv))]
            shared = shared_memory(processes[0].host_pid) if processes else {}
            self._note("samples", at=time.time(), when=when, node=node, processes=rows, shm=shared)

    def _end(self) -> None:
        """Undo what is open, let the run end, and keep its files."""
        for _, _, act, roles, name in sorted(self._due, key=lambda one: one[0]):
            if act.do in UNDO:
                self._do(act, roles, name)
        calm = time.monotonic() + 20.0
        deadline = time.monotonic() + END_S
        told = False
        while time.monotonic() < deadline:
            time.sleep(1.0)
            self._events += self._reader.read_new()
            self._watch_jobs()
            if not told and time.monotonic() > calm:
                told = True
                for node in self.cluster.nodes:
                    (self.cluster.layout.nvme(node) / "soak.enough").touch()
            if self._over:
                break
            self._resume(self.cluster.nodes)  # those that slurmctld did not find after its restart
        time.sleep(5.0)  # what a job leaves behind ends within its kill wait
        self._watch_jobs()
        self._sample("after")
        for node in self.cluster.nodes:
            shutil.copytree(self.cluster.layout.nvme(node) / "soak", self.place / "stamps" / node, dirs_exist_ok=True)
        shutil.copytree(self.run, self.place / "run", dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("checkpoints", "*.sock"))  # fmt: skip
        for name in ("soak.result", "soak.txt"):
            if (self.cluster.shared / name).exists():
                shutil.copy(self.cluster.shared / name, self.place)


def look(pid: int, argv: Sequence[str]) -> dict[str, Any] | None:
    """Return a process as it is now; None for one that has ended or is none of the run's."""
    role = process_title.helper_in("\0".join(argv).encode())
    line = " ".join(argv)
    if not role:
        role = "rank" if line.startswith("resilio rank") else "python" if "python" in line else argv[0] if argv else ""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        pss = next(int(row.split()[1]) for row in rollup.splitlines() if row.startswith("Pss:"))
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (OSError, StopIteration):
        return None
    return {"pid": pid, "role": Path(role).name, "kb": pss, "fds": descriptors}


def shared_memory(pid: int) -> dict[str, int]:
    """Return the bytes of each file in a machine's /dev/shm and in its /tmp."""
    found = {}
    for folder in ("dev/shm", "tmp"):
        root = Path(f"/proc/{pid}/root/{folder}")
        try:
            found |= {f"{folder}/{path.relative_to(root)}": path.stat().st_size for path in root.rglob("*")
                      if path.is_file()}  # fmt: skip
        except OSError:
            continue  # it has just been removed
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200.0, help="of faults (7200)")
    parser.add_argument("--mtbf", type=float, default=60.0, help="mean seconds between two faults (60)")
    parser.add_argument("--job-minutes", type=int, default=30, help="time limit of each job of the chain (30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, required=True, metavar="DIR", help="where all that was written down stays")
    parser.add_argument("--judge", action="store_true", help="only judge what is in --keep")
    options = parser.parse_args()
    if not options.judge:
        options.keep.mkdir(parents=True)
        cluster = devcluster.start(f"soak-{os.getpid()}", nodes=NODES, binds=binds(), shared_mount="fuse",
                                   timeout_s=120.0)  # fmt: skip
        try:
            Soak(cluster, options.keep, options).go()
        finally:
            cluster.down()
            devcluster.remove(cluster.name)
    return soak_account.judge(options.keep)


if __name__ == "__main__":
    sys.exit(main())
