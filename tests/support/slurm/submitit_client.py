"""A user of submitit, for tests: ``python submitit_client.py SCENARIO FOLDER [CLUSTER]`` prints what came back as JSON.

Functions here are what users write: they know submitit, and nothing of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import Checkpointable, CommandFunction, DelayedSubmission

PATIENCE_S = 240.0


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)


def rank_and_round(folder: Path) -> list[Any]:
    """Waits, in its first life, until somebody has made ``go`` (after breaking something)."""
    env = submitit.JobEnvironment()
    started = folder / f"started-{env.global_rank}-{os.environ['RESILIO_ROUND']}"
    started.with_suffix(".new").write_text(os.environ["SLURMD_NODENAME"])
    started.with_suffix(".new").replace(started)
    until((folder / "go").exists)
    return [env.job_id, env.global_rank, env.num_tasks, env.num_nodes, os.environ["SLURMD_NODENAME"]]


def killed_once(folder: Path) -> str:
    """Rank 1 is killed in its first life, when rank 0 has stored a result."""
    env = submitit.JobEnvironment()
    result = env.paths.result_pickle.with_name(f"{env.job_id}_0_result.pkl")
    if env.global_rank == 1 and not (folder / "killed").exists():
        while not result.exists():
            time.sleep(0.05)
        (folder / "killed").touch()
        os.kill(os.getpid(), 9)
    return f"rank {env.global_rank} in round {os.environ['RESILIO_ROUND']}"


class Counter(Checkpointable):
    """Counts to a number, however often it is stopped; slowly until ``fast`` is there."""

    def __init__(self) -> None:
        self.count = 0
        self.jobs: list[str] = []

    def __call__(self, wanted: int, folder: Path) -> list[Any]:
        self.jobs.append(os.environ["SLURM_JOB_ID"])
        while self.count < wanted:
            self.count += 1
            (folder / "count").write_text(str(self.count))
            time.sleep(0.01 if (folder / "fast").exists() else 0.5)
        return [self.count, self.jobs]

    def checkpoint(self, wanted: int, folder: Path) -> DelayedSubmission:
        return DelayedSubmission(self, wanted, folder)


def hears_nothing(folder: Path) -> list[str]:
    """Sleeps through every warning in its first job; the next one ends at once."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    jobs = folder / "lives"
    with jobs.open("a") as file:
        file.write(f"{os.environ['SLURM_JOB_ID']}\n")
    while len(jobs.read_text().split()) < 2:
        time.sleep(0.2)
    return jobs.read_text().split()


def fails(text: str) -> None:
    raise ValueError(text)


def square(x: int) -> int:
    return x * x


def host_of_a_step(number: int) -> list[Any]:
    """Start a step of srun from within the function, as a user would."""
    argv = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "printenv", "SLURMD_NODENAME"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    return [number, submitit.JobEnvironment().job_id, os.environ["SLURMD_NODENAME"], done.stdout.strip(), done.stderr]


def executor(folder: Path, cluster: str, **parameters: Any) -> submitit.AutoExecutor:
    made = submitit.AutoExecutor(folder=folder / "jobs" / "%j", cluster="resilio", resilio_cluster=cluster)
    flags = ["--no-torch", *parameters.pop("resilio_launch_flags", [])]  # no function here needs it
    made.update_parameters(name="it's a job", timeout_min=30, resilio_launch_flags=flags, **parameters)
    return made


def main(scenario: str, folder: Path, cluster: str = "slurm") -> dict[str, Any]:
    if scenario == "lost-node":
        job = executor(folder, cluster, nodes=2, tasks_per_node=1, resilio_spares=1).submit(rank_and_round, folder)
        said = {"results": job.results(), "id": job.job_id, "state": job.state, "nodes": job.num_tasks}
        until(lambda: list((folder / "jobs").glob("resilio-node-faults-*/*")))  # what that job has learnt
        later = executor(folder, cluster).submit(square, 3)
        anywhere = executor(folder, cluster, resilio_any_node=True).submit(square, 4)
        return {**said, "later": [later.result(), anywhere.result()], "ids": [later.job_id, anywhere.job_id]}
    if scenario == "killed":
        lines = {"resilio_setup": ["export WHERE=there"], "resilio_teardown": [f"echo $WHERE > {folder}/torn-down"]}
        made = executor(folder, cluster, nodes=1, tasks_per_node=2, resilio_exclude=["n4", "n[2-3]"], **lines)
        job, at_once = made.submit(killed_once, folder), made.submit(killed_once, folder)
        at_once.cancel()
        said = {"results": job.results(), "out": job.stdout(), "out1": job.task(1).stdout(), "err": job.stderr()}
        until((folder / "torn-down").exists)
        until(at_once.done)
        return {**said, "torn_down": (folder / "torn-down").read_text(), "at_once": at_once.state}
    if scenario == "checkpoint":
        job = executor(folder, cluster).submit(Counter(), 200, folder)
        return {"result": job.result(), "id": job.job_id, "links": job.links(), "state": job.state}
    if scenario == "timeout":
        job = executor(folder, cluster).submit(hears_nothing, folder)
        return {"result": job.result(), "id": job.job_id}
    if scenario == "failure":
        made = executor(folder, cluster, resilio_launch_flags=["--max-restarts", "1"])
        job = made.submit(fails, "no such data set")
        return {"exception": str(job.exception()), "state": job.state}
    if scenario == "array":
        made = executor(folder, cluster, resilio_chain=False, resilio_array_parallelism=2)
        jobs = made.map_array(square, [1, 2, 3])
        return {"results": [job.result() for job in jobs], "ids": [job.job_id for job in jobs]}
    if scenario == "steps":
        made = executor(folder, cluster, resilio_chain=False)
        jobs = [made.submit(host_of_a_step, 0), *made.map_array(host_of_a_step, [1, 2])]
        here = executor(folder, "local").submit(square, 3)
        return {"results": [job.result() for job in jobs], "ids": [job.job_id for job in jobs], "here": here.result()}
    if scenario == "command":
        jobs = executor(folder, cluster).map_array(CommandFunction(["echo", "a  b"], verbose=False), ["c", "d"])
        return {"results": [job.result() for job in jobs], "ids": [job.job_id for job in jobs]}
    if scenario == "cancel":
        job = executor(folder, cluster).submit(rank_and_round, folder)
        while not list(folder.glob("started-*")):
            time.sleep(0.1)
        links = job.links()
        job.cancel()
        return {"exception": str(job.exception()), "links": links, "state": job.state}
    raise SystemExit(f"no scenario {scenario}")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])))
