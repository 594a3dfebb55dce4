"""Checks against the node: devices, memory, directories (mistakes in the command line are in tests/cli)."""

from __future__ import annotations

import py_compile
import zipapp
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.checks import check, check_ranks, runs_here
from resilio_hpc.launch.cli.dry_run import plan
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.reentry_options import ReentryOptions
from resilio_hpc.launch.gpus.devices import NodeDevices, local_world_size, read_devices, visible_count

GPU_NODE = NodeDevices(gpus=4, xpus=0, cpus=32, memory_bytes=64 << 30)
CPU_NODE = NodeDevices(gpus=0, xpus=0, cpus=6, memory_bytes=64 << 30)


def options(**changes: object) -> LaunchOptions:
    return LaunchOptions(script="x.py", kind="script", run_dir="/tmp/no-run-yet", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("selected", "present", "count"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("0,2", 4, 2),
        ("0,9,1", 4, 1),
        ("-1", 4, 0),
        ("NoDevFiles", 4, 0),
        ("GPU-1,GPU-2", 4, 2),
        ("MIG-a,MIG-b,MIG-c", 1, 3),
        ("0,1", 0, 0),
    ],
)
def test_visible_gpus(selected: str | None, present: int, count: int) -> None:
    assert visible_count(selected, present) == count


