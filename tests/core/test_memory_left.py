"""The tightest limit counts, cgroups of both versions; what cannot be read is no limit."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.core.memory_left import MemoryLeft, memory_left

MEMINFO = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    600 kB\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_this_machine_has_some_left() -> None:
    found = memory_left()
    assert found is not None
    assert 0 < found.left_bytes <= found.limit_bytes


def test_nothing_can_be_read(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None


def test_without_cgroups_it_is_the_machine_s(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert memory_left(tmp_path) == MemoryLeft(600 << 10, 1000 << 10)


def test_the_job_s_limit_of_version_2_counts_above_that_of_the_step(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/task_1\n",
            f"{job}/memory.max": "300000\n",
            f"{job}/memory.current": "250000\n",
            f"{job}/memory.stat": "anon 1\ninactive_file 10000\nactive_file 5\n",
            f"{job}/step_0/memory.max": "max\n",
            f"{job}/step_0/memory.current": "250000\n",
            f"{job}/step_0/memory.stat": "inactive_file 10000\n",
        },
    )
    assert memory_left(tmp_path) == MemoryLeft(60_000, 300_000)


def test_version_1_beside_others(tmp_path: Path) -> None:
    step = "sys/fs/cgroup/memory/slurm/uid_1/job_7/step_0"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpuset:/slurm/uid_1/job_7\n4:memory:/slurm/uid_1/job_7/step_0\n0::/\n",
            f"{step}/memory.limit_in_bytes": "200000\n",
            f"{step}/memory.usage_in_bytes": "190000\n",
            f"{step}/memory.stat": "inactive_file 1\ntotal_inactive_file 5000\n",
        },
    )
    assert memory_left(tmp_path) == MemoryLeft(15_000, 200_000)


def test_a_container_that_does_not_see_its_path_sees_its_root(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/docker/abc\n",
            "sys/fs/cgroup/memory.max": "100000\n",
            "sys/fs/cgroup/memory.current": "1\n",
        },
    )
    assert memory_left(tmp_path) == MemoryLeft(99_999, 100_000)


def test_half_a_cgroup_is_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a\nnonsense\n",
            "sys/fs/cgroup/a/memory.max": "5",
            "sys/fs/cgroup/a/memory.current": "",
        },
    )
    assert memory_left(tmp_path) == MemoryLeft(600 << 10, 1000 << 10)
