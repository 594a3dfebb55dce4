"""Lines of the kernel's log, as kernels from 4.18 to 6.x print them: whose fault they tell, and which are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base import table as tables
from resilio_hpc.prolog_epilog.base.check import Former, Thresholds
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.checks import kernel_log
from resilio_hpc.prolog_epilog.checks.kernel_faults import table
from resilio_hpc.prolog_epilog.checks.kernel_log import KernelLog, Line
from resilio_hpc.prolog_epilog.checks.registry import PROBES

CHECKS = {check.id: check for check in tables.load(Path("/dev/null")).checks.values() if check.source == "kernel-log"}
NOW = 100_000.0
READ = "op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2"


def found(*texts: str, removable: frozenset[str] = frozenset()) -> list[tuple[str, str, str]]:
    """Check, action and device of every fault that the checks of the kernel's log find in these lines."""
    log = KernelLog(tuple(Line(NOW - 100 + n, text, True) for n, text in enumerate(texts)), removable=removable)
    faults = []
    for check in CHECKS.values():
        judged, _ = PROBES[check.id].remembers(log, Thresholds(check.limits), Former(None, NOW))
        faults += [(check.id, fault.on_fail or check.on_fail, fault.device) for fault in judged]
    return faults


@pytest.mark.parametrize(
    ("line", "device"),
    [
        (f"blk_update_request: I/O error, dev sdc, sector {{}} {READ}", "sdc"),
        (f"print_req_error: critical medium error, dev sda, sector {{}} {READ}", "sda"),
        (f"critical medium error, dev nvme1n1, sector {{}} {READ}", "nvme1"),
        (f"critical target error, dev vdb, sector {{}} {READ}", "vdb"),
        (f"timeout error, dev sda, sector {{}} {READ}", "sda"),
        (f"device offline error, dev sdd, sector {{}} {READ}", "sdd"),
        ("Buffer I/O error on dev dm-3, logical block {}, lost sync page write", "dm-3"),
        ("nvme nvme2: I/O {} QID 7 timeout, aborting", "nvme2"),
        ("nvme nvme2: I/O {} QID 7 timeout, disable controller", "nvme2"),
        (
            "nvme nvme3: I/O tag {} (2041) opcode 0x1 (I/O Cmd) QID 3 timeout, aborting req_op:WRITE(1) size:4096",
            "nvme3",
        ),
        ("nvme nvme3: I/O tag {} (2041) opcode 0x9 (Admin Cmd) QID 0 timeout, reset controller", "nvme3"),
        ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS read failed (134) {}", "nvme0"),
        ("nvme2n1: I/O Cmd(0x2) @ LBA 58599{}, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) MORE DNR", "nvme2"),
        ("nvme nvme0: Device not ready; aborting initialisation, CSTS=0x{}", "nvme0"),
    ],
)
def test_a_disk_with_several_errors(line: str, device: str) -> None:
    lines = [line.format(n) for n in range(3)]
    assert found(*lines) == [("disk-errors", "drain", device)]
    assert found(*lines[:2]) == []  # the next write may mend it


def test_errors_of_a_disk_count_together_whatever_names_it() -> None:
    three = (
        "I/O error, dev nvme0c1n1, sector 8",
        "nvme nvme0: I/O 5 QID 2 timeout, aborting",
        "I/O error, dev nvme0n1p2, sector 9",
    )
    assert found(*three) == [("disk-errors", "drain", "nvme0")]


@pytest.mark.parametrize(
    "said", ["Disabling device after reset failure: -19", "Removing after probe failure status: -5"]
)
def test_a_disk_that_is_gone(said: str) -> None:
    assert found(f"nvme nvme4: {said}") == [("disk-errors", "drain", "nvme4")]


