"""What ``update_parameters`` takes, the script that it makes, and submitit's plug-ins; the local and debug clusters."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import submitit
from submitit.core import core, job_environment, plugins, utils

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm import ResilioExecutor
from resilio_hpc.slurm.submit import template_files
from resilio_hpc.slurm.submit.submitit_environment import ResilioJobEnvironment, save
from resilio_hpc.slurm.submit.submitit_executor import knows_torch
from resilio_hpc.slurm.submit.submitit_job import LocalResilioJob, lines_of
from resilio_hpc.slurm.submit.submitit_parameters import TaskShape, checked, converted, job_script, local_command, shape
from resilio_hpc.slurm.submit.template import FilledTemplate, parse, render
from resilio_hpc.slurm.submitit_task import forget_earlier_life
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S, until

FOLDER = Path("/a 'folder'/%j")


def script(count: int = 1, **parameters: Any) -> FilledTemplate:
    return job_script(template_files.load("submitit"), parameters, FOLDER, Path("/a 'folder'"), 4, count)


def test_submitit_finds_the_executor_and_its_environment() -> None:
    assert plugins.get_executors()["resilio"].__name__ == "ResilioExecutor"
    assert plugins.get_job_environments()["resilio"].name() == "resilio"
    assert ResilioExecutor.affinity() == 0  # AutoExecutor without a cluster's name never takes it


def test_the_launcher_does_not_import_submitit() -> None:
    code = (
        "import sys, resilio_hpc.slurm.chain.chain, resilio_hpc.launch.supervisor.supervisor; "
        "print('submitit' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout == "False\n"


def test_nodes_are_those_that_train_and_spares_come_on_top() -> None:
    job = script(nodes=2, tasks_per_node=4, spares=1, job_name="it's", time=90, mem="4096M")
    assert {key: job.options[key] for key in ("nodes", "ntasks_per_node", "job_name", "time", "mem")} == {
        "nodes": "3", "ntasks_per_node": "4", "job_name": "it's", "time": "90", "mem": "4096M",
    }  # fmt: skip
    assert (job.settings["spares"], job.settings["ranks_per_node"], job.settings["chain_max"]) == ("1", "4", "4")
    assert shape({"nodes": 2, "tasks_per_node": 4, "spares": 1}) == TaskShape(2, 1, 4, True)


def test_an_array_is_not_chained_and_has_its_width() -> None:
    job = script(count=9, chain=False, array_parallelism=2)
    assert (job.options["array"], job.settings["chain_max"]) == ("0-8%2", "1")
    assert job.options["output"] == "/a 'folder'/%A_%a_batch.log"


def test_a_script_is_sound_and_keeps_the_users_own_lines() -> None:
    text = script(setup=["module load cuda", "export A='b c'"], launch_flags=["--max-restarts", "7"]).script
    assert "\nmodule load cuda\nexport A='b c'\n" in text
    assert "--max-restarts 7 -m resilio_hpc.slurm.submitit_task '/a '\"'\"'folder'\"'\"'/%j')\n" in text
    text += script(setup=["true"], teardown=['echo "it\'s over"']).script
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def run_here(argv: list[str], **parameters: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(local_command(parameters, argv), capture_output=True, text=True, timeout=PATIENCE_S)


def test_setup_comes_before_the_launch_and_teardown_after_it_whatever_came_of_it() -> None:
    launch = ["sh", "-c", 'echo "$A it\'s"; exit 7']
    setup, teardown = ["export A=launched"], ["echo torn down", "false", "echo $HOME > /dev/null"]
    done = run_here(launch, setup=setup, teardown=teardown[:1])
    assert (done.returncode, done.stdout) == (7, "launched it's\ntorn down\n")
    done = run_here(launch, setup=["echo first", "false", "echo never"], teardown=teardown)
    assert (done.returncode, done.stdout) == (1, "first\n")  # as in the batch script
    in_script = script(setup=setup, teardown=teardown).script
    assert in_script.index(setup[0]) < in_script.index('"${launch[@]}" & launcher=$!') < in_script.index("torn down")
    with pytest.raises(UsageError, match="no line '# teardown: …'"):
        render(parse("mine", '#!/bin/sh\nresilio-launch "$@"\n'), {}, ["train.py"], teardown_lines=["true"])


@pytest.mark.parametrize("name", ["TERM", "INT", "USR2"])
def test_a_signal_reaches_the_launch_and_the_teardown_comes_all_the_same(name: str, tmp_path: Path) -> None:
    launch = f"trap 'echo told {name}; exit 3' {name}; touch ready; while :; do sleep 0.02; done"
    argv = local_command({"teardown": ["echo torn down"]}, ["bash", "-c", launch])
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    until((tmp_path / "ready").exists, "the launch")
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.communicate(timeout=PATIENCE_S)[0] == f"told {name}\ntorn down\n"
    assert process.returncode == 3


def test_general_names_become_ours() -> None:
    wanted = {"job_name": "x", "time": 60, "mem": "2560M", "nodes": 2, "tasks_per_node": 3}
    assert converted({"name": "x", "timeout_min": 60, "mem_gb": 2.5, "nodes": 2, "tasks_per_node": 3}) == wanted


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"spare": 1}, "no parameter is named 'spare': did you mean spares?"),
        ({"output": "x"}, "no parameter is named 'output'"),
        ({"nodes": 0}, "nodes: '0' is neither a number of nodes"),
        ({"spares": -1}, "spares: '-1'"),
        ({"time": "1h"}, "time: '1h' is not a time limit"),
        ({"job_name": "a\nb"}, "line break"),
        ({"array_parallelism": 2}, "array_parallelism needs chain=False"),
        ({"setup": "module load x"}, "is not a list of strings"),
        ({"teardown": "rm x"}, "is not a list of strings"),
        ({"exclude": ["n[2-1]"]}, "not a Slurm host list"),
    ],
)
def test_a_mistake_is_told_when_it_is_made(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        checked(parameters)
    executor = submitit.AutoExecutor(folder="unused", cluster="resilio", resilio_cluster="local")
    with pytest.raises(ValueError, match=re.escape(said)):  # what submitit's users catch
        executor._executor.update_parameters(**parameters)


def test_a_list_of_nodes_is_a_host_list() -> None:
    checked({"exclude": ["n1", "n[3-4]"], "nodelist": []})
    assert script(exclude=["n1", "n[3-4]"], nodelist=()).options["exclude"] == "n1,n[3-4]"
    assert "nodelist" not in script(nodelist=[]).options


def test_a_wrong_cluster_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="one of slurm, local, debug"):
        ResilioExecutor(tmp_path, cluster="lokal")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no sbatch on PATH"):
        ResilioExecutor(tmp_path, cluster="slurm")
    assert ResilioExecutor(tmp_path).cluster == "local"


def test_a_ranks_lines_are_told_apart() -> None:
    text = "[rank 1] a\n[rank 11] b\n[resilio] c\n[rank 1] [rank 2] d\n[rank 1] e"
    assert lines_of(text, 1) == "a\n[rank 2] d\ne"


def test_what_an_earlier_life_left_is_put_away(tmp_path: Path) -> None:
    paths = utils.JobPaths(tmp_path, job_id="7", task_id=1)
    half = Path(f"{paths.result_pickle}.save_tmp")
    others = tmp_path / "7_0_result.pkl"
    for path in (half, paths.result_pickle, others):
        path.write_bytes(b"x")
    forget_earlier_life(paths)
    assert [path.exists() for path in (half, paths.result_pickle, others)] == [False, False, True]
    forget_earlier_life(paths)


def test_a_function_that_knows_nothing_of_torch_need_not_wait_for_it(tmp_path: Path) -> None:
    for name, function, loaded, known in (
        ("a", os.getpid, {}, False),
        ("b", lambda: __import__("torch").ones(1), {}, True),
        ("c", os.getpid, {"torch": None}, True),
    ):
        utils.DelayedSubmission(function).dump(tmp_path / name)
        assert knows_torch(tmp_path / name, loaded) == known


def test_a_saved_function_replaces_the_one_before(tmp_path: Path) -> None:
    paths = utils.JobPaths(tmp_path, job_id="7")
    for number in (1, 2):
        save(utils.DelayedSubmission(abs, -number), paths)
    assert utils.DelayedSubmission.load(paths.submitted_pickle).result() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["7_submitted.pkl"]


def test_the_environment_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RESILIO_SUBMITIT_JOB": "12", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "RANK": "5",
              "LOCAL_RANK": "0", "RESILIO_LOCAL_RANK": "1", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "14",
              "SUBMITIT_EXECUTOR": "resilio"}  # fmt: skip
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    env = submitit.JobEnvironment()
    assert isinstance(env, ResilioJobEnvironment)
    assert (env.job_id, env.num_tasks, env.num_nodes, env.node, env.global_rank, env.local_rank) == (
        "12",
        8,
        2,
        1,
        5,
        1,
    )
    assert env.hostnames == ["n1", "n2", "n3"]


def copied(job: core.Job[Any]) -> Any:
    """As submitit's users hand jobs to other processes."""
    return cloudpickle.loads(cloudpickle.dumps(job))


