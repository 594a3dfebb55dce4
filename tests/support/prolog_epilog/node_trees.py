"""Trees of /proc, /sys and /dev as nodes show them, written below a folder: a healthy node, and changes to it.

Formats are those of the kernel's documentation (proc(5), Documentation/ABI); the GPU and InfiniBand parts follow what
NVIDIA's and the RDMA core's drivers show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tree = Mapping[str, str | bytes | None]
"""Path → content; None takes the file out of the healthy tree."""

GPU = "/sys/bus/pci/devices/0000:1{}:00.0"
PORT = "/sys/class/infiniband/mlx5_{}/ports/1"
ROOT_MOUNT = "29 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
SCRATCH = "88 29 0:47 / /scratch rw,relatime shared:46 - nfs4 10.0.0.1:/scratch rw,vers=4.2\n"
KERNEL = "6,{},{},-;{}\n"


def process(pid: int, name: str, state: str = "S", parent: int = 1, user: int = 4242) -> dict[str, str]:
    """What /proc shows of one process, started a second after boot."""
    zeros = " ".join(["0"] * 14)
    return {
        f"/proc/{pid}/stat": f"{pid} ({name}) {state} {parent} {pid} {pid} {zeros} 0 100 0 0\n",
        f"/proc/{pid}/status": f"Name:\t{name}\nUid:\t{user}\t{user}\t{user}\t{user}\n",
        f"/proc/{pid}/comm": f"{name}\n",
        f"/proc/{pid}/cmdline": f"{name}\0",
    }


def kernel_lines(*lines: tuple[float, str]) -> str:
    """A kernel log with messages at seconds since boot."""
    return "".join(KERNEL.format(number, int(at * 1e6), text) for number, (at, text) in enumerate(lines))


def health_log(**changed: int) -> bytes:
    """An NVMe health log page: byte offset by name."""
    page = bytearray(512)
    page[1:3] = (310).to_bytes(2, "little")
    page[3], page[4], page[5] = 100, 10, 2
    for name, value in changed.items():
        at, size = {"warning": (0, 1), "spare": (3, 1), "used": (5, 1), "media": (160, 16)}[name]
        page[at : at + size] = value.to_bytes(size, "little")
    return bytes(page)


def port(number: int, **changed: str) -> dict[str, str]:
    """One InfiniBand port."""
    counters = ("link_downed", "symbol_error", "port_rcv_errors", "excessive_buffer_overrun_errors")
    return {
        f"{PORT.format(number)}/state": "4: ACTIVE\n",
        f"{PORT.format(number)}/phys_state": "5: LinkUp\n",
        f"{PORT.format(number)}/rate": "400 Gb/sec (4X NDR)\n",
        f"{PORT.format(number)}/link_layer": "InfiniBand\n",
        **{f"{PORT.format(number)}/counters/{name}": "0\n" for name in counters},
        f"{PORT.format(number)}/hw_counters/out_of_sequence": "0\n",
        **{f"{PORT.format(number)}/{name.replace('__', '/')}": value for name, value in changed.items()},
    }


# Written after NVIDIA's source of dcgmi (Health.cpp, DcgmiOutput.cpp, Query.cpp), not captured from a node.
DCGM_DISCOVERY = """2 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:1B:00.0                                         |
|        | Device UUID: GPU-00000000-aaaa-bbbb-cccc-dddddddddddd                |
+--------+----------------------------------------------------------------------+
| 1      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:1C:00.0                                         |
|        | Device UUID: GPU-00000001-aaaa-bbbb-cccc-dddddddddddd                |
+--------+----------------------------------------------------------------------+
0 NvSwitches found.
"""


def dcgm_health(second_gpu: dict[str, tuple[str, str]]) -> str:
    """``dcgmi health --check --json``. ``second_gpu``: system → (result, text)."""
    results = ["Healthy", "Warning", "Failure"]
    worst = max((result for result, _ in second_gpu.values()), key=results.index, default="Healthy")
    body: dict[str, Any] = {"Overall Health": {"value": worst}}
    if second_gpu:
        errors = {name: {"overflow": [text], "value": result} for name, (result, text) in second_gpu.items()}
        body["GPU"] = {"children": {"1": {"children": {"Errors": {"children": errors}}, "value": worst}}}
    return json.dumps({"body": body, "header": ["Health Monitor Report"]})


HEALTHY: dict[str, str | bytes] = {
    "/proc/uptime": "100000.00 700000.00\n",
    "/proc/sys/kernel/random/boot_id": "11111111-2222-3333-4444-555555555555\n",
    "/proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 950000 kB\nHugePages_Total: 8\nHugePages_Free: 8\n",
    "/proc/self/mountinfo": ROOT_MOUNT + SCRATCH,
    "/etc/fstab": "# disks\n/dev/nvme0n1p2 / ext4 defaults 0 1\n10.0.0.1:/scratch /scratch nfs4 defaults 0 0\n",
    "/dev/kmsg": kernel_lines((1.0, "Linux version 6.1"), (2.0, "Command line: quiet")),
    "/.adjtimex": "0 1 1500 200\n",
    "/.dcgmi-health": dcgm_health({}),
    "/.dcgmi-discovery": DCGM_DISCOVERY,
    "/.scontrol-show-config": "ClusterName = c\nHASH_VAL = Match\n",
    **process(1, "systemd"),
    **process(800, "slurmd"),
    **process(801, "munged"),
    **process(802, "nv-fabricmanage"),
    "/dev/nvidia-nvswitch0": "",
    **{f"{GPU.format(number)}/vendor": "0x10de\n" for number in range(2)},
    **{f"{GPU.format(number)}/class": "0x030200\n" for number in range(2)},
    **port(0),
    **port(1),
    "/sys/class/net/eth0/device/vendor": "0x15b3\n",
    "/sys/class/net/eth0/flags": "0x1003\n",
    "/sys/class/net/eth0/carrier": "1\n",
    "/sys/class/net/eth0/carrier_changes": "2\n",
    "/sys/class/net/eth0/speed": "25000\n",
    "/sys/class/net/eth0/statistics/rx_errors": "0\n",
    "/sys/class/net/lo/flags": "0x9\n",
    "/sys/devices/system/edac/mc/mc0/ce_count": "0\n",
    "/sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    "/sys/devices/system/cpu/present": "0-7\n",
    "/sys/devices/system/cpu/online": "0-7\n",
    "/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "0\n",
    "/sys/class/nvme/nvme0/state": "live\n",
    "/dev/nvme0": health_log(),
    "/dev/shm/.keep": "",
    "/tmp/.keep": "",
    "/scratch/.keep": "",
    "/nvme/.keep": "",
}


def write(root: Path, changes: Tree | None = None) -> Path:
    """Write the healthy node with ``changes`` below ``root``; returns it."""
    for name, content in {**HEALTHY, **(changes or {})}.items():
        path = root / name.lstrip("/")
        if content is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root