@pytest.mark.parametrize(
    "line",
    [
        f"blk_update_request: I/O error, dev sr0, sector {{}} {READ}",
        f"I/O error, dev fd0, sector {{}} {READ}",
        f"I/O error, dev loop7, sector {{}} {READ}",
        f"I/O error, dev sdz, sector {{}} {READ}",
        "critical target error, dev sda, sector {} op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 2",
        "critical target error, dev sda, sector {} op 0x9:(WRITE_ZEROES) flags 0x8 phys_seg 0 prio class 2",
        f"operation not supported error, dev sda, sector {{}} {READ}",
        f"critical space allocation error, dev dm-3, sector {{}} {READ}",
        f"reservation conflict error, dev sdb, sector {{}} {READ}",
        f"recoverable transport error, dev sdb, sector {{}} {READ}",
        "nvme nvme0: I/O tag {} (0001) QID 4 timeout, completion polled",
        "nvme nvme0: resetting controller {}",
        "nvme0n1: I/O Cmd(0x2) @ LBA 58599{}, 8 blocks, Invalid Field in Command (sct 0x0 / sc 0x2) DNR",
        "Buffer I/O error on dev sr0, logical block {}, lost async page write",
        "Buffer I/O error on dev sda, logical block {}, async page read",
        "EXT4-fs error (device loop3): ext4_lookup:1: inode #{}: comm sh: iget: checksum invalid",
        "EXT4-fs (sda1): re-mounted 1f2e3d4c-0000 ro. Quota mode: none. {}",
        "EXT4-fs (sda1): error count since last fsck: {}",
        "XFS (sdb1): User initiated shutdown (0x4) detected at xfs_fs_goingdown+0x5{}/0xa0. Shutting down filesystem.",
        "XFS (dm-1): Ending clean mount {}",
        "BTRFS error (device sdb): open_ctree failed: -{}",
        "BTRFS info (device sdb1): bdev /dev/sdb1 errs: wr 0, rd 0, flush 0, corrupt {}, gen 0",
        "{{{}}}[Hardware Error]: event severity: corrected",
        "{{{}}}[Hardware Error]:  Error 0, type: corrected",
        "{{{}}}[Hardware Error]:   aer_uncor_severity: 0x00062010",
        "[Hardware Error]: Deferred error, no action required. {}",
        "mce: [Hardware Error]: CPU {}: Machine Check: 0 Bank 7: 8c00004000010091",
        "mce: [Hardware Error]: Machine check events logged {}",
        "rcu: Hierarchical RCU implementation. {}",
    ],
)
def test_lines_that_tell_no_fault_of_the_node(line: str) -> None:
    assert found(*[line.format(n) for n in range(9)], removable=frozenset({"sdz"})) == []


def test_a_disk_that_is_a_servers_only_warns() -> None:
    assert found(*[f"I/O error, dev rbd0, sector {n} {READ}" for n in range(3)]) == [("disk-errors", "warn", "rbd0")]


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("EXT4-fs (dm-2): Remounting filesystem read-only", "dm-2"),
        ("EXT4-fs error (device sdb2) in ext4_reserve_inode_write:5874: Journal has aborted", "sdb2"),
        ("Aborting journal on device sda3-8.", "sda3"),
        ("JBD2: I/O error when updating journal superblock for dm-4-8.", "dm-4"),
        ("EXT4-fs (sda1): I/O error while writing superblock", "sda1"),
        ("XFS (sdb1): Metadata I/O Error (0x1) detected at xfs_trans_read_buf_map.  Shutting down filesystem.", "sdb1"),
        ("XFS (dm-0): Filesystem has been shut down due to log error (0x2).", "dm-0"),
        ("XFS (nvme0n1p4): Metadata CRC error detected at xfs_bmbt_read_verify+0x12 [xfs], block 0x9", "nvme0n1p4"),
        ("XFS (sda2): Corruption of in-memory data (0x8) detected at xfs_defer.  Shutting down filesystem.", "sda2"),
        ("XFS (sda2): Internal error XFS_WANT_CORRUPTED_GOTO at line 1 of file fs/xfs/libxfs/xfs_alloc.c.", "sda2"),
        ("XFS (sda6): log mount/recovery failed: error -74", "sda6"),
        ("BTRFS critical (device sdc): corrupt leaf: root=5 block=1 slot=2, bad key order", "sdc"),
        ("BTRFS error (device sdc1: state A) in __btrfs_free_extent:3089: errno=-5 IO failure", "sdc1"),
        ("BTRFS info (device sdc1: state EA): forced readonly", "sdc1"),
        ("XFS (dm-5): Please unmount the filesystem and rectify the problem(s).", "dm-5"),
        ("F2FS-fs (sdb1): Remounting filesystem read-only", "sdb1"),
        ("FAT-fs (sda1): Filesystem has been set read-only", "sda1"),
        ("WARNING: Pool 'scratch' has encountered an uncorrectable I/O failure and has been suspended.", "scratch"),
    ],
)  # fmt: skip
def test_a_file_system_that_is_damaged(line: str, device: str) -> None:
    assert found(line) == [("file-system-errors", "drain", device)]


