"""The srun step of an MPI round: its command, environment, hostfile; what is checked before; how its end reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.mpi_check import check, plugin_types
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.root_cause import origin
from resilio_hpc.launch.workers.mpi.ranks import KILLED_WITH_STEP, abort_code
from resilio_hpc.launch.workers.mpi.spawner import last_error
from resilio_hpc.launch.workers.mpi.step import hostfile_text, srun_argv, step_environment, task_argv

MEMBERS = (
    m.Member("n7", 0, "n7", 2, 0),
    m.Member("n1", 2, "n1", 1, 5),
    m.Member("n3", 1, "n3", 3, 2),
)
ENVIRONMENT = {"SLURM_JOB_ID": "41"}


def test_line_r_of_the_hostfile_is_the_node_of_rank_r() -> None:
    assert hostfile_text(MEMBERS).split() == ["n7", "n7", "n3", "n3", "n3", "n1"]


def test_the_step_has_a_task_for_every_rank_and_survives_the_loss_of_one() -> None:
    argv = srun_argv("pmi2", MEMBERS, ENVIRONMENT, ("python", "task.py"))
    assert argv[0] == "srun" and argv[-2:] == ("python", "task.py")
    wanted = {
        "--nodes=3", "--ntasks=6", "--mpi=pmi2", "--jobid=41", "--distribution=arbitrary", "--overlap", "--no-kill",
        "--kill-on-bad-exit=0", "--wait=0", "--overcommit",
    }  # fmt: skip
    assert wanted <= set(argv)
    assert not [word for word in argv if word.startswith(("--nodelist", "-w"))]  # srun takes it for the hostfile


def test_ranks_see_all_cpus_where_slurm_binds_and_nothing_is_said_where_it_cannot() -> None:
    assert "--cpu-bind=none" not in srun_argv("pmix", MEMBERS, ENVIRONMENT, ())
    assert "--cpu-bind=none" in srun_argv("pmix", MEMBERS, {**ENVIRONMENT, "SLURM_CPU_BIND": "quiet,none"}, ())


def test_the_surrounding_step_leaves_no_trace_in_the_environment_of_srun() -> None:
    surrounding = {
        "SLURM_PROCID": "1", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "8", "SLURM_NNODES": "1",
        "SLURM_MPI_TYPE": "none", "SLURM_OVERCOMMIT": "0", "PMI_FD": "11", "PMIX_RANK": "0", "SLURMD_NODENAME": "n7",
        "SLURM_STEP_NODELIST": "n7", "SLURM_JOB_NAME": "resilio-agent", "SLURM_GPUS_ON_NODE": "2", "SRUN_DEBUG": "3",
    }  # fmt: skip
    ours = {
        "PATH": "/bin", "SLURM_JOB_ID": "41", "SLURM_CONF": "/etc/slurm.conf", "SLURM_PMIX_DIRECT_CONN": "true",
        "OMPI_MCA_btl": "tcp,self", "SLURM_ARRAY_TASK_ID": "2",
    }  # fmt: skip
    assert step_environment({**surrounding, **ours}, Path("/tmp/hosts")) == {**ours, "SLURM_HOSTFILE": "/tmp/hosts"}


def test_a_task_is_told_its_run_and_round() -> None:
    assert task_argv("abc", 7)[-2:] == ("abc", "7")


# The answers of `srun --mpi=list`, seen on 22.05.8, 24.11.5, 26.05.5 and, from Slurm's documentation, 20.11.
LISTS = (
    ("MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\n"
     "specific pmix plugin versions available: pmix_v4\n", ["pmix", "cray_shasta", "pmi2", "pmix_v4"]),
    ("MPI plugin types are...\n\tnone\n\tpmix\n\tcray_shasta\n\tpmi2\n"
     "specific pmix plugin versions available: pmix_v5\n", ["pmix", "cray_shasta", "pmi2", "pmix_v5"]),
    ("MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n", ["cray_shasta", "pmi2"]),
    ("srun: MPI types are...\nsrun: cray_shasta\nsrun: pmi2\nsrun: none\nsrun: pmix\nsrun: pmix_v3\n",
     ["cray_shasta", "pmi2", "pmix", "pmix_v3"]),
)  # fmt: skip


@pytest.mark.parametrize(("answer", "types"), LISTS)
def test_the_types_that_a_slurm_has(answer: str, types: list[str]) -> None:
    assert plugin_types(answer) == types


def fake_srun(directory: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    program = directory / "srun"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = --mpi=list ] || exit 99\ncat >&2 <<'END'\n{answer}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_a_type_that_this_slurm_lacks_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_srun(tmp_path, monkeypatch, LISTS[2][0])
    check("pmi2", in_slurm=True)
    with pytest.raises(UsageError, match=r"--mpi=pmix: this Slurm has cray_shasta, pmi2"):
        check("pmix", in_slurm=True)


def test_without_slurm_there_is_no_pmi() -> None:
    with pytest.raises(UsageError, match="no Slurm job: submit the launch with sbatch"):
        check("pmix", in_slurm=False)


# What MPI_Abort(comm, 5) and MPI_Abort(comm, -1) print: Open MPI 4.1, MPICH 4.
OPEN_MPI = """MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 5.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
"""
MPICH = "Abort(-1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, -1) - process 1\n"


@pytest.mark.parametrize(("said", "code"), [(OPEN_MPI, 5), (MPICH, -1), ("step 12 done\n", None), ("", None)])
def test_an_abort_is_known_by_what_it_prints(said: str, code: int | None) -> None:
    assert abort_code(said) == code


def failure(rank: int, time: float, message: str, kind: str = "exit") -> m.RankFailure:
    return m.RankFailure("n1", rank, rank, kind, time, 137, None, message)


@pytest.mark.parametrize("cause", [
    failure(3, 9.0, "called MPI_Abort with error code 5"),
    failure(3, 9.0, "killed by SIGSEGV", "signal"),
    failure(3, 9.0, "the srun of the MPI step was killed by signal 9", "spawn"),
])  # fmt: skip
def test_ranks_that_went_with_the_step_are_not_blamed(cause: m.RankFailure) -> None:
    assert origin([failure(0, 1.0, KILLED_WITH_STEP), cause, failure(1, 2.0, KILLED_WITH_STEP)]) == cause


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("srun: error: n3: task 4: Killed\nsrun: launching\n", "srun: error: n3: task 4: Killed"),
        ("python: command not found\n\n", "python: command not found"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_srun_said_last(log: str, line: str) -> None:
    assert last_error(log) == line
