"""A rank's environment, against what the real torchrun gives to its ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.workers.rank_env import RankPlacement, RoundSetting, rank_argv, rank_variables
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

# Values that belong to one run of one launcher
OWN_VALUES = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
}


def setting() -> RoundSetting:
    return RoundSetting(
        run_id="r1",
        run_dir=Path("/runs/r1"),
        round=2,
        epoch=1,
        restart_count=0,
        master_addr="node1",
        master_port=29501,
        agent_socket=Path("/run/agent"),
        arena_dir=Path("/dev/shm/a"),
        restore="memory:30",
        read_ahead=Path("/run/read-ahead"),
        collective_s=660.0,
    )


def variables(
    base: dict[str, str] | None = None, local_rank: int = 0, local_world_size: int = 2, **options: object
) -> dict[str, str]:
    return rank_variables(
        base or {},
        LaunchOptions(script="x.py", kind="script", run_dir="/runs/r1", **options),  # type: ignore[arg-type]
        RankPlacement(0, 1, local_rank, local_world_size, local_rank, local_world_size),
        setting(),
        Path(f"/spool/{local_rank}/error.json"),
    )


def test_the_ranks_see_what_torchrun_would_have_set(tmp_path: Path) -> None:
    script = tmp_path / "dump.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(dict(os.environ)))\n"
    )
    base = scrubbed("OMP_")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(tmp_path)]
    subprocess.run(command, env=base, check=True, capture_output=True, timeout=PATIENCE_S)
    for rank in range(2):
        seen = json.loads((tmp_path / str(rank)).read_text())
        # an interpreter may be found through wrappers that touch these
        theirs = {name: value for name, value in seen.items() if base.get(name) != value} | {}
        for name in ("PATH", "_", "PYTHONPATH", "LC_CTYPE", "SHLVL", "PWD", "OLDPWD"):
            theirs.pop(name, None)
        ours = variables(base, rank)
        assert {name for name in ours if not name.startswith("RESILIO_")} == set(theirs)
        assert {n: v for n, v in theirs.items() if n not in OWN_VALUES} == {
            n: v for n, v in ours.items() if n in theirs and n not in OWN_VALUES
        }


def test_what_our_own_parts_read() -> None:
    ours = {name: value for name, value in variables(local_rank=1).items() if name.startswith("RESILIO_")}
    assert ours == {
        "RESILIO_RUN_ID": "r1",
        "RESILIO_RUN_DIR": "/runs/r1",
        "RESILIO_CHECKPOINT_DIR": "/runs/r1/checkpoints",
        "RESILIO_AGENT_SOCKET": "/run/agent",
        "RESILIO_ROUND": "2",
        "RESILIO_EPOCH": "1",
        "RESILIO_RANK_RESTARTS": "0",
        "RESILIO_ARENA_DIR": "/dev/shm/a",
        "RESILIO_RESTORE": "memory:30",
        "RESILIO_COLLECTIVE_TIMEOUT_S": "660",
        "RESILIO_READ_AHEAD": "/run/read-ahead",
        "RESILIO_LOCAL_RANK": "1",
        "RESILIO_CALLS": "/dev/shm/a/calls-2-1",
        "RESILIO_STACK_FILE": "/spool/1/error.stacks",
        "RESILIO_TP": "1",
        "RESILIO_PP": "1",
        "RESILIO_DP": "2",
    }


def test_ranks_of_the_second_node() -> None:
    options = LaunchOptions(script="x.py", kind="script", run_dir="/r", role="trainer", torchelastic_run_id="mine")
    env = rank_variables({}, options, RankPlacement(1, 3, 2, 4, 6, 12), setting(), Path("/e"))
    assert [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["6", "2", "12", "4"]
    assert [env[name] for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")] == [
        "1",
        "3",
        "6",
        "12",
    ]
    assert (env["ROLE_NAME"], env["TORCHELASTIC_RUN_ID"]) == ("trainer", "mine")


@pytest.mark.parametrize(
    ("base", "ranks", "threads"),
    [({}, 2, "1"), ({}, 1, None), ({"OMP_NUM_THREADS": "4"}, 2, None), ({"SLURM_CPUS_PER_TASK": "8"}, 2, "1")],
)
def test_openmp_threads_as_with_torchrun(base: dict[str, str], ranks: int, threads: str | None) -> None:
    assert variables(base, local_world_size=ranks).get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("visible", "gpu"), [(None, "1"), ("3,5", "5"), ("GPU-aa, GPU-bb", "GPU-bb"), ("MIG-1,MIG-2", "MIG-2")]
)
def test_virtual_local_rank_gives_one_gpu_each(visible: str | None, gpu: str) -> None:
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = variables(base, local_rank=1, virtual_local_rank=True)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env["RESILIO_LOCAL_RANK"]) == ("0", gpu, "1")


def test_virtual_local_rank_without_a_gpu_left_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no GPU for local rank 1"):
        variables({"CUDA_VISIBLE_DEVICES": "0"}, local_rank=1, virtual_local_rank=True)


def test_the_local_rank_macro_in_arguments() -> None:
    options = LaunchOptions(script="x.py", kind="script", run_dir="/r", script_args=("--out=${local_rank}.log", "$$1"))
    assert rank_argv(options, 3) == ("x.py", "--out=3.log", "$$1")
