"""What health checks find is remembered once, with its device; and a disk that fails holds nobody up."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from resilio_hpc.prolog_epilog.base.check import Fault, NodeVerdict, OnFail, Result, Severity, Status
from resilio_hpc.prolog_epilog.drain.fault_record import FaultRecord, faults_of
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger


def result(check: str, on_fail: OnFail = "drain", severity: Severity = "fatal", status: Status = "fail") -> Result:
    faults = (Fault("Xid 79 on GPU 3", device="GPU 3"),) if status == "fail" else ()
    return Result(check=check, status=status, on_fail=on_fail, severity=severity, faults=faults, note="says nothing")


def verdict(*results: Result) -> NodeVerdict:
    return NodeVerdict(node="n1", boot="b", uptime_s=10.0, unix_s=1000.0, results=results)


@pytest.mark.parametrize(
    ("one", "kinds"),
    [
        (result("gpu-xid"), ["health-fatal"]),
        (result("gpu-xid", "evict"), ["health-fatal"]),
        (result("mount", "fail", "error"), ["health-error"]),
        (result("clock", "warn", "error"), []),
        (result("clock", "drain", "warning"), []),
        (result("gpu-xid", status="timeout"), []),  # it hangs: that may be anybody's
        (result("gpu-xid", status="unknown"), []),
        (result("gpu-xid", status="pass"), []),
    ],
)
def test_what_keeps_jobs_off_is_remembered(one: Result, kinds: list[str]) -> None:
    found = faults_of(verdict(one), ())
    assert [fault.kind for fault in found] == kinds
    assert all((fault.node, fault.time, fault.device) == ("n1", 1000.0, "GPU 3") for fault in found)
    assert faults_of(verdict(one), {(one.check, "GPU 3")}) == []


def test_a_fault_that_stays_is_kept_once_and_one_that_comes_back_again(tmp_path: Path) -> None:
    ledger, said = FaultLedger(tmp_path / "faults"), list[str]()
    record = FaultRecord(ledger, said.append)
    for one in (result("gpu-xid"), result("gpu-xid"), result("gpu-xid", status="pass"), result("gpu-xid")):
        record.turn(verdict(one))
    assert [fault.check for fault in ledger.read().faults] == ["gpu-xid", "gpu-xid"]
    assert said == []


def test_what_could_not_be_kept_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "faults").write_text("in the way")
    said: list[str] = []
    record = FaultRecord(FaultLedger(tmp_path / "faults"), said.append)
    for _ in range(3):
        record.turn(verdict(result("gpu-xid")))
    assert len(said) == 1 and "could not be kept" in said[0]
    (tmp_path / "faults").unlink()
    record.turn(verdict(result("gpu-xid")))
    assert len(FaultLedger(tmp_path / "faults").read().faults) == 1


class OnAHungDisk(FaultLedger):
    """Keeps faults, but only when the disk answers again."""

    def append(self, faults: Iterable[NodeFault]) -> int:
        time.sleep(60)
        return len(list(faults))


def test_a_disk_that_hangs_is_said_and_holds_nobody_up(tmp_path: Path) -> None:
    said: list[str] = []
    record = FaultRecord(OnAHungDisk(tmp_path), said.append, budget_s=0.05)
    record.turn(verdict(result("gpu-xid")))
    record.turn(verdict(result("gpu-xid")))  # had it been waited for, it would have been kept
    assert said == [f"{tmp_path} does not answer: faults are not remembered"]
