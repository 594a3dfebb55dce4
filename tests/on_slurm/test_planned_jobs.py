"""The evaluator with real Slurms: nodes that vanish between the test and the submission, and the layout in the job."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from tests.support.clusters import each_series
from tests.support.waiting import until

pytestmark = each_series(HOST_SERIES, slow=[NEWEST_SERIES])

JOB = """#!/bin/bash
#SBATCH --exclusive --time=10
#SBATCH --output=/shared/planned-%j.out
env | grep ^RESILIO_ | sort
echo "nodes $SLURM_JOB_NUM_NODES gpus $SLURM_GPUS_ON_NODE"
printf '%s\\n' "$@"
sleep 300
"""
TRAIN = """import os, sys
degrees = " ".join(f"{name} {os.environ['RESILIO_' + name.upper()]}" for name in ("tp", "pp", "dp"))
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {degrees},", *sys.argv[1:], flush=True)
"""
STEPS = """import sys, time
from resilio_hpc import train
run = train.attach()
for step in run.steps(0, int(sys.argv[1])):
    time.sleep(0.1)
"""
# Stands before sbatch on PATH: something happens between the test and the first submission, once.
BETWEEN = """#!/bin/bash
case " $* " in
*" --test-only "*) ;;
*) if mkdir "$0.done" 2>/dev/null; then {happens}; fi ;;
esac
exec {sbatch} "$@"
"""


@pytest.fixture(autouse=True)
def script(cluster: DevCluster) -> None:
    """What the tests submit. They use the three nodes of the partition "trio", with two GPUs each."""
    (cluster.shared / "job.sh").write_text(JOB)


def submit(
    cluster: DevCluster, *words: str, path: str = "", gpus: str = "2-6", directory: str = "/shared"
) -> tuple[int, list[dict[str, Any]], str]:
    """``resilio plan`` of whole nodes, the largest first: exit code, attempts, and what was said on standard error."""
    plan = [
        "plan",
        "gpt2-large",
        "--global-batch=12",
        "--tp=2",
        "--micro-batch=2",
        "--partition=trio",
        f"--gpus={gpus}",
    ]
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", *plan, "--json", *words]
    usual = cluster.machines.environment()["PATH"]
    environment = {"PATH": f"{path}:{usual}" if path else usual}
    done = cluster.run("ctl", argv, 200.0, env=environment, cwd=directory, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def between(cluster: DevCluster, name: str, happens: str) -> str:
    """A directory for PATH whose sbatch lets this happen first."""
    folder = cluster.shared / name
    folder.mkdir()
    sbatch = cluster.run("ctl", ["sh", "-c", "command -v sbatch"]).stdout.strip()
    (folder / "sbatch").write_text(BETWEEN.format(happens=happens, sbatch=sbatch))
    (folder / "sbatch").chmod(0o755)
    return f"/shared/{name}"


def output(cluster: DevCluster, job: str, last: str) -> list[str]:
    """What the job wrote, when it wrote the line ``last``."""

    def lines() -> list[str]:
        path = cluster.shared / f"planned-{job}.out"
        return path.read_text().splitlines() if path.exists() else []

    until(lambda: last in lines(), f"the line {last}", lines)
    return lines()


def words(attempts: list[dict[str, Any]]) -> list[str]:
    return [f"{one['nodes']} {one['event']}" for one in attempts]


def test_the_best_choice_starts_with_its_layout(cluster: DevCluster) -> None:
    code, attempts, said = submit(cluster, "--submit", "./job.sh", "--", "--tp={tp}", "--micro={micro_batch}", "end")
    assert (code, words(attempts)) == (0, ["3 submitted", "3 started"]), said
    lines = output(cluster, attempts[-1]["job"], "end")
    assert {"RESILIO_TP=2", "RESILIO_PP=1", "RESILIO_DP=3", "RESILIO_ACCUMULATION=2"} <= set(lines)
    assert {"nodes 3 gpus 2", "--tp=2", "--micro=2"} <= set(lines)


def test_a_training_script_runs_under_the_launcher_with_the_layout(cluster: DevCluster) -> None:
    (cluster.shared / "it's a run").mkdir()
    (cluster.shared / "it's a run" / "train.py").write_text(TRAIN)
    code, attempts, said = submit(
        cluster, "--submit", "train.py", "--set", "time=10", "--", "--tp={tp}", "end", directory="/shared/it's a run"
    )
    assert (code, words(attempts)) == (0, ["3 submitted", "3 started"]), said
    job = attempts[-1]["job"]
    assert cluster.wait_for_job(int(job), ("COMPLETED", "FAILED", "CANCELLED"), 120.0) == "COMPLETED"
    lines = "\n".join(path.read_text() for path in (cluster.shared / "it's a run").glob(f"*{job}.out"))
    assert all(f"rank {rank} of 6: tp 2 pp 1 dp 3, --tp=2 end" in lines for rank in range(6)), lines


@pytest.mark.parametrize(
    ("name", "happens"),
    [
        ("drained", "scontrol update NodeName=n3 State=DRAIN Reason=test"),
        ("taken", "{sbatch} --partition=trio --exclusive --nodelist=n3 --time=60 --wrap 'sleep 600'; sleep 2"),
    ],
    ids=["drained", "taken"],
)
def test_nodes_that_vanish_leave_the_turn_to_the_next_choice(cluster: DevCluster, name: str, happens: str) -> None:
    sbatch = cluster.run("ctl", ["sh", "-c", "command -v sbatch"]).stdout.strip()
    path = between(cluster, name, happens.format(sbatch=f"{sbatch} --parsable >/dev/null"))
    code, attempts, said = submit(cluster, "--submit", "./job.sh", "--", "end", path=path)
    assert (code, words(attempts)) == (0, ["3 submitted", "3 taken-back", "2 submitted", "2 started"]), said
    lines = output(cluster, attempts[-1]["job"], "end")
    assert {"RESILIO_TP=2", "RESILIO_DP=2", "nodes 2 gpus 2"} <= set(lines)
    left = cluster.run("ctl", ["squeue", "-h", "-t", "PD", "-o", "%i"]).stdout.split()
    assert left == []  # what was taken back does not start later


def test_a_dry_run_submits_nothing_and_what_slurm_never_starts_is_passed(cluster: DevCluster) -> None:
    cluster.run("ctl", ["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test"])
    code, attempts, said = submit(cluster, "--submit", "./job.sh", "--dry-run", "--", "end")
    assert (code, words(attempts)) == (0, ["2 would-submit"]), said
    code, attempts, said = submit(cluster, "--submit", "./job.sh", "--set", "constraint=nosuch", "--", "end")
    assert (code, words(attempts)) == (3, ["2 passed", "1 passed"]), said
    assert "feature" in attempts[0]["why"]
    assert cluster.run("ctl", ["squeue", "-h"]).stdout == ""


def test_a_start_in_the_future_is_taken_only_where_it_was_allowed(cluster: DevCluster) -> None:
    cluster.submit("#!/bin/sh\nsleep 600\n", ["--partition=trio", "-N3", "--exclusive", "-t", "20"])
    code, attempts, said = submit(cluster, "--submit", "./job.sh", "--", "end", gpus="4-6")
    assert (code, words(attempts)) == (3, ["3 passed", "2 passed"])
    assert "--max-wait" in said and attempts[0]["wait_s"] > 60
    code, attempts, said = submit(cluster, "--submit", "./job.sh", "--max-wait=7200", "--", "end", gpus="4-6")
    assert (code, words(attempts)) == (0, ["3 submitted", "3 queued"]), said


def test_without_slurmctld_nothing_is_submitted_and_it_says_so(cluster: DevCluster) -> None:
    cluster.machines.kill_slurmctld()
    code, attempts, said = submit(cluster, "--submit", "./job.sh", "--", "end")
    assert (code, attempts) == (1, []) and said.startswith("resilio: error: ")


def test_runs_that_tell_most_are_submitted_and_become_a_calibration(cluster: DevCluster) -> None:
    (cluster.shared / "steps.py").write_text(STEPS)
    resilio = [sys.executable, "-m", "resilio_hpc.cli.main", "plan"]
    environment = {"PATH": cluster.machines.environment()["PATH"]}
    words = ["gpt2-large", "--global-batch=12", "--partition=trio", "--gpus=2-6", "--runs=3", "--steps=60"]
    jobs = ["--jobs=trials", "--submit", "--", "steps.py", "{steps}"]
    done = cluster.run("ctl", [*resilio, "measure", *words, *jobs], 200.0, env=environment, cwd="/shared", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = re.findall(r"run-\d: submitted as job (\d+)", done.stdout)
    assert len(numbers) == 3, done.stdout
    for number in numbers:
        assert cluster.wait_for_job(int(number), ("COMPLETED", "FAILED", "CANCELLED"), 200.0) == "COMPLETED"
    fit = [*resilio, "calibrate", "--rows=trials/runs.csv", "--out=calibration.toml"]
    done = cluster.run("ctl", fit, 200.0, env=environment, cwd="/shared", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 measurements" in (cluster.shared / "calibration.toml").read_text()
