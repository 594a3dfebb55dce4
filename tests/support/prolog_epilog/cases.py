"""For every check: a node that passes, one that fails, and one that shows nonsense. The healthy node passes them all.

``then`` is the node at a second look, for checks that compare; the first look is at a healthy one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.support.prolog_epilog.fake_nvml import GIB, FakeNvml, NVMLError_DriverNotLoaded, NVMLError_GpuIsLost
from tests.support.prolog_epilog.node_trees import (
    PORT,
    ROOT_MOUNT,
    SCRATCH,
    Tree,
    dcgm_health,
    health_log,
    kernel_lines,
    process,
)


@dataclass(frozen=True)
class Case:
    """``says`` must be in the evidence; ``device`` is the one that is named. ``limits`` are a site's."""

    bad: Tree = field(default_factory=dict)
    malformed: Tree = field(default_factory=dict)
    says: str = ""
    device: str = ""
    nvml: FakeNvml | None = None
    malformed_nvml: FakeNvml | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    twice: bool = False


def gpu(question: str, answer: Any, says: str, nonsense: Any = "nonsense", **more: Any) -> Case:
    """The second GPU answers one question so."""
    return Case(
        nvml=FakeNvml({question: answer}), malformed_nvml=FakeNvml({question: nonsense}), says=says,
        device="" if more.get("no_device") else "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd",
        **{key: value for key, value in more.items() if key != "no_device"},
    )  # fmt: skip


def log(line: str, says: str, device: str = "") -> Case:
    """One kernel message, or something that is no kernel log."""
    return Case({"/dev/kmsg": kernel_lines((99_990.0, line))}, {"/dev/kmsg": "no kernel log\n"}, says, device)


def rising(path: str, count: int, says: str, device: str) -> Case:
    """A counter that has risen at the second look."""
    return Case({path: f"{count}\n"}, {path: "many\n"}, says, device, twice=True)


LINK_DOWN = {"nvmlDeviceGetNvLinkState": lambda link: int(link != 3 and link < 18)}
XID = "NVRM: Xid (PCI:0000:1b:00): {}"
IO_ERRORS = [(99_990.0 + n, f"I/O error, dev sdb, sector {n} op 0x0:(READ) flags 0x0") for n in range(3)]
ALL_FREE = {"free_percent": 101}

GPU_1 = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"

