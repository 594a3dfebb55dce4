"""One batch script with several launches, and a chain: each program trains in its own run, in the next job, too."""

from __future__ import annotations

import sys
from pathlib import Path

from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.waiting import until

SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --no-kill --time=10 --open-mode=append
L="{launcher} --no-torch --max-restarts 0"
$L {folder}/stage.py prepare; echo "$SLURM_JOB_ID prepare $?"
$L {folder}/stage.py left & $L {folder}/stage.py right & wait
exec $L --chain --run-dir {folder}/run-$SLURM_JOB_ID {folder}/stage.py train
"""
STAGE = """
import os, subprocess, sys, time
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

run, state = train.attach(), {"x": 1.0}
checkpoint = Checkpointer()
restored = checkpoint.restore(state)
start = restored[0] if restored else 0
job, name, steps = os.environ["SLURM_JOB_ID"], sys.argv[1], 40 if sys.argv[1] == "train" else 4
print("BEGAN", job, name, start > 0, os.path.basename(os.environ["RESILIO_RUN_DIR"]), flush=True)
for step in run.steps(start, steps, save=lambda done: checkpoint.save(done, state).wait("committed"), every=2):
    if name == "train" and step == 10 and not restored:
        subprocess.run(["scancel", "--batch", "--signal=KILL", job])  # the next job of the chain goes on
    time.sleep(0.1 if name == "train" else 0)
print("ENDED", job, name, flush=True)
"""


def test_each_program_trains_in_its_own_run_and_the_chained_one_goes_on(cluster: DevCluster) -> None:
    folder = cluster.shared / "launches"
    folder.mkdir()
    (folder / "stage.py").write_text(STAGE)
    launcher = Path(sys.executable).with_name("resilio-launch")
    output = folder / "output.txt"
    text = SCRIPT.format(launcher=launcher, folder="/shared/launches")
    text = text.replace("#SBATCH", "#SBATCH --chdir=/shared/launches --output=/shared/launches/output.txt", 1)
    first = str(cluster.submit(text))

    def said() -> str:
        return output.read_text() if output.exists() else ""

    verdict = folder / f"run-{first}" / "verdict.json"
    until(lambda: verdict.exists() and "completed" in verdict.read_text(), "the run's end", said, poll_s=0.2)
    until(lambda: not cluster.run("ctl", ["squeue", "-h"]).stdout, "an empty queue", said, poll_s=0.2)
    second = str(int(first) + 1)
    lines = [line.partition("BEGAN ")[2].split() for line in said().splitlines() if "BEGAN " in line]
    began = {(job, name): (resumed, run) for job, name, resumed, run in lines}
    assert began[first, "prepare"] == ("False", first)
    assert {began[first, name] for name in ("left", "right")} == {("False", f"{first}-2"), ("False", f"{first}-3")}
    assert began[first, "train"] == ("False", f"run-{first}")
    assert began[second, "prepare"] == ("False", second)
    assert began[second, "train"] == ("True", f"run-{first}")
    ended = {tuple(line.partition("ENDED ")[2].split()) for line in said().splitlines() if "ENDED " in line}
    assert {(job, name) for job in (first, second) for name in ("prepare", "left", "right")} <= ended
    assert (second, "train") in ended and (first, "train") not in ended
    assert not (folder / f"run-{second}").exists()
