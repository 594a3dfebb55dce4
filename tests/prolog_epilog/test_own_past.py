"""Checks that compare with the node's own past: what is odd on purpose only warns, or is silent once it is normal."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from resilio_hpc.prolog_epilog.base.check import DeviceHistory, Former, Result, Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.mounts import mount_of, parse_mountinfo
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles
from resilio_hpc.prolog_epilog.base.table import load
from resilio_hpc.prolog_epilog.checks import ethernet, file_systems, gpu, nvme, registry
from resilio_hpc.prolog_epilog.checks.file_systems import FileSystem, choose, parse_fstab
from resilio_hpc.prolog_epilog.checks.gpu_readings import Gpu, Gpus
from resilio_hpc.prolog_epilog.checks.nvme import HealthLog, NvmeController
from resilio_hpc.prolog_epilog.run.baseline import Values
from resilio_hpc.prolog_epilog.run.runner import CheckRunner, RunMemory
from tests.support.prolog_epilog.fake_nvml import FakeNvml, NVMLError_Unknown, _raise
from tests.support.prolog_epilog.node_trees import ROOT_MOUNT, Tree, health_log, port, write

TABLE = load(site=Path("/dev/null"))
IB = "/sys/class/infiniband"
CPU = "/sys/devices/system/cpu"


class NodeOfPast:
    """A node that is looked at again and again; ``now_s`` moves by 400 s from look to look."""

    def __init__(self, root: Path, normal: Values | None = None, now_s: float = 1e5) -> None:
        self.root, self.now_s = root, now_s
        self.memory = RunMemory(normal=normal)
        self.learned: Values = {}

    def look(self, *names: str, tree: Tree | None = None) -> dict[str, list[tuple[str, str]]]:
        """By check that found something: (action, device) of each fault; ("?", note) where it could not be read.

        ``tree`` is laid over a healthy node; without one, the node is as it was."""
        if tree is not None or not (self.root / "proc").exists():
            write(self.root, tree)
        return {one.check: found for one in self.results(*names) if (found := list(_told(one)))}

    def results(self, *names: str) -> list[Result]:
        node = NodeView(settings=TABLE.settings, root=self.root, nvml=FakeNvml)
        now_s = self.now_s
        runner = CheckRunner(
            registry.SOURCES, registry.PROBES, node, lambda: now_s, memory=self.memory, learned=self.learned
        )
        self.now_s += 400
        checks = [msgspec.structs.replace(TABLE.check(name), budget_s=300.0) for name in names]
        return runner.run(checks)


def _told(result: Result) -> list[tuple[str, str]]:
    if result.status == "unknown":
        return [("?", result.note)]
    return [(one.on_fail or result.on_fail, one.device) for one in result.faults]


def ports(first: int, last: int, rate: str = "400 Gb/sec (4X NDR)", **more: str) -> dict[str, str]:
    return {k: v for number in range(first, last + 1) for k, v in port(number, rate=f"{rate}\n", **more).items()}


def renamed(name: str, tree: Mapping[str, str]) -> dict[str, str]:
    """The tree of port mlx5_0 as that of another adapter."""
    return {path.replace("mlx5_0", name): text for path, text in tree.items()}


# Eight at 400 Gb/s, two of another model for storage, management by RoCE, an iWARP adapter that counts nothing, a port
# that is switched off, and a virtual function.
MIXED = {
    **ports(0, 7),
    **ports(8, 9, "200 Gb/sec (4X HDR)"),
    **{f"{IB}/mlx5_{number}/hca_type": "MT4123\n" if number >= 8 else "MT4129\n" for number in range(10)},
    **renamed("mlx5_10", port(0, rate="25 Gb/sec (1X EDR)\n", link_layer="Ethernet\n")),
    **renamed("irdma0", port(0, rate="100 Gb/sec (4X EDR)\n", link_layer="Ethernet\n")),
    f"{IB}/irdma0/ports/1/counters/link_downed": "N/A (no PMA)\n",
    **renamed("mlx5_11", port(0, state="1: DOWN\n", phys_state="3: Disabled\n", rate="40 Gb/sec (4X QDR)\n")),
    **renamed("mlx5_12", port(0, state="1: DOWN\n", phys_state="2: Polling\n")),
    f"{IB}/mlx5_12/device/physfn": "",
}
LINKS = ("ib-link", "ib-rate", "ib-fatal-counters")


def test_a_mixed_layout_drains_nothing_and_says_nothing_once_it_is_normal(tmp_path: Path) -> None:
    node = NodeOfPast(tmp_path)
    first = node.look(*LINKS, tree=MIXED)
    assert first == {"ib-link": [("warn", "mlx5_11/1")]} == node.look(*LINKS)
    node.memory = RunMemory(normal=dict(node.learned))
    assert node.look(*LINKS) == {}


def test_a_port_is_judged_by_its_own_past(tmp_path: Path) -> None:
    node = NodeOfPast(tmp_path)
    slower = port(1, rate="200 Gb/sec (2X NDR)\n")
    assert node.look(*LINKS, tree=slower) == {"ib-rate": [("warn", "mlx5_1/1")]} == node.look(*LINKS)
    node = NodeOfPast(tmp_path)
    assert node.look(*LINKS, tree=port(1)) == {}
    down = port(0, state="1: DOWN\n", phys_state="2: Polling\n")
    bad = {"ib-link": [("drain", "mlx5_0/1")], "ib-rate": [("drain", "mlx5_1/1")]}
    assert node.look(*LINKS, tree={**slower, **down}) == bad == node.look(*LINKS)
    node.memory.clear("ib-rate", node.now_s)  # it was put right: begin anew
    assert node.look(*LINKS) == {"ib-link": [("drain", "mlx5_0/1")]}


def test_the_baseline_outlasts_a_boot_and_misses_what_is_gone(tmp_path: Path) -> None:
    normal: Values = {"ib-link": {"mlx5_0/1": True, "mlx5_1/1": True, "mlx5_9/1": True}, "ib-rate": {"mlx5_1/1": 400.0}}
    node = NodeOfPast(tmp_path, normal, now_s=100.0)
    slower = port(1, rate="200 Gb/sec (2X NDR)\n")
    faults = {"ib-link": ["mlx5_9/1"], "ib-rate": ["mlx5_1/1"]}
    for action in ("warn", "drain"):  # at first the node has just been started: links come up
        wanted = {check: [(action, device) for device in devices] for check, devices in faults.items()}
        assert node.look(*LINKS, tree=slower) == wanted
    node = NodeOfPast(tmp_path / "none", normal)
    write(node.root)
    (node.root / "sys/class/infiniband").rename(node.root / "gone")
    (result,) = node.results("ib-link")
    assert result.faults[0].evidence.startswith("no InfiniBand or RoCE adapter, and the baseline has mlx5_0/1")


UNREADABLE: list[tuple[str, Tree, str, Tree]] = [
    # what cannot be read, and a fault beside it that is seen all the same
    ("ib-link", port(0, state="up!\n"), "mlx5_1/1", port(1, state="1: DOWN\n")),
    ("ib-fatal-counters", port(0, counters__link_downed="many\n"), "mlx5_1/1", port(1, counters__link_downed="1\n")),
    ("ib-link", {f"{IB}/mlx5_2/ports": "no folder\n"}, "mlx5_1/1", port(1, state="1: DOWN\n")),
    ("ib-rate", {f"{IB}/mlx5_0/hca_type/x": ""}, "mlx5_1/1", port(1, rate="200 Gb/sec (4X HDR)\n")),
    ("net-errors", {"/sys/class/net/eth1/device/vendor": "", "/sys/class/net/eth1/flags": "up\n"}, "eth0",
     {"/sys/class/net/eth0/statistics/rx_errors": "5000\n"}),
    ("net-link", {"/sys/class/net/eth1/device/vendor": "", "/sys/class/net/eth1/flags": "up\n"}, "eth0",
     {"/sys/class/net/eth0/carrier": "0\n"}),
    ("nvme-warning", {"/sys/class/nvme/nvme1/state": "live\n", "/dev/nvme1": b"\0" * 512}, "nvme0",
     {"/dev/nvme0": health_log(warning=4)}),
    ("nvme-state", {"/sys/class/nvme/nvme1/state": "live\n", "/dev/nvme1": b"\xff" * 512}, "nvme0",
     {"/sys/class/nvme/nvme0/state": "dead\n"}),
    ("memory-uncorrected", {"/sys/devices/system/edac/mc/mc1/ce_count": "0\n",
     "/sys/devices/system/edac/mc/mc1/ue_count": "?\n"}, "mc0", {"/sys/devices/system/edac/mc/mc0/ue_count": "2\n"}),
    ("mount-present", {"/etc/fstab": "/dev/sda1\n/dev/sdb1 /data xfs\n"}, "/data", {}),
]  # fmt: skip


@pytest.mark.parametrize(("check", "unreadable", "device", "bad"), UNREADABLE, ids=lambda one: str(one)[:24])
def test_what_cannot_be_read_blinds_no_other(
    check: str, unreadable: Tree, device: str, bad: Tree, tmp_path: Path
) -> None:
    node = NodeOfPast(tmp_path)
    found = node.look(check, tree=unreadable)
    assert found == {} or found[check][0][0] == "?" or check == "mount-present", found
    assert device in [name for _, name in node.look(check, tree={**unreadable, **bad}).get(check, [])]


def test_a_question_that_a_gpu_cannot_answer_is_no_reason_against_it(tmp_path: Path) -> None:
    """Drivers answer some questions with "Unknown Error" on some GPUs, and the same on all nodes."""
    write(tmp_path)
    unknown = NVMLError_Unknown("Unknown Error")
    changes = {"nvmlDeviceGetNvLinkErrorCounter": lambda *_: _raise(unknown), "nvmlDeviceGetTotalEccErrors": "some"}
    names = ["gpu-driver", "gpu-count", "gpu-lost", "gpu-nvlink", "gpu-nvlink-errors", "gpu-ecc", "gpu-temperature"]
    node = NodeView(settings=TABLE.settings, root=tmp_path, nvml=lambda: FakeNvml(changes))
    checks = [msgspec.structs.replace(TABLE.check(name), budget_s=300.0) for name in names]
    results = CheckRunner(registry.SOURCES, registry.PROBES, node, lambda: 1e5).run(checks)
    told = {one.check: one.note.partition(": Expected")[0] for one in results if one.status != "pass"}
    assert told == {
        "gpu-nvlink-errors": "GPU 1: nvmlDeviceGetNvLinkErrorCounter: Unknown Error",
        "gpu-ecc": "GPU 1: nvmlDeviceGetTotalEccErrors answers with what is no answer",
    }


def test_hyperthreads_that_are_switched_off_are_meant_so(tmp_path: Path) -> None:
    node = NodeOfPast(tmp_path)
    no_threads = {f"{CPU}/smt/control": "forceoff\n", f"{CPU}/online": "0-3\n"}
    assert node.look("cpu-online", tree=no_threads) == {}
    assert node.look("cpu-online", tree={**no_threads, f"{CPU}/online": "0-2\n"}) == {"cpu-online": [("drain", "")]}
    node = NodeOfPast(tmp_path)  # a boot later
    assert node.look("cpu-online", tree={**no_threads, f"{CPU}/online": "0-2\n"}) == {"cpu-online": [("warn", "")]}
    node = NodeOfPast(tmp_path, {"cpu-online": {"online": 4}})
    assert node.look("cpu-online") == {"cpu-online": [("drain", "")]}
    off = {f"{CPU}/smt/control": "on\n", f"{CPU}/online": "0-3\n"}  # by a script of the site's
    assert NodeOfPast(tmp_path).look("cpu-online", tree=off) == {"cpu-online": [("warn", "")]}
    assert NodeOfPast(tmp_path, {"cpu-online": {"online": 4}}).look("cpu-online") == {}


def test_a_baseline_knows_of_memory_modules_and_gpus_that_are_gone(tmp_path: Path) -> None:
    tib = 1024
    normal: Values = {"memory-size": {"GiB": tib}, "gpu-count": {"GPUs": 3}, "nvme-state": {"disks": 2}}
    node = NodeOfPast(tmp_path, normal)

    def size(gib: float) -> Tree:
        return {"/proc/meminfo": f"MemTotal: {int(gib * 2**20)} kB\nMemAvailable: 9 kB\n"}

    names = tuple(normal)
    gone = {"gpu-count": [("drain", "")], "nvme-state": [("drain", "")]}
    assert node.look(*names, tree=size(tib - 8)) == gone  # another kernel
    assert node.look(*names, tree=size(tib - 64)) == {"memory-size": [("drain", "")], **gone}


def test_a_controller_that_is_being_reset_is_no_lost_disk_yet(tmp_path: Path) -> None:
    state = "/sys/class/nvme/nvme0/state"
    node = NodeOfPast(tmp_path)
    for text, action in (("resetting", "warn"), ("connecting", "drain"), ("live", ""), ("resetting", "warn")):
        found = node.look("nvme-state", tree={state: f"{text}\n"})
        assert found == ({"nvme-state": [(action, "nvme0")]} if action else {}), text
    of_a_server = {state: "dead\n", "/sys/class/nvme/nvme0/transport": "tcp\n"}
    assert node.look("nvme-state", tree=of_a_server) == {"nvme-state": [("warn", "nvme0")]}


def test_a_virtual_disk_without_spare_blocks_is_not_worn() -> None:
    log = nvme.parse_log(health_log(spare=0)[:4] + b"\0" + health_log()[5:])
    assert (log.spare, log.spare_least) == (0, 0)
    limits = Thresholds({"used_percent": 100})
    assert list(nvme.wear([NvmeController("nvme0", "live", log)], limits)) == []
    worn = HealthLog(0, 30, spare=9, spare_least=10, used=2, media_errors=0)
    assert [one.device for one in nvme.wear([NvmeController("nvme0", "live", worn)], limits)] == ["nvme0"]
    for filled in (b"\0", b"\xff"):
        with pytest.raises(Unreadable, match="all of them"):
            nvme.parse_log(filled * 512)


MOUNTS = ROOT_MOUNT + "".join(
    f"{number} 29 0:{number} / {path} {options} shared:1 - {kind} {device} {options.split(',')[0]}\n"
    for number, (path, options, kind, device) in enumerate(
        (
            ("/cvmfs/atlas.cern.ch", "ro,nosuid", "fuse", "cvmfs2"),
            ("/software", "ro,relatime", "nfs4", "10.0.0.1:/software"),
            ("/tmp/img", "ro,nosuid", "fuse.squashfuse", "squashfuse"),
            ("/scratch", "rw,relatime", "nfs4", "10.0.0.1:/scratch"),
        ),
        40,
    )
)


def test_what_was_never_writable_is_read_only_on_purpose(tmp_path: Path) -> None:
    places = {f"{path}/.keep": "" for path in ("/cvmfs/atlas.cern.ch", "/software", "/tmp/img")}
    node = NodeOfPast(tmp_path)
    assert node.look("mount-writable", "disk-space", tree={"/proc/self/mountinfo": MOUNTS, **places}) == {}
    became = MOUNTS.replace("/scratch rw", "/scratch ro")
    bad = {"mount-writable": [("drain", "/scratch")]}
    assert node.look("mount-writable", tree={"/proc/self/mountinfo": became}) == bad == node.look("mount-writable")
    assert node.look("mount-writable", tree={"/proc/self/mountinfo": MOUNTS}) == {}
    after_a_boot = NodeOfPast(tmp_path)
    assert after_a_boot.look("mount-writable", tree={"/proc/self/mountinfo": became}) == {}
    assert after_a_boot.learned["mount-writable"]["/scratch nfs4"] is False
    after_a_boot.memory = RunMemory(
        normal={"mount-writable": {"/scratch nfs4": True, "/cvmfs/atlas.cern.ch fuse": False}}
    )
    assert after_a_boot.look("mount-writable") == bad
    # another file system at the same place has no past there
    image = became.replace("/scratch ro,relatime shared:1 - nfs4", "/scratch ro,relatime shared:1 - squashfs")
    assert after_a_boot.look("mount-writable", tree={"/proc/self/mountinfo": image}) == {}


def test_what_is_kept_of_a_mount_goes_with_it(tmp_path: Path) -> None:
    node = NodeOfPast(tmp_path)
    node.look("mount-writable")
    assert "mount-writable /scratch" in node.memory.kept
    node.look("mount-writable", tree={"/proc/self/mountinfo": ROOT_MOUNT})
    assert "mount-writable /scratch" not in node.memory.kept


def refused(why: int, normal: bool | None = None, before: bool | None = None) -> list[str]:
    """What is done where a file cannot be written for this reason."""
    found = FileSystem("/tmp", "nfs", True, False, 9, 9, 9, 9, 0.0, os.strerror(why))
    past = DeviceHistory(
        {} if normal is None else {found.identity: normal}, {} if before is None else {found.identity: before}
    )
    limits = Thresholds({"may_be_read_only": []})
    return [one.on_fail or "drain" for one in file_systems.writable(found, limits, past)]


def test_an_export_that_never_took_a_file_is_warned_of() -> None:
    assert refused(errno.EROFS) == ["warn"]
    assert refused(errno.EROFS, before=True) == ["drain"] == refused(errno.EIO)
    assert refused(errno.EROFS, normal=False) == []


FSTAB = """
# a comment, and one behind blanks
   # here