CASES: dict[str, Case] = {
    "clock-error": Case({"/.adjtimex": "0 1 2500000 9\n"}, {"/.adjtimex": "soon\n"}, "2.500 s"),
    "clock-sync": Case({"/.adjtimex": "5 64 16000000 9\n"}, {"/.adjtimex": "0 1\n"}, "not synchronised"),
    "cpu-online": Case(
        {"/sys/devices/system/cpu/online": "0-5\n"}, {"/sys/devices/system/cpu/online": "some\n"}, "2 of 8"
    ),
    "cpu-throttle": rising(
        "/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count", 5000, "5000 throttles", "cpu0"
    ),
    "daemons": Case({"/proc/801/stat": None}, {"/proc/801/stat": "801 munged\n"}, "no munged"),
    "disk-errors": Case({"/dev/kmsg": kernel_lines(*IO_ERRORS)}, {"/dev/kmsg": "?\n"}, "3 times", "sdb"),
    "disk-inodes": Case({}, {"/proc/self/mountinfo": "nonsense\n"}, "inodes free", "/nvme", limits=ALL_FREE),
    "disk-space": Case({}, {"/proc/self/mountinfo": "nonsense\n"}, "% (", "/nvme", limits=ALL_FREE),
    "file-system-errors": log("EXT4-fs error (device dm-3): ext4_lookup:1785: inode #2", "ext4_lookup", "dm-3"),
    "gpu-count": Case({}, {"/sys/bus/pci/devices/0000:10:00.0/vendor": "NVIDIA\n"}, "1 of 2", nvml=FakeNvml(count=1)),
    "gpu-dcgm": Case(
        {"/.dcgmi-health": dcgm_health({"Memory system": ("Failure", "Contained error on GPU 1.")})},
        {"/.dcgmi-health": '{"body": {"Overall Health": {"value": "Fine"}}}'}, "Memory system: Contained", GPU_1,
    ),
    "gpu-dcgm-warning": Case(
        {"/.dcgmi-health": dcgm_health({"PCIe system": ("Warning", "Detected 9 PCIe replays.")})},
        {"/.dcgmi-health": "Error: unable to establish a connection to the specified host: localhost"},
        "PCIe system: Detected 9", GPU_1,
    ),
    "gpu-driver": Case(
        {}, {"/sys/bus/pci/devices/0000:10:00.0/class": "GPU\n"}, "Driver Not Loaded",
        nvml=FakeNvml(init=NVMLError_DriverNotLoaded("Driver Not Loaded")),
    ),
    "gpu-ecc": gpu("nvmlDeviceGetTotalEccErrors", 1, "1 uncorrected ECC"),
    "gpu-fabric-manager": Case({"/proc/802/stat": None}, {"/proc/802/stat": "()\n"}, "no nv-fabricmanager"),
    "gpu-headroom": gpu("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=78 * GIB, total=80 * GIB), "2.5 %", "none"),
    "gpu-lost": Case({}, {"/sys/bus/pci/devices/0000:11:00.0/vendor": "NVIDIA\n"}, "GPU is lost", GPU_1,
                     nvml=FakeNvml({"nvmlDeviceGetTemperature": NVMLError_GpuIsLost("GPU is lost")})),
    "gpu-memory-left": gpu(
        "nvmlDeviceGetMemoryInfo", SimpleNamespace(used=900 * 2**20, total=80 * GIB), "900 MiB", SimpleNamespace()
    ),
    "gpu-mig": gpu("nvmlDeviceGetMigMode", [1, 1], "MIG is on", [], limits={"mode": "off"}),
    "gpu-nvlink": gpu("nvmlDeviceGetNvLinkState", LINK_DOWN["nvmlDeviceGetNvLinkState"], "down: 3", lambda: 0,
                      limits={"active": 18}),
    "gpu-nvlink-errors": gpu("nvmlDeviceGetNvLinkErrorCounter", lambda link, kind: 500 * (link == 2), "500 link-2-",
                             lambda link, kind: "few", twice=True),
    "gpu-pcie-replays": gpu("nvmlDeviceGetPcieReplayCounter", 9000, "9000 replays", twice=True),
    "gpu-pcie-width": gpu("nvmlDeviceGetCurrPcieLinkWidth", 8, "x8 of x16"),
    "gpu-persistence": gpu("nvmlDeviceGetPersistenceMode", 0, "persistence mode is off"),
    "gpu-processes": gpu("nvmlDeviceGetComputeRunningProcesses", [SimpleNamespace(pid=4242)], "4242",
                         [SimpleNamespace()]),
    "gpu-retired-pages": gpu("nvmlDeviceGetRetiredPagesPendingStatus", 1, "retirement", SimpleNamespace(__len__=None)),
    "gpu-row-remap": gpu("nvmlDeviceGetRemappedRows", (0, 1, 0, 1), "could not be remapped", (0,)),
    "gpu-sram-ecc": gpu("nvmlDeviceGetMemoryErrorCounter", 3, "3 uncorrected SRAM"),
    "gpu-sxid": log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 sourcetrack timeout error",
                    "24007", "0000:c1:00"),
    "gpu-temperature": gpu("nvmlDeviceGetTemperature", 86, "86 °C"),
    "gpu-throttle": gpu("nvmlDeviceGetCurrentClocksThrottleReasons", 0x48, "hardware slowdown, hardware thermal"),
    "gpu-xid": log(XID.format("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."), "fallen off",
                   "0000:1b:00"),
    "hugepages": Case({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 9 kB\nHugePages_Total: 8\nHugePages_Free: 5\n"},
                      {"/proc/meminfo": "MemTotal: lots\n"}, "3 huge pages in use"),
    "ib-fatal-counters": rising(f"{PORT.format(1)}/counters/link_downed", 1, "1 link_downed", "mlx5_1/1"),
    "ib-link": Case({f"{PORT.format(1)}/state": "1: DOWN\n", f"{PORT.format(1)}/phys_state": "2: Polling\n"},
                    {f"{PORT.format(1)}/state": "up and running!\n"}, "DOWN (Polling)", "mlx5_1/1", twice=True),
    "ib-port-errors": rising(f"{PORT.format(1)}/counters/port_rcv_errors", 5000, "5000 port_rcv_errors", "mlx5_1/1"),
    "ib-rate": Case({f"{PORT.format(1)}/rate": "200 Gb/sec (2X NDR)\n"}, {f"{PORT.format(1)}/rate": "fast\n"},
                    "200 of 400", "mlx5_1/1", twice=True),
    "ib-symbol-errors": rising(f"{PORT.format(1)}/counters/symbol_error", 121, "121 symbol_error", "mlx5_1/1"),
    "kernel-hardware-errors": log("mce: [Hardware Error]: CPU 3: Uncorrected error, bank 7", "bank 7"),
    "kernel-lockups": log("watchdog: BUG: soft lockup - CPU#5 stuck for 23s! [python:99]", "CPU#5"),
    "leftovers-burst-buffer": Case({"/nvme/old": "x" * 4096}, {"/proc/1/status": "", "/proc/800/status": "",
                                   "/proc/801/status": "", "/proc/802/status": ""}, "/nvme:", "/nvme",
                                   limits={"most_mib": 0}, settings={"leftovers": {"least_user": 0}}),
    "memory-corrected": rising("/sys/devices/system/edac/mc/mc0/ce_count", 101, "101 corrected", "mc0"),
    "memory-free": Case({"/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 40 kB\n"}, {"/proc/meminfo": ""}, "40 %"),
    "memory-pressure": Case({"/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 4 kB\n"},
                            {"/proc/meminfo": "MemTotal: 0 kB\nMemAvailable: 4 kB\n"}, "critical: 96 %"),
    "memory-size": Case({"/proc/meminfo": "MemTotal: 900000 kB\nMemAvailable: 900000 kB\n"}, {"/proc/meminfo": "\0"},
                        "879 of 976 MiB", limits={"mib": 976}),
    "memory-uncorrected": Case({"/sys/devices/system/edac/mc/mc0/ue_count": "1\n"},
                               {"/sys/devices/system/edac/mc/mc0/ue_count": "one\n"}, "1 uncorrected", "mc0"),
    "mount-latency": Case({}, {"/proc/self/mountinfo": "- - -\n"}, "to answer", "/nvme", limits={"slow_s": 0}),
    "mount-present": Case({"/proc/self/mountinfo": ROOT_MOUNT}, {"/etc/fstab": "/dev/sda1\n"}, "not mounted",
                          "/scratch"),
    "mount-writable": Case({"/proc/self/mountinfo": ROOT_MOUNT + SCRATCH.replace(" rw,relatime", " ro,relatime")},
                           {"/proc/self/mountinfo": "x - y\n"}, "read-only", "/scratch", twice=True),
    "net-errors": rising("/sys/class/net/eth0/statistics/rx_errors", 2000, "2000 rx_errors", "eth0"),
    "net-flaps": rising("/sys/class/net/eth0/carrier_changes", 22, "20 changes", "eth0"),
    "net-link": Case({"/sys/class/net/eth0/carrier": "0\n"}, {"/sys/class/net/eth0/carrier": "yes\n"}, "no carrier",
                     "eth0"),
    "net-speed": Case({"/sys/class/net/eth0/speed": "1000\n"}, {"/sys/class/net/eth0/speed": "1Gb\n"}, "1000 of 25000",
                      "eth0", limits={"mbps": 25000}),
    "nvme-media-errors": Case({"/dev/nvme0": health_log(media=2)}, {"/dev/nvme0": b"\1" * 9}, "2 media-errors", "nvme0",
                              twice=True),
    "nvme-state": Case({"/sys/class/nvme/nvme0/state": "dead\n"}, {"/sys/class/nvme/nvme0/state": "yes!\n"}, "is dead",
                       "nvme0"),
    "nvme-warning": Case({"/dev/nvme0": health_log(warning=0x09)}, {"/dev/nvme0": b""}, "read-only", "nvme0"),
    "nvme-wear": Case({"/dev/nvme0": health_log(used=101)}, {"/dev/nvme0": b"x" * 513}, "101 %", "nvme0"),
    "processes-stuck": Case(process(900, "cat (x)", "D"), {"/proc/900/stat": "900 (cat\n"}, "process 900",
                            limits={"longest_s": 0}),
    "roce-transport-errors": rising(f"{PORT.format(0)}/hw_counters/out_of_sequence", 4000, "4000 out_of_sequence",
                                    "mlx5_0/1"),
    "slurm-conf": Case({"/.scontrol-show-config": "ClusterName = c\nHASH_VAL = Different Ours=1 Slurmctld=2\n"},
                       {"/.scontrol-show-config": "Segmentation fault\n"}, "Different"),
    "zombies": Case({k: v for n in range(101) for k, v in process(2000 + n, "sh", "Z", 800).items()},
                    {"/proc/800/stat": "(((\n"}, "101 of them of process 800"),
}  # fmt: skip
for kind, where in (("shm", "/dev/shm"), ("tmp", "/tmp")):
    CASES[f"leftovers-{kind}"] = Case(
        {f"{where}/old": "x" * 4096}, {"/proc/1/status": "", "/proc/800/status": "", "/proc/801/status": "",
        "/proc/802/status": ""}, f"{where}:", where, limits={"most_mib": 0}, settings={"leftovers": {"least_user": 0}},
    )  # fmt: skip
