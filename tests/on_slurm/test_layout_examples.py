"""Examples of plain-tensor layouts, FSDP1 and FSDP2 in a chain of real jobs: over a time limit, to the same bits."""

from __future__ import annotations

import sys

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.environments import ROOT
from tests.support.frameworks.runs import STRIKE
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SCRIPT = """#!/bin/bash
#SBATCH --chdir=/shared/{name} --output=/shared/{name}/output.txt --open-mode=append
#SBATCH --nodes=1 --no-kill --time={minutes}
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
exec {python} -m resilio_hpc.cli.resilio_launch --chain --run-dir /shared/{name}/run --nproc-per-node {ranks} {script}
"""
EXAMPLES = {
    "megatron": ("train_megatron_style.py --tensor 2", 4),
    "torchtitan": ("train_torchtitan_style.py", 3),
    "hsdp": ("train_torchtitan_style.py --replicas 2", 4),
    "fsdp1": ("train_fsdp1.py", 3),
}


def jobs_of(cluster: DevCluster, example: str, name: str, minutes: int, more: str) -> tuple[list[str], int]:
    """Run a chain of jobs to its end. Returns what each rank held then, and the number of jobs that trained."""
    words, ranks = EXAMPLES[example]
    folder = cluster.shared / name
    folder.mkdir()
    script = f"{STRIKE} {ROOT}/examples/{words} --steps 30 --every 1000 {more}"
    cluster.submit(SCRIPT.format(name=name, python=sys.executable, script=script, minutes=minutes, ranks=ranks))
    ends = [folder / "end" / str(rank) for rank in range(ranks)]

    def said() -> str:
        output = folder / "output.txt"
        return output.read_text()[-3000:] if output.exists() else ""

    until(lambda: all(end.exists() for end in ends), "the end of training", said, poll_s=0.2)
    until(lambda: not cluster.run("ctl", ["squeue", "-h"]).stdout, "an empty queue", said, poll_s=0.2)
    return [end.read_text() for end in ends], sum(
        event.kind == "first_step" for event in read_ledger(folder / "run" / "ledger")
    )


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_chain_over_a_time_limit_ends_with_the_same_bits(cluster: DevCluster, example: str) -> None:
    undisturbed, _ = jobs_of(cluster, example, f"{example}-whole", 10, "")
    end, jobs = jobs_of(cluster, example, f"{example}-chain", 1, "--step-seconds 2.5")
    assert jobs > 1
    assert end == undisturbed
