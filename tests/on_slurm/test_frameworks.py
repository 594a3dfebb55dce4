"""A framework's script in a chain of real jobs: stopped before the time limit, gone on from in the next job."""

from __future__ import annotations

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.frameworks.runs import DEEPSPEED, FRAMEWORKS, PYTHON, STRIKE, VARIANTS, Framework
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SCRIPT = """#!/bin/bash
#SBATCH --chdir=/shared/{name} --output=/shared/{name}/output.txt --open-mode=append
#SBATCH --nodes=1 --no-kill --time={minutes}
export OMP_NUM_THREADS=1 {variables}
exec {python} -m resilio_hpc.cli.resilio_launch --chain --run-dir /shared/{name}/run --nproc-per-node 2 {script}
"""
LONG = "--step-seconds 1.5"


def jobs_of(
    cluster: DevCluster, framework: Framework, name: str, minutes: int, more: str
) -> tuple[list[str], list[int]]:
    """Run a chain of jobs to its end. Returns what each rank held then, and the steps that the jobs began from."""
    folder = cluster.shared / name
    folder.mkdir()
    script = f"{STRIKE} {' '.join(framework.command)} --epochs 3 --every 1000 {more}"
    variables = " ".join(f"{key}={value}" for key, value in DEEPSPEED.items())
    cluster.submit(SCRIPT.format(name=name, python=PYTHON, script=script, minutes=minutes, variables=variables))
    ends = [folder / "end" / rank for rank in ("0", "1")]

    def events(kind: str) -> list[dict[str, object]]:
        ledger = folder / "run" / "ledger"
        return [one.fields for one in read_ledger(ledger) if one.kind == kind] if ledger.exists() else []

    def said() -> str:
        output = folder / "output.txt"
        return output.read_text()[-3000:] if output.exists() else ""

    until(lambda: all(end.exists() for end in ends), "the end of training", said, poll_s=0.2)
    until(lambda: not cluster.run("ctl", ["squeue", "-h"]).stdout, "an empty queue", said, poll_s=0.2)
    return [end.read_text() for end in ends], [int(str(one.get("restored", -1))) for one in events("first_step")]


@pytest.mark.parametrize("name", [*FRAMEWORKS, *VARIANTS])
def test_a_chain_over_a_time_limit_ends_with_the_same_bits(cluster: DevCluster, name: str) -> None:
    framework = {**FRAMEWORKS, **VARIANTS}[name]
    framework.need()
    undisturbed, _ = jobs_of(cluster, framework, f"{name}-whole", 10, "")
    end, starts = jobs_of(cluster, framework, f"{name}-chain", 1, LONG)
    assert len(starts) > 1 and starts[0] == -1 and starts == sorted(set(starts))
    assert end == undisturbed
