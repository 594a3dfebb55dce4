"""Which allocation this is, from the variables that Slurm 22.05 to 26.05 gives."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.allocation import detect

BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}  # fmt: skip


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "-5"}, {"SLURM_STEP_ID": "4294967291"}])
def test_a_batch_script_is_no_step_whatever_slurm_calls_it(step: dict[str, str]) -> None:
    allocation = detect({**BATCH, **step})
    assert allocation is not None
    assert not allocation.in_step
    assert allocation.nodes == ("n1", "n2")
    assert allocation.cpus_per_node == (8, 8)


def test_a_task_of_srun_is_a_step() -> None:
    allocation = detect(
        {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2", "SLURMD_NODENAME": "n2", "SLURM_PROCID": "1"}
    )
    assert allocation is not None
    assert allocation.in_step
    assert (allocation.nodes, allocation.task) == (("n2",), 1)


def test_outside_of_slurm_there_is_none() -> None:
    assert detect({}) is None


def test_the_shell_of_salloc_on_a_login_node_is_told_how_to_start() -> None:
    with pytest.raises(
        UsageError, match=r"job 7 holds n\[1-2\], and this host is none of its nodes.*srun .*--standalone"
    ):
        detect({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"})


def test_a_job_id_without_nodes_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="--standalone"):
        detect({"SLURM_JOB_ID": "7"})
