"""What ``update_parameters`` takes, the script that it makes, and submitit's plug-ins; the local and debug clusters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import plugins, utils

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm import ResilioExecutor, template_files
from resilio_hpc.slurm.submitit_environment import ResilioJobEnvironment, save
from resilio_hpc.slurm.submitit_job import lines_of
from resilio_hpc.slurm.submitit_parameters import Shape, checked, converted, job_script, shape
from resilio_hpc.slurm.submitit_task import forget_earlier_life
from resilio_hpc.slurm.template import Job
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S

FOLDER = Path("/a 'folder'/%j")


def script(count: int = 1, **parameters: Any) -> Job:
    return job_script(template_files.load("submitit"), parameters, FOLDER, Path("/a 'folder'"), 4, count)


def test_submitit_finds_the_executor_and_its_environment() -> None:
    assert plugins.get_executors()["resilio"].__name__ == "ResilioExecutor"
    assert plugins.get_job_environments()["resilio"].name() == "resilio"
    assert ResilioExecutor.affinity() == 0  # AutoExecutor without a cluster's name never takes it


def test_the_launcher_does_not_import_submitit() -> None:
    code = "import sys, resilio_hpc.slurm.chain, resilio_hpc.launch.supervisor; print('submitit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout == "False\n"


def test_nodes_are_those_that_train_and_spares_come_on_top() -> None:
    job = script(nodes=2, tasks_per_node=4, spares=1, job_name="it's", time=90, mem="4096M")
    assert {key: job.options[key] for key in ("nodes", "ntasks_per_node", "job_name", "time", "mem")} == {
        "nodes": "3", "ntasks_per_node": "4", "job_name": "it's", "time": "90", "mem": "4096M",
    }  # fmt: skip
    assert (job.settings["spares"], job.settings["ranks_per_node"], job.settings["chain_max"]) == ("1", "4", "4")
    assert shape({"nodes": 2, "tasks_per_node": 4, "spares": 1}) == Shape(2, 1, 4, True)


def test_an_array_is_not_chained_and_has_its_width() -> None:
    job = script(count=9, chain=False, array_parallelism=2)
    assert (job.options["array"], job.settings["chain_max"]) == ("0-8%2", "1")
    assert job.options["output"] == "/a 'folder'/%A_%a_batch.log"


def test_a_script_is_sound_and_keeps_the_users_own_lines() -> None:
    text = script(setup=["module load cuda", "export A='b c'"], launch_flags=["--max-restarts", "7"]).script
    assert "\nmodule load cuda\nexport A='b c'\n" in text
    assert text.rstrip().endswith("--max-restarts 7 -m resilio_hpc.slurm.submitit_task '/a '\"'\"'folder'\"'\"'/%j'")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


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
    ],
)
def test_a_mistake_is_told_when_it_is_made(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", "\\(")):
        checked(parameters)


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


def kill_yourself_once(folder: Path) -> tuple[int, str]:
    env = submitit.JobEnvironment()
    if env.global_rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), 9)
    return env.global_rank, env.job_id


def test_two_nodes_of_this_machine_survive_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    executor = submitit.AutoExecutor(folder=tmp_path / "a b" / "%j", cluster="resilio", resilio_cluster="local")
    executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=5, resilio_launch_flags=["--no-zygote"])
    job = executor.submit(kill_yourself_once, tmp_path)
    assert job.results() == [(0, job.job_id), (1, job.job_id)]
    assert (tmp_path / "killed").exists() and job.state == "COMPLETED"
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