def test_devices_are_read_from_the_node(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert read_devices({}, tmp_path).gpus == 2
    assert read_devices({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path).gpus == 1
    assert read_devices({}, tmp_path).memory_bytes == 2 << 20


def test_amd_and_intel_devices(tmp_path: Path) -> None:
    for node, gpu_id in (("0", "0"), ("1", "4711"), ("2", "4712")):  # node 0 is the CPU
        directory = tmp_path / "sys/class/kfd/kfd/topology/nodes" / node
        directory.mkdir(parents=True)
        (directory / "gpu_id").write_text(gpu_id + "\n")
    card = tmp_path / "sys/class/drm/card0/device"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x8086\n")
    (card / "class").write_text("0x038000\n")
    assert read_devices({}, tmp_path).gpus == 2
    assert read_devices({"HIP_VISIBLE_DEVICES": "0"}, tmp_path).gpus == 1
    assert read_devices({}, tmp_path).xpus == 1


def test_an_empty_node_has_nothing(tmp_path: Path) -> None:
    nothing = read_devices({}, tmp_path)
    assert (nothing.gpus, nothing.xpus, nothing.memory_bytes) == (0, 0, 0)


def test_without_device_files_the_gpus_that_slurm_granted_count(tmp_path: Path) -> None:
    granted = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert read_devices(granted, tmp_path).gpus == 4
    assert read_devices({**granted, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path).gpus == 1
    assert read_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path).gpus == 0  # any user may have set it
    assert read_devices({"SLURM_GPUS_ON_NODE": "h100:4"}, tmp_path).gpus == 0


@pytest.mark.parametrize(
    ("asked", "devices", "ranks"),
    [
        ("3", GPU_NODE, 3),
        ("auto", GPU_NODE, 4),
        ("gpu", GPU_NODE, 4),
        ("cpu", GPU_NODE, 32),
        ("auto", CPU_NODE, 6),
        ("auto", NodeDevices(0, 2, 8, 0), 2),
        ("xpu", NodeDevices(0, 2, 8, 0), 2),
    ],
)
def test_ranks_on_a_node(asked: str, devices: NodeDevices, ranks: int) -> None:
    assert local_world_size(asked, devices) == ranks


def test_auto_without_a_gpu_is_told() -> None:
    assert check_ranks(options(nproc_per_node="auto"), CPU_NODE) == (
        "--nproc-per-node auto: no GPU here, so one rank per usable CPU: 6",
    )
    assert check_ranks(options(nproc_per_node="auto"), GPU_NODE) == ()


def test_more_ranks_than_gpus_is_told_and_refused_where_each_must_have_one() -> None:
    assert "the last 2 have none" in check_ranks(options(nproc_per_node="6"), GPU_NODE)[0]
    with pytest.raises(UsageError, match="6 ranks per node, but only 4 GPUs"):
        check_ranks(options(nproc_per_node="6", virtual_local_rank=True), GPU_NODE)


def test_more_ranks_than_the_memory_or_the_cpus_can_hold() -> None:
    with pytest.raises(UsageError, match="need at least 93 GiB"):
        check_ranks(options(nproc_per_node="3000"), CPU_NODE)
    with pytest.raises(UsageError, match="7 ranks cannot share 6 CPUs"):
        check_ranks(options(nproc_per_node="7", cpu_bind="ranks"), CPU_NODE)


def test_a_login_node_does_not_judge_the_compute_nodes(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    on_login_node = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}
    asked = options(nproc_per_node="gpu")
    assert check(asked, on_login_node, tmp_path, CPU_NODE) == ()
    with pytest.raises(UsageError, match="no GPU"):
        check(asked, on_login_node | {"SLURMD_NODENAME": "n1"}, tmp_path, CPU_NODE)
    assert runs_here(options(standalone=True), on_login_node)


def test_a_directory_or_archive_with_main_is_a_program(tmp_path: Path) -> None:
    (tmp_path / "x.py").mkdir()
    (tmp_path / "x.py/__main__.py").touch()
    assert check(options(), {}, tmp_path, CPU_NODE) == ()
    zipapp.create_archive(tmp_path / "x.py", tmp_path / "app.pyz", interpreter="/usr/bin/env python3")
    py_compile.compile(str(tmp_path / "x.py/__main__.py"), str(tmp_path / "compiled.pyc"))
    for name in ("app.pyz", "compiled.pyc"):
        asked = LaunchOptions(script=name, kind="script", run_dir=str(tmp_path / "new/run"))
        assert check(asked, {}, tmp_path, CPU_NODE) == ()
    assert not (tmp_path / "new").exists()


def test_what_cannot_run_as_an_archive_or_compiled_is_refused_at_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("module.py", "")
    (tmp_path / "old.pyc").write_bytes(b"\x42\x0d\x0d\x0a")
    for name, why in (("lib.zip", "without __main__"), ("old.pyc", "not compiled by this Python")):
        with pytest.raises(UsageError, match=why):
            check(LaunchOptions(name, "script", str(tmp_path)), {}, tmp_path, CPU_NODE)


@pytest.mark.parametrize("module", ["json.tool", "timeit", "torch.distributed.run"])
def test_modules_that_exist_pass_without_being_imported(tmp_path: Path, module: str) -> None:
    asked = LaunchOptions(script=module, kind="module", run_dir=str(tmp_path))
    assert check(asked, {}, tmp_path, CPU_NODE) == ()


def test_what_needs_slurm_is_told_to_have_no_effect_without_it() -> None:
    chained = LaunchOptions("/bin/true", "command", "/tmp/new-run", chain=True)
    assert check(chained, {}, Path("/tmp"), CPU_NODE) == ("--chain has no effect outside of Slurm",)
    assert plan(chained, {}, CPU_NODE, True).chained_jobs == 0
    in_a_job = {"SLURM_JOB_ID": "7"}
    assert check(chained, in_a_job, Path("/tmp"), CPU_NODE) == ()
    assert plan(chained, in_a_job, CPU_NODE, True).chained_jobs == 20


HYDRA = """
@hydra.main(version_base=None, config_path="conf", config_name="large")
def main(config):
    pass
"""


@pytest.mark.parametrize(
    ("words", "configuration", "is_told"),
    [
        (("lr=0.1",), None, True),
        (("lr=0.1",), "hydra: {run: {dir: 'outputs/${now:%H-%M-%S}'}}", True),
        (("lr=0.1",), "hydra: {run: {dir: '${oc.env:RESILIO_RUN_DIR}/hydra'}}", False),
        (("lr=0.1", "hydra.run.dir=/runs/large"), None, False),
        (("--multirun", "lr=0.1,0.2", "hydra.sweep.dir=/runs/sweep"), None, False),
    ],
)
def test_a_hydra_script_whose_directory_changes_is_told_of_one_that_stays(
    tmp_path: Path, words: tuple[str, ...], configuration: str | None, is_told: bool
) -> None:
    (tmp_path / "x.py").write_text(HYDRA)
    if configuration is not None:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "large.yaml").write_text(configuration)
    notes = check(options(script_args=words), {}, tmp_path, CPU_NODE)
    assert ["'hydra.run.dir=${oc.env:RESILIO_RUN_DIR}/hydra'" in note for note in notes] == [True] * is_told


def test_a_chain_of_array_tasks_is_refused_with_another_way() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    chained = LaunchOptions("/bin/true", "command", "/tmp/no-run-yet", chain=True)
    with pytest.raises(UsageError, match="a whole array again"):
        check(chained, environment, Path("/tmp/no-run-yet"), CPU_NODE)
    check(LaunchOptions("/bin/true", "command", "/tmp/no-run-yet"), environment, Path("/tmp/no-run-yet"), CPU_NODE)
    check(chained, {"SLURM_JOB_ID": "7"}, Path("/tmp/no-run-yet"), CPU_NODE)


def test_a_rank_of_an_mpi_step_cannot_start_again_alone(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    with pytest.raises(UsageError, match="--restart-policy failed"):
        check(options(mpi="pmix", reentry=ReentryOptions("failed")), {"SLURM_JOB_ID": "7"}, tmp_path, CPU_NODE)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"reentry": ReentryOptions("all", 1)}, "leave out --restart-policy"),
        ({"mpi": "pmix"}, "leave out --mpi"),
        ({"virtual_local_rank": True}, "leave out --virtual-local-rank"),
        ({"kind": "command", "script": "/bin/true"}, "this is a command"),
    ],
)
def test_standby_processes_that_could_take_no_place_are_refused(
    tmp_path: Path, setting: dict[str, Any], why: str
) -> None:
    (tmp_path / "x.py").touch()
    given = replace(options(), **{"reentry": ReentryOptions(spare_ranks=1)} | setting)
    with pytest.raises(UsageError, match=f"--spare-ranks: .*{why}"):
        check(given, {"SLURM_JOB_ID": "7"}, tmp_path, CPU_NODE)
