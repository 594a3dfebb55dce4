"""Chains of real jobs that run ``chain_probe.py``, as fixtures: the launcher's chain without agents."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.environments import ROOT
from tests.support.waiting import until

PROBE = Path(__file__).with_name("chain_probe.py")


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
        """Let a part end with a verdict, which it never reads half written."""
        write_atomic(self.path / f"end.{part}", verdict.encode())

    def queue(self) -> str:
        return self.cluster.run("ctl", ["squeue", "-h", "-o", "%i %T %r %N"], check=False).stdout

    def output(self) -> str:
        return "".join(file.read_text()[-2000:] for file in self.cluster.shared.glob(f"{self.name}.*.txt"))

    def pending(self) -> list[str]:
        return self.cluster.run("ctl", ["squeue", "-h", "-t", "PD", "-o", "%i"]).stdout.split()


def wait_for(reached: Callable[[], bool], why_not: Callable[[], str]) -> None:
    until(reached, "the chain has not come so far", why_not)


@pytest.fixture
def begin(cluster: DevCluster, request: pytest.FixtureRequest) -> Callable[..., ChainRun]:
    """Start a chain: ``begin(*sbatch_options)`` returns when its first job runs and has said so."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return partial(start, cluster, name)


def start(cluster: DevCluster, name: str, *options: str) -> ChainRun:
    """Start a chain of this name, with these options of sbatch."""
    script = cluster.shared / name / "my dir" / "a job.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/bash\n#SBATCH --no-kill --open-mode=append\n{command(name)} "$@"\n')
    argv = ["sbatch", "--parsable", "--nodes=1", "--exclusive", f"--output=/shared/{name}.%j.txt", *options]
    inside = f"/shared/{name}/my dir/a job.sh"
    job = cluster.run("ctl", [*argv, inside, "two words", "x"]).stdout.strip()
    run = ChainRun(cluster, name, job)
    assert run.said(job)["over"] is None
    return run


def command(name: str) -> str:
    return f"env PYTHONPATH={ROOT} {sys.executable} {PROBE} /shared/{name}"
