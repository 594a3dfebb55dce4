"""What is judged without a look at the machine: Slurm's settings, the clock, the recovery's ledger, GPUs of a fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.doctor import gpus, kernel, recovery, slurm_settings, transports
from resilio_hpc.doctor.finding import DoctorFinding, DoctorState
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.table import load
from resilio_hpc.prolog_epilog.checks.clock import ClockState
from tests.support.prolog_epilog.fake_nvml import FakeNvml, NVMLError_DriverNotLoaded
from tests.support.prolog_epilog.node_trees import write

# what scontrol prints of a site where all is well (22.05)
GOOD = {
    "AccountingStorageType": "accounting_storage/slurmdbd", "JobRequeue": "1", "KillOnBadExit": "0",
    "KillWait": "30 sec", "MinJobAge": "300 sec", "Prolog": "/etc/slurm/prolog", "PrologEpilogTimeout": "300",
    "ProctrackType": "proctrack/cgroup", "SchedulerParameters": "bf_interval=30,nohold_on_prolog_fail",
    "SlurmdTimeout": "300 sec", "SrunPortRange": "60000-63000", "UnkillableStepTimeout": "180 sec",
}  # fmt: skip
WRONG: dict[str, dict[str, str]] = {
    "KillWait": {"KillWait": "5 sec"},
    "UnkillableStepTimeout": {"UnkillableStepTimeout": "30 sec"},
    "SlurmdTimeout": {"SlurmdTimeout": "0 sec"},
    "ProctrackType": {"ProctrackType": "proctrack/pgid"},
    "KillOnBadExit": {"KillOnBadExit": "1"},
    "JobRequeue": {"JobRequeue": "0"},
    "MinJobAge": {"MinJobAge": "20 sec", "AccountingStorageType": "accounting_storage/none"},
    "SchedulerParameters": {"SchedulerParameters": "bf_interval=30"},
    "PrologEpilogTimeout": {"PrologEpilogTimeout": "65534"},
    "SrunPortRange": {"SrunPortRange": "60001-60063"},
}
TABLE = load(site=Path("/dev/null"))


def test_every_row_has_a_case() -> None:
    assert set(WRONG) == {row.name for row in slurm_settings.table()}


def test_good_settings_are_not_named() -> None:
    assert slurm_settings.judge(GOOD) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_named_alone(name: str) -> None:
    (found,) = slurm_settings.judge({**GOOD, **WRONG[name]})
    assert (found.about, found.state) == (name, next(r.state for r in slurm_settings.table() if r.name == name))
    assert found.seen == f"{name}={WRONG[name][name]}"


@pytest.mark.parametrize(
    "unset",
    [
        {"SrunPortRange": "0-0"}, {"Prolog": "(null)", "SchedulerParameters": "(null)", "PrologEpilogTimeout": "65534"},
        {"KillWait": "UNLIMITED"}, {"MinJobAge": "20 sec"},
        {"MinJobAge": "300 sec", "AccountingStorageType": "accounting_storage/none"},
    ],
)  # fmt: skip
def test_a_setting_that_is_not_set_is_fine(unset: dict[str, str]) -> None:
    assert slurm_settings.judge({**GOOD, **unset}) == []


def test_a_setting_that_this_slurm_does_not_have_is_fine() -> None:
    assert slurm_settings.judge({}) == []


def test_a_rule_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such rule"):
        slurm_settings.is_so("1", "above 2")


# -- the clock; adjtimex(2) cannot be made to say otherwise here, so its answer is given ------------------------------


@pytest.mark.parametrize(
    ("clock", "ahead", "state", "words"),
    [
        (ClockState(True, 0.002), 0.0, DoctorState.OK, "synchronised, right to 0.002 s"),
        (ClockState(False, 16.0), 0.0, DoctorState.NOTICE, "not synchronised"),
        (ClockState(True, 0.002), 40.0, DoctorState.WARNING, "this clock is 40 s ahead of slurmctld's"),
        (ClockState(False, 16.0), -40.0, DoctorState.WARNING, "this clock is 40 s behind slurmctld's"),
    ],
)
def test_the_clock(clock: ClockState, ahead: float, state: DoctorState, words: str) -> None:
    found = kernel.clock_finding(clock, ahead)
    assert (found.state, found.seen.startswith(words)) == (state, True)


# -- the recovery -----------------------------------------------------------------------------------------------------


def events(*kinds: str, source: str = "memory", recovery_s: float = 0.3) -> list[Event]:
    fields: dict[str, dict[str, Any]] = {
        "recovered": {"recovery_s": recovery_s, "restored": 3}, "first_step": {"source": source},
    }  # fmt: skip
    return [Event(float(number), "n1", kind, fields.get(kind, {})) for number, kind in enumerate(kinds)]


WHOLE = ("agent_joined", "ranks_started", "rank_failed", "first_step", "recovered")


@pytest.mark.parametrize(
    ("seen", "code", "state", "words"),
    [
        (events(*WHOLE), 0, DoctorState.OK, "a killed rank was back in 0.30 s, with step 3"),
        (events(*WHOLE, recovery_s=20.0), 0, DoctorState.WARNING, "a killed rank was back in 20.00 s"),
        (events(*WHOLE, source="files"), 0, DoctorState.WARNING, "a killed rank was back in 0.30 s, with step 3, not"),
        (events(*WHOLE[:3]), 1, DoctorState.FAILED, "the launch ended with 1, before the killed rank was back: words"),
        (events(*WHOLE[:3]), 0, DoctorState.FAILED, "the launch ended with 0, before the killed rank was back: words"),
        ([], 2, DoctorState.FAILED, "the launch ended with 2, before its agent was there: words"),
    ],
)
def test_the_recovery(seen: list[Event], code: int, state: DoctorState, words: str) -> None:
    found = recovery.judge(seen, code, "words")
    assert (found.state, found.seen.startswith(words)) == (state, True), found


# -- GPUs, by a fake of NVML ------------------------------------------------------------------------------------------


def gpu_findings(tmp_path: Path, nvml: FakeNvml) -> list[DoctorFinding]:
    found = gpus.findings_of(NodeView(settings=TABLE.settings, root=write(tmp_path), nvml=lambda: nvml), TABLE)
    return found if isinstance(found, list) else [found]


def test_gpus_against_which_nothing_speaks(tmp_path: Path) -> None:
    (found,) = gpu_findings(tmp_path, FakeNvml())
    assert (found.state, found.seen.startswith("2 NVIDIA GPUs")) == (DoctorState.OK, True)


def test_the_drivers_version_is_that_of_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "proc" / "driver" / "nvidia" / "version"
    path.parent.mkdir(parents=True)
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n")
    assert gpus.driver_version(tmp_path) == "535.129.03"
    assert gpus.driver_version(tmp_path / "none") == ""


def test_a_bad_gpu_is_named_by_its_check(tmp_path: Path) -> None:
    (found,) = gpu_findings(tmp_path, FakeNvml({"nvmlDeviceGetTotalEccErrors": 2}))
    assert (found.state, found.about) == (DoctorState.WARNING, "gpu-ecc")
    assert "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd" in found.seen


def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    (found,) = gpu_findings(tmp_path, FakeNvml(count=1))
    assert (found.about, found.seen) == ("gpu-count", "1 of 2 GPUs")


def test_a_driver_that_does_not_answer_fails(tmp_path: Path) -> None:
    (found,) = gpu_findings(tmp_path, FakeNvml(init=NVMLError_DriverNotLoaded("Driver Not Loaded")))
    assert (found.state, "Driver Not Loaded" in found.seen) == (DoctorState.FAILED, True)


def test_ports_of_rdma_are_found_where_they_are_active(tmp_path: Path) -> None:
    write(tmp_path, {
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n", "infiniband/mlx5_0/ports/2/state": "1: DOWN\n",
        "infiniband/mlx5_1/ports/1/state": "2: INIT\n", "cxi/cxi0/x": "",
    })  # fmt: skip
    assert transports.look(tmp_path).active == ("mlx5_0 port 1", "cxi0")
    assert transports.look(tmp_path / "none").active == ()


@pytest.mark.parametrize(
    ("seen", "state", "said"),
    [
        (transports.RdmaSeen((), ("tcp",), "", None), DoctorState.OK, "no active RDMA port (libfabric: tcp)"),
        (transports.RdmaSeen((), (), "no such file", 0), DoctorState.OK, "(libfabric: no such file)"),
        (transports.RdmaSeen(("mlx5_0 port 1",), ("tcp",), "", None), DoctorState.NOTICE, "RDMA is there and not used"),
        (
            transports.RdmaSeen(("mlx5_0 port 1",), ("tcp", "verbs;ofi_rxm"), "", None),
            DoctorState.NOTICE,
            "read by RDMA: verbs;ofi_rxm; mlx5_0 port 1; locked memory: no limit",
        ),
        (transports.RdmaSeen(("cxi0",), ("cxi",), "", 8 << 20), DoctorState.NOTICE, "cxi; cxi0; locked memory: 8 MiB"),
    ],
)
def test_how_copies_go_is_told(seen: transports.RdmaSeen, state: DoctorState, said: str) -> None:
    found = transports.judged(seen)
    assert found.state is state
    assert said in found.seen
    assert ("LimitMEMLOCK" in found.todo) == ("8 MiB" in found.seen)