class Launches:
    """Jobs whose launcher is any program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def job(self, *argv: str) -> LocalResilioJob[None]:
        job: LocalResilioJob[None] = LocalResilioJob(self.folder, f"local-{len(self.started)}")
        self.started.append(subprocess.Popen(argv))
        job.belongs_to(self.started[-1])
        return job


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def test_a_local_job_that_was_killed_is_interrupted_and_one_that_was_cancelled_has_not_failed(
    launches: Launches,
) -> None:
    killed, cancelled, failed = launches.job("sleep", "60"), launches.job("sleep", "60"), launches.job("false")
    assert (killed.state, cancelled.state) == ("RUNNING", "RUNNING")
    launches.started[0].kill()
    cancelled.cancel()  # before the launcher could say that it was told to end
    for job, state in ((killed, "INTERRUPTED"), (cancelled, "CANCELLED"), (failed, "FAILED")):
        until(job.done, "the end of a job", lambda job=job: job.state)
        assert job.state == state
    failed.cancel()
    assert failed.state == "FAILED"  # it was no more to be cancelled
    assert LocalResilioJob(launches.folder, "local-9").state == "UNKNOWN"


def test_another_process_knows_a_local_job_and_can_cancel_it(launches: Launches) -> None:
    job = launches.job("sleep", "60")
    copy = copied(job)
    other = LocalResilioJob[None](launches.folder, job.job_id)
    assert copy._process is None and (copy.state, other.state) == ("RUNNING", "RUNNING")
    other.cancel()
    launches.started[0].wait()
    assert (other.state, copy.state) == ("CANCELLED", "INTERRUPTED")


def test_a_job_may_end_with_the_object_that_stands_for_it(launches: Launches) -> None:
    launches.job("sleep", "60").cancel_at_deletion()
    assert launches.started[0].wait(PATIENCE_S) == -signal.SIGINT


def test_the_environment_requeues_by_starting_the_ranks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = plugins.get_job_environments()["resilio"]
    assert type(environment)._requeue is not job_environment.JobEnvironment._requeue
    monkeypatch.setenv("RESILIO_SUBMITIT_JOB", "12")
    with pytest.raises(SystemExit, match="143"):
        environment._requeue(2)


def kill_yourself_once(folder: Path) -> tuple[int, str]:
    env = submitit.JobEnvironment()
    if env.global_rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), 9)
    return env.global_rank, env.job_id


def test_two_nodes_of_this_machine_survive_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    executor = submitit.AutoExecutor(folder=tmp_path / "a b" / "%j", cluster="resilio", resilio_cluster="local")
    executor.update_parameters(
        nodes=2, tasks_per_node=1, timeout_min=5, resilio_launch_flags=["--no-zygote"],
        resilio_setup=[f"touch {tmp_path}/set-up"], resilio_teardown=[f"touch {tmp_path}/torn-down"],
    )  # fmt: skip
    job = executor.submit(kill_yourself_once, tmp_path)
    assert job.results() == [(0, job.job_id), (1, job.job_id)]
    assert (tmp_path / "killed").exists() and job.state == "COMPLETED" == copied(job).state
    assert [(tmp_path / name).exists() for name in ("set-up", "torn-down")] == [True, True]
    assert "killed by SIGKILL" in (job.stderr() or "")


# submitit leaves the log files of its debug jobs open
LEAKS = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file:ResourceWarning"
)


@LEAKS
def test_the_debug_cluster_runs_in_this_process(tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(folder=tmp_path, cluster="resilio", resilio_cluster="debug")
    executor.update_parameters(nodes=1, resilio_spares=1)
    assert executor.submit(os.getpid).result() == os.getpid()


@LEAKS
@pytest.mark.parametrize("cluster", ["local", "debug"])
def test_submitits_own_clusters_ignore_our_parameters(tmp_path: Path, cluster: str) -> None:
    executor = submitit.AutoExecutor(folder=tmp_path, cluster=cluster)
    executor.update_parameters(timeout_min=2, resilio_spares=1, resilio_chain=False)
    assert executor.submit(abs, -3).result() == 3
