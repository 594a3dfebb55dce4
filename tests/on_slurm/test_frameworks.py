"""A framework's script in a chain of real jobs: stopped before the time limit, gone on from in the next job."""

from __future__ import annotations

import json

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.environments import ROOT
from tests.support.frameworks.runs import PYTHON, need_framework
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SCRIPT = """#!/bin/bash
#SBATCH --chdir=/shared/{name} --output=/shared/{name}/output.txt --open-mode=append
#SBATCH --nodes=1 --no-kill --time={minutes}
export OMP_NUM_THREADS=1
exec {python} -m resilio_hpc.cli.resilio_launch --chain --run-dir /shared/{name}/run --nproc-per-node 2 {script}
"""
WORDS = "--epochs 3 --every 1000 --step-seconds 1.5"
EXAMPLES = {
    "lightning": ("lightning", f"train_lightning.py {WORDS}"),
    "transformers": ("transformers", f"train_transformers.py {WORDS}"),
    "accelerate": ("accelerate", f"train_accelerate.py {WORDS}"),
}


def jobs_of(cluster: DevCluster, example: str, name: str, minutes: int) -> tuple[dict[str, object], list[int]]:
    """Run a chain of jobs to its end. Returns what the script wrote, and the steps that the jobs began from."""
    folder = cluster.shared / name
    folder.mkdir()
    script = f"{ROOT}/examples/{example} --hash-file /shared/{name}/end.json"
    cluster.submit(SCRIPT.format(name=name, python=PYTHON, script=script, minutes=minutes))

    def events(kind: str) -> list[dict[str, object]]:
        ledger = folder / "run" / "ledger"
        return [one.fields for one in read_ledger(ledger) if one.kind == kind] if ledger.exists() else []

    def said() -> str:
        output = folder / "output.txt"
        return output.read_text()[-3000:] if output.exists() else ""

    until((folder / "end.json").exists, "the end of training", said, poll_s=0.2)
    until(lambda: not cluster.run("ctl", ["squeue", "-h"]).stdout, "an empty queue", said, poll_s=0.2)
    end: dict[str, object] = json.loads((folder / "end.json").read_text())
    return end, [int(str(one.get("restored", -1))) for one in events("first_step")]


@pytest.mark.parametrize("framework", EXAMPLES)
def test_a_chain_over_a_time_limit_ends_with_the_same_bits(cluster: DevCluster, framework: str) -> None:
    module, example = EXAMPLES[framework]
    need_framework(module)
    undisturbed, _ = jobs_of(cluster, example.replace("1.5", "0"), f"{framework}-whole", 10)
    end, starts = jobs_of(cluster, example, f"{framework}-chain", 1)
    assert len(starts) > 1 and starts[0] == -1 and starts == sorted(set(starts))
    assert end == undisturbed