@pytest.mark.parametrize(
    "line",
    [
        "{2}[Hardware Error]: event severity: recoverable",
        "{2}[Hardware Error]: event severity: fatal",
        "{2}[Hardware Error]:  Error 1, type: recoverable",
        "[Hardware Error]: Uncorrected, software containable error.",
        "[Hardware Error]: System Fatal error.",
        "[Hardware Error]: CPU:9 (19:11:1) MC20_STATUS[Over|UE|MiscV|AddrV|-|-|SyndV|UECC|-]: 0xfc203000",
        "mce: [Hardware Error]: CPU 4: Machine Check Exception: 5 Bank 1: be00000000800400",
        "mce: Uncorrected hardware memory error in user-access at 7f3a1c0040",
        "Memory failure: 0x1f3a1c: recovery action for dirty LRU page: Recovered",
    ],
)
def test_hardware_errors_that_were_not_corrected(line: str) -> None:
    assert found(line) == [("kernel-hardware-errors", "drain", "")]


def test_what_firmware_tells_of_the_time_before_the_boot_only_warns() -> None:
    before = (
        "BERT: Error records from previous boot:",
        "[Hardware Error]: event severity: fatal",
        "[Hardware Error]:  Error 0",
    )
    assert found(*before) == [("kernel-hardware-errors", "warn", "")]
    now = "BERT: Total records found: 1", "{1}[Hardware Error]: event severity: fatal"
    assert ("kernel-hardware-errors", "drain", "") in found(*before, *now)


@pytest.mark.parametrize(
    "line",
    [
        "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [kworker/3:1:77]",
        "NMI watchdog: Watchdog detected hard LOCKUP on cpu 12",
        "watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3",
        "watchdog: CPU 7 detected hard LOCKUP on other CPUs 9",
        "BUG: workqueue lockup - pool cpus=5 node=0 flags=0x0 nice=0 stuck for 32s!",
        "rcu: INFO: rcu_sched self-detected stall on CPU",
        "rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 3-.... } 21 jiffies s: 1",
        "rcu: INFO: rcu_tasks detected stalls on tasks:",
    ],
)
def test_processors_that_lock_up(line: str) -> None:
    assert found(line) == [("kernel-lockups", "warn", "")]


def test_every_row_of_the_table_belongs_to_a_check_and_a_bad_one_is_named(tmp_path: Path) -> None:
    assert {rule.check for rule in table().rules} == set(CHECKS) - {"gpu-xid", "gpu-sxid"}
    assert all("most" in CHECKS[rule.check].limits for rule in table().rules if rule.several)
    bad = tmp_path / "lines.toml"
    bad.write_text('devices = {ignored = "", remote = ""}\nline = [{check = "x", pattern = "(", source = ""}]')
    with pytest.raises(UsageError, match=r"lines\.toml"):
        table(bad)


def test_a_fetched_log_knows_removable_disks_and_who_is_on_the_node(tmp_path: Path) -> None:
    for name, text in (
        ("dev/kmsg", "6,1,5,-;x\n"),
        ("sys/block/sda/removable", "0\n"),
        ("sys/block/sdb/removable", "1\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    log = kernel_log.fetch(NodeView(root=tmp_path))
    assert (log.removable, log.users) == ({"sdb"}, frozenset())
