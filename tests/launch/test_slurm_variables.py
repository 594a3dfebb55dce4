"""What our sruns must not see, and what ranks find in the place of our own steps' variables."""

from __future__ import annotations

import os

import pytest

from resilio_hpc.core.errors import LaunchError
from resilio_hpc.launch.config.slurm_variables import (
    SET_ASIDE,
    SlurmTask,
    absolute_path_list,
    for_agents,
    of_ranks,
    of_task,
)
from resilio_hpc.launch.process import own_address
from resilio_hpc.launch.protocol.message_parts import Member
from resilio_hpc.slurm.client.step_environment import gpu_flags

BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "my-run", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_EXPORT_ENV": "NONE", "SLURM_MEM_PER_NODE": "500", "SLURM_GPUS_PER_TASK": "1", "SLURM_CPUS_PER_TASK": "3",
    "SLURM_CONF": "/etc/slurm.conf", "PWD": "/home/me", "PYTHONPATH": ".:lib:/abs", "MARK": "x",
}  # fmt: skip
STEP = {
    "SLURM_JOB_NAME": "resilio-agent", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "8",
    "SLURM_CPU_BIND": "none", "SLURM_STEP_ID": "4", "SLURMD_NODENAME": "n2", "PWD": "/", "CUDA_VISIBLE_DEVICES": "0,1",
}  # fmt: skip
MEMBERS = (Member("n1", 0, "n1", 2, 0), Member("n2", 1, "n2", 2, 2))


def test_an_srun_of_ours_sees_no_option_of_the_users_steps_and_ranks_get_them_back() -> None:
    given = for_agents(BATCH)
    assert {name for name in given if name.startswith("SLURM_")} == {"SLURM_JOB_ID", "SLURM_CONF"}
    assert given["PYTHONPATH"] == os.pathsep.join((f"{os.getcwd()}/.", f"{os.getcwd()}/lib", "/abs"))  # noqa: PTH109
    found = of_ranks({**given, **STEP})
    kept = {"SLURM_STEP_ID": "4", "SLURMD_NODENAME": "n2", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert found == {**BATCH, **kept}
    assert of_ranks(found) == found  # without an srun of ours nothing changes
    assert SET_ASIDE not in found


def test_an_empty_entry_of_a_path_list_is_the_directory_itself() -> None:
    assert absolute_path_list(":a", "/d") == "/d/:/d/a"
    assert absolute_path_list("", "/d") == ""


def test_ranks_are_tasks_where_the_job_has_as_many_per_node_and_share_their_nodes_task_else() -> None:
    each = of_task(BATCH, MEMBERS, SlurmTask(node_rank=1, local_rank=1, rank=3, ranks=2, world_size=4))
    shown = ("NODEID", "PROCID", "LOCALID", "NTASKS", "NNODES", "GTIDS", "TASKS_PER_NODE", "STEP_NODELIST")
    assert [each[f"SLURM_{name}"] for name in shown] == ["1", "3", "1", "4", "2", "2,3", "2(x2)", "n[1-2]"]
    for others in ({"SLURM_TASKS_PER_NODE": "1(x2)"}, {"SLURM_TASKS_PER_NODE": "2,1"}, {}):
        shared = of_task(others, MEMBERS, SlurmTask(1, 1, 3, 2, 4))
        assert [shared[f"SLURM_{name}"] for name in shown] == ["1", "1", "0", "2", "2", "1", "1(x2)", "n[1-2]"]


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, ()),
        ({"SLURM_GPUS_PER_TASK": "1"}, ("--gpus-per-node=2",)),
        ({"SLURM_GPUS_PER_TASK": "h100:4"}, ("--gpus-per-node=8",)),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, ("--gpus-per-node=4",)),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:h100:1"}, ("--gpus-per-node=2",)),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, ()),
    ],
)
def test_a_task_of_ours_sees_all_gpus_though_the_job_asks_for_them_per_task(
    variables: dict[str, str], flags: tuple[str, ...]
) -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4,2"}
    assert gpu_flags({**job, **variables}, "n2") == flags


def test_a_name_that_stands_for_a_loopback_address_is_not_told_to_others() -> None:
    with pytest.raises(LaunchError, match="on itself, where no other node"):
        own_address.reachable("localhost", ["localhost"])
    assert own_address.reachable("no-such-name.invalid", []) == "no-such-name.invalid"  # others may know it
    assert own_address.interface_of("127.0.0.1") == "lo"
    assert own_address.interface_of("203.0.113.7") == ""