LABEL=a#1  /data\\040sets   ext4    defaults    0 2
/dev/sdb1\t//data//two/\txfs\tnoatime
/dev/sdc1  /old  ignore  defaults
/dev/sdc2  none  swap  sw
10.0.0.1:/home  /home  nfs4  rw,_netdev  0 0
/dev/sdd1  /maybe  ext4  defaults,nofail
"""


def test_fstab_is_read_as_mount_reads_it(tmp_path: Path) -> None:
    assert parse_fstab(FSTAB) == (["/data sets", "/data/two", "/home"], [])
    mounts = ROOT_MOUNT + "".join(
        f"50 29 8:1 / {path} rw shared:1 - ext4 /dev/sdb1 rw\n"
        for path in ("/data\\040sets", "/data/two", "/export/home")
    )
    write(tmp_path, {"/etc/fstab": FSTAB, "/proc/self/mountinfo": mounts, "/export/.keep": ""})
    (tmp_path / "home").symlink_to("/mnt/../export/home")
    node = NodeOfPast(tmp_path)
    assert [one.faults for one in node.results("mount-present")] == [()]
    (tmp_path / "home").unlink()
    (tmp_path / "home").symlink_to("home")
    assert [one.status for one in node.results("mount-present")] == ["fail"]
    assert NodeFiles(tmp_path).real("/home") == "/home"
    assert [
        one.status for one in NodeOfPast(tmp_path, {"mount-present": {"/home": False}}).results("mount-present")
    ] == ["pass"]


def test_read_only_images_are_full_by_nature() -> None:
    limits = Thresholds({"free_percent": 2, "free_mib": 64, "network_free_percent": 0})
    image = FileSystem("/", "squashfs", False, True, 1 << 30, 0, 100, 0, 0.0)
    assert list(file_systems.space(image, limits)) == list(file_systems.inodes(image, limits)) == []


def test_a_users_own_mount_is_none_of_ours(tmp_path: Path) -> None:
    mounts = parse_mountinfo(MOUNTS)
    assert choose(mounts, ["/"], ["fuse.*"]) == ["/", "/tmp/img"]
    assert str(mount_of("/tmp/img/a", mounts)) == "/tmp/img (squashfuse, fuse.squashfuse)"


def test_bridges_between_some_of_the_gpus_are_meant_so() -> None:
    def node(*links: int) -> Gpus:
        return Gpus(4, tuple(
            Gpu(index=at, uuid=f"GPU-{at}", nvlinks={str(n): n < active for n in range(12)})
            for at, active in enumerate(links)
        ))  # fmt: skip

    limits = Thresholds({"active": 0})

    def judged(now: Gpus, past: DeviceHistory) -> list[tuple[int, Any]]:
        return [(one.index, one.on_fail) for one in gpu.nvlink_down(now, limits, past)]

    pair = node(12, 12, 0, 0)
    assert judged(pair, DeviceHistory()) == [(2, "warn"), (3, "warn")]
    normal = gpu.active_links(pair)
    assert judged(pair, DeviceHistory(normal)) == []
    assert judged(node(12, 8, 0, 0), DeviceHistory(normal)) == [(1, None)]
    assert judged(node(0, 0, 0, 0), DeviceHistory(normal)) == [(0, None), (1, None)]


def test_an_interface_that_is_slower_than_before_is_told() -> None:
    slow = ethernet.Interface("eth0", True, 10_000)
    limits = Thresholds({"mbps": 0, "ignored": []})
    assert list(ethernet.speed([slow], limits, DeviceHistory())) == []
    (fault,) = ethernet.speed([slow], limits, DeviceHistory(seen={"eth0": 25_000}))
    assert fault.evidence == "eth0 runs at 10000 of 25000 Mb/s"
    idle = ethernet.Interface("eth1", False)
    assert [one.device for one in ethernet.link([slow, idle], limits, DeviceHistory())] == ["eth1"]
    assert [
        one.device for one in ethernet.link([slow, idle], limits, DeviceHistory({"eth1": False, "eth2": True}))
    ] == ["eth2"]


def test_what_was_kept_by_another_version_is_no_error() -> None:
    reading = SimpleNamespace()
    del reading
    probe = registry.PROBES["ib-rate"]
    for kept in (None, [], {"a": "b"}, {"mlx5_0/1": None}, 3):
        assert probe.remembers([], Thresholds(TABLE.check("ib-rate").limits), Former(kept, 1e5)) is not None
