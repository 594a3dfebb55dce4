"""Chains of real jobs that run ``chain_probe.py``, as fixtures: the launcher's chain without agents."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.demo.stage import binds
from resilio_hpc.slurm.devcluster import DevCluster, image
from tests.support.clusters import repair, skip_without_slurm, unique_name

PROBE = Path(__file__).with_name("chain_probe.py")
PROJECT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120.0
PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=1-0 PreemptMode=OFF State=UP",
    "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL MaxTime=1-0 State=UP",
)


@dataclass(frozen=True)
class ChainRun:
    """One chain on the cluster. ``first``: its first job."""

    cluster: DevCluster
    name: str
    first: str

    @property
    def path(self) -> Path:
        return self.cluster.shared / self.name

    @property
    def inside(self) -> str:
        """The run directory as the nodes see it."""
        return f"/shared/{self.name}"

    @property
    def command(self) -> str:
        """What its jobs run."""
        return command(self.name)

    def said(self, part: str) -> dict[str, Any]:
        """What the probe of a part did; waits for it."""
        file = self.path / f"probe.{part}"
        wait_for(lambda: file.exists(), lambda: f"part {part} says nothing; {self.queue()} {self.output()}")
        found = json.loads(file.read_text())
        assert isinstance(found, dict)
        return found

    def end(self, part: str, verdict: str) -> None:
        """Let a part end with a verdict."""
        (self.path / f"end.{part}").write_text(verdict)

    def queue(self) -> str:
        return self.cluster.run("ctl", ["squeue", "-h", "-o", "%i %T %r %N"], check=False).stdout

    def output(self) -> str:
        return "".join(file.read_text()[-2000:] for file in self.cluster.shared.glob(f"{self.name}.*.txt"))

    def pending(self) -> list[str]:
        return self.cluster.run("ctl", ["squeue", "-h", "-t", "PD", "-o", "%i"]).stdout.split()


def wait_for(reached: Callable[[], bool], why_not: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.05)


@pytest.fixture(scope="module", params=["22.05", pytest.param("26.05", marks=pytest.mark.slow)])
def chain_cluster(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """Four nodes with preemption; on the oldest Slurm with accounting, where that is installed."""
    skip_without_slurm()
    series = request.param
    if not image.is_built(series):
        pytest.skip(f"no cached root with Slurm {series}")
    accounting = series == "22.05" and shutil.which("slurmdbd") is not None and shutil.which("mariadbd") is not None
    limits = ("AccountingStorageEnforce=associations,limits,qos",) if accounting else ()
    name = unique_name(f"chains{series.replace('.', '')}")
    with DevCluster.start(
        name, nodes=4, slurm=series, accounting=accounting, binds=binds(), slurmd_timeout_s=5, timeout_s=150.0,
        conf=[*PREEMPTION, *limits],
    ) as running:  # fmt: skip
        if accounting:
            running.run("ctl", ["sacctmgr", "-i", "add", "account", "physics"])
            running.run("ctl", ["sacctmgr", "-i", "add", "user", "root", "account=physics"])
        yield running


@pytest.fixture
def begin(chain_cluster: DevCluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., ChainRun]]:
    """Start a chain: ``begin(*sbatch_options)`` returns when its first job runs and has said so."""
    cluster = chain_cluster
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)

    def start(*options: str) -> ChainRun:
        script = cluster.shared / name / "my dir" / "a job.sh"
        script.parent.mkdir(parents=True)
        script.write_text(f'#!/bin/bash\n#SBATCH --no-kill --open-mode=append\n{command(name)} "$@"\n')
        argv = ["sbatch", "--parsable", "--nodes=1", "--exclusive", f"--output=/shared/{name}.%j.txt", *options]
        inside = f"/shared/{name}/my dir/a job.sh"
        job = cluster.run("ctl", [*argv, inside, "two words", "x"]).stdout.strip()
        run = ChainRun(cluster, name, job)
        assert run.said(job)["over"] is None
        return run

    yield start
    repair(cluster)


def command(name: str) -> str:
    return f"env PYTHONPATH={PROJECT} {sys.executable} {PROBE} /shared/{name}"
