"""The sources on this machine's own /proc and /sys, on captured trees, and with a driver that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from resilio_hpc.metrics.gpus import LINKS_EVERY, GpuSource, throttled
from resilio_hpc.metrics.host import HostSource
from resilio_hpc.metrics.memory_watch import MemoryUsed
from resilio_hpc.metrics.messages import RankFacts
from resilio_hpc.metrics.network import NetworkSource
from resilio_hpc.metrics.ranks import RankSource, largest
from resilio_hpc.metrics.sheet import Sheet
from resilio_hpc.metrics.sources import Sources
from resilio_hpc.metrics.storage import StorageSource
from resilio_hpc.prolog_epilog.base.node import NodeView
from tests.support.prolog_epilog.fake_nvml import FakeNvml, NVMLError_GpuIsLost, NVMLError_NotSupported, gpu_source
from tests.support.waiting import PATIENCE_S, until


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_this_host_has_processors_and_memory() -> None:
    source = HostSource()
    source.read()
    burn = threading.Event()
    until(lambda: sum(range(100_000)) and source.read().get("host_cpu_used_ratio") is not None, "a second sample")
    burn.set()
    sheet = source.read(os.getpid())
    total, available = sheet.get("host_memory_total_bytes"), sheet.get("host_memory_available_bytes")
    assert total is not None and available is not None
    assert 0 < available < total
    assert total == psutil.virtual_memory().total
    assert sheet.get("host_processors") == len(os.sched_getaffinity(0))
    share = sheet.get("host_cpu_used_ratio")
    assert share is None or 0 <= share <= 1


def test_pressure_and_the_job_s_cgroup_are_read(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    write(tmp_path, {
        "proc/pressure/memory": "some avg10=1.00 avg60=0.50 avg300=0.10 total=2500000\nfull avg10=0 avg60=0 avg300=0 "
        "total=1000000\n",
        "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=nonsense\n",
        "proc/12/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
        "proc/vmstat": "nr_free_pages 12\noom_kill 5\n",
        f"{job}/memory.max": "1000000\n",
        f"{job}/memory.current": "900000\n",
        f"{job}/memory.stat": "anon 400000\ninactive_file 200000\nactive_file 100000\nshmem 0\n",
        f"{job}/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\n",
        f"{job}/step_0/memory.max": "max\n",
    })  # fmt: skip
    sheet = HostSource(tmp_path).read(12)
    assert sheet.get("host_memory_waiting_seconds_total") == 2.5
    assert sheet.get("host_memory_stalled_seconds_total") == 1.0
    assert sheet.get("host_cpu_waiting_seconds_total") is None
    assert sheet.get("job_memory_limit_bytes") == 1_000_000
    assert sheet.get("job_memory_used_bytes") == 600_000  # page cache can be dropped
    assert (sheet.get("job_oom_kills_total"), sheet.get("host_oom_kills_total")) == (3, 5)


def test_space_and_the_disk_behind_it(tmp_path: Path) -> None:
    source = StorageSource({"run_dir": tmp_path, "shm": Path("/dev/shm"), "gone": tmp_path / "gone"})
    sheets = {name: read() for name, read in source.reads().items()}
    found = os.statvfs(tmp_path)
    assert sheets["storage run_dir"].get("storage_size_bytes", "run_dir") == found.f_blocks * found.f_frsize
    assert list(sheets["storage gone"].items()) == []
    disks = set(sheets["disks"].labelled("disk_reads_total"))
    assert disks <= set(psutil.disk_io_counters(perdisk=True))


def test_a_disk_is_found_by_its_number(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    link = tmp_path / f"dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    name = next(iter(psutil.disk_io_counters(perdisk=True)), None)
    if name is None or not os.major(device):
        pytest.skip("needs a disk")
    link.symlink_to(f"../../block/{name}")
    source = StorageSource({"local": tmp_path}, sysfs=tmp_path)
    source.space("local")
    assert set(source.traffic().labelled("disk_read_bytes_total")) == {name}


def test_interfaces_tcp_and_infiniband(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(tmp_path, {
        "proc/net/snmp": "Ip: A B\nIp: 1 2\nTcp: OutSegs RetransSegs InErrs\nTcp: 100 7 0\n",
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/counters/port_rcv_data": "10\n",
        f"{port}/counters/link_downed": "3\n",
        f"{port}/counters/symbol_error": "N/A (no PMA)\n",
        f"{port}/hw_counters/out_of_sequence": "99999999999999999999999999\n",
    })  # fmt: skip
    sheet = NetworkSource(tmp_path).read()
    assert sheet.get("tcp_retransmitted_segments_total") == 7
    assert sheet.get("infiniband_received_bytes_total", "mlx5_0/1") == 40
    assert sheet.get("infiniband_link_downs_total", "mlx5_0/1") == 3
    assert sheet.get("infiniband_active", "mlx5_0/1") == 1
    assert sheet.get("infiniband_symbol_errors_total", "mlx5_0/1") is None
    assert sheet.get("infiniband_out_of_sequence_total", "mlx5_0/1") is None
    assert "lo" not in sheet.labelled("network_sent_bytes_total")


def test_this_host_s_network() -> None:
    sheet = NetworkSource().read()
    assert (sheet.get("tcp_sent_segments_total") or 0) > 0
    assert set(sheet.labelled("network_sent_bytes_total")) <= set(psutil.net_io_counters(pernic=True))


def test_gpus_by_a_fake_nvml(tmp_path: Path) -> None:
    source = gpu_source(tmp_path, FakeNvml({"nvmlDeviceGetPowerUsage": NVMLError_NotSupported()}))
    sheet = source.read()
    assert sheet.get("gpu_utilization_ratio", "0") == 0.97
    assert sheet.get("gpu_memory_total_bytes", "1") == 80 * 2**30
    assert sheet.get("gpu_power_watts", "0") == 651
    assert sheet.get("gpu_power_watts", "1") is None
    assert sheet.get("gpu_sm_clock_hertz", "0") == 1980e6
    assert (sheet.get("gpu_nvlinks_active", "0"), sheet.get("gpu_nvlink_errors_total", "0")) == (18, 0)
    assert sheet.get("gpu_lost", "0") == 0


@pytest.mark.parametrize(
    ("reasons", "found"),
    [((0x0, 0x1), (0, 0)), ((0x4, 0x4), (0, 0)), ((0x44, 0x0), (1, 0x40)), ((0x20, 0x88), (2, 0xA8))],
)
def test_gpus_that_heat_or_power_hold_down_are_counted(
    reasons: tuple[int, int], found: tuple[int, int], tmp_path: Path
) -> None:
    """Idle (1) and the power cap (4) belong to the usual work."""
    nvml = FakeNvml()
    for gpu, bits in zip(nvml._gpus, reasons, strict=False):
        gpu["nvmlDeviceGetCurrentClocksThrottleReasons"] = bits
    assert throttled(gpu_source(tmp_path, nvml).read()) == found


def test_a_lost_gpu_has_no_other_values(tmp_path: Path) -> None:
    sheet = gpu_source(tmp_path, FakeNvml({"nvmlDeviceGetMemoryInfo": NVMLError_GpuIsLost("lost")})).read()
    assert sheet.get("gpu_lost", "1") == 1
    assert set(sheet.labelled("gpu_memory_used_bytes")) == {"0"}


def test_links_are_asked_seldom_and_stay_known(tmp_path: Path) -> None:
    nvml = FakeNvml()
    source = gpu_source(tmp_path, nvml)
    source.read()
    nvml._gpus[0]["nvmlDeviceGetNvLinkErrorCounter"] = lambda link, kind: 5
    seen = [source.read().get("gpu_nvlink_errors_total", "0") for _ in range(LINKS_EVERY)]
    assert seen == [0] * (LINKS_EVERY - 1) + [18 * 3 * 5]


def test_a_node_without_gpus_never_asks_nvml(tmp_path: Path) -> None:
    def nvml() -> object:
        raise AssertionError("asked")

    assert list(GpuSource(NodeView(root=tmp_path, nvml=nvml)).read().items()) == []


def test_a_rank_s_memory_time_and_limit() -> None:
    program = (
        "import resource, sys, time; resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34)); print(); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            source = RankSource()
            sheet = source.read([RankFacts(3, process.pid, step=7, step_s=0.5), RankFacts(4, 2**22 + 1)])
        finally:
            process.kill()
    assert (sheet.get("rank_resident_bytes", "3") or 0) > 1 << 20
    assert sheet.get("rank_resident_bytes", "4") is None
    assert (sheet.get("rank_step", "3"), sheet.get("rank_step", "4")) == (7, None)
    (limit,) = source.limits
    assert isinstance(limit, MemoryUsed)
    assert (limit.subject, limit.limit_bytes) == ("rank 3", 2**34)
    assert largest(sheet) == ("rank 3", sheet.get("rank_resident_bytes", "3"))


def test_a_source_that_hangs_leaves_the_others_and_is_not_asked_again() -> None:
    go_on, asked = threading.Event(), []

    def hangs() -> Sheet:
        asked.append(1)
        go_on.wait(PATIENCE_S)
        return one("host_load1", 2.0)

    def fails() -> Sheet:
        raise OSError(5, "Input/output error")

    sources = Sources({"gpus": hangs, "network": fails, "host": lambda: one("host_swap_used_bytes", 1.0)}, 0.1)
    first, second = sources.read(), sources.read()
    assert [first.get("source_stuck", name) for name in ("gpus", "network", "host")] == [1, 0, 0]
    assert second.get("host_swap_used_bytes") == 1
    assert sources.notes == ["gpus does not answer: its disk, file system or driver hangs"]
    assert len(asked) == 1
    go_on.set()
    until(lambda: sources.read().get("host_load1") == 2.0, "the source's answer")


def one(name: str, value: float) -> Sheet:
    sheet = Sheet()
    sheet.put(name, value)
    return sheet
