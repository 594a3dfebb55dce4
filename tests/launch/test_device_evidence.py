"""What speaks against GPUs, from a verdict, the kernel's log and NVML, and what happens where one of them hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from resilio_hpc.launch.gpus import device_evidence as de
from resilio_hpc.launch.gpus.device_look import DeviceLook
from resilio_hpc.launch.gpus.devices import visible_devices
from resilio_hpc.launch.gpus.eviction import Identity
from resilio_hpc.prolog_epilog.base.check import Fault, NodeVerdict, Result
from resilio_hpc.prolog_epilog.base.node import NodeView, boot_id, uptime_s
from resilio_hpc.prolog_epilog.base.table import load
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from tests.support.environments import ROOT
from tests.support.prolog_epilog.cases import LINK_DOWN
from tests.support.prolog_epilog.fake_nvml import FakeNvml, NVMLError_GpuIsLost, NVMLError_NoPermission
from tests.support.prolog_epilog.node_trees import kernel_lines, write
from tests.support.waiting import PATIENCE_S, until

TABLE = load(site=Path("/dev/null"))
BAD = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"


def verdict(*faults: Fault, check: str = "gpu-ecc", withheld: str = "", age_s: float = 0.0) -> NodeVerdict:
    result = Result(check=check, status="fail", on_fail="evict", severity="fatal", faults=faults)
    return NodeVerdict(node="n1", boot=boot_id(), uptime_s=uptime_s() - age_s, unix_s=0.0, results=(result,),
                   withheld=withheld)  # fmt: skip


def test_a_verdict_speaks_against_the_gpus_that_it_names() -> None:
    (found,) = de.of_verdict(verdict(Fault("3 errors", BAD, 1)))
    assert (found.source, found.check, found.device, found.index) == ("verdict", "gpu-ecc", BAD, 1)
    assert len(de.of_verdict(verdict(Fault("5 events", BAD, 1, on_fail="drain")))) == 1
    assert de.of_verdict(verdict(Fault("warm", BAD, 1, on_fail="warn"))) == ()
    assert de.of_verdict(verdict(Fault("no driver"))) == ()  # no single GPU
    assert de.of_verdict(verdict(Fault("down", "mlx5_1/1"), check="ib-link")) == ()
    assert de.of_verdict(verdict(Fault("3 errors", BAD, 1), withheld="a storm of drains")) == ()


def test_a_verdict_that_may_not_be_believed_says_nothing(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "a" / "health")
    assert de._verdict_if_any(cache.directory).note == ""  # no daemon here
    cache.write(verdict(Fault("3 errors", BAD, 1), age_s=1000))
    said = de._verdict_if_any(cache.directory)
    assert said.evidence == () and "s old" in said.note
    cache.write(verdict(Fault("3 errors", BAD, 1)))
    assert len(de._verdict_if_any(cache.directory).evidence) == 1
    (cache.directory / "verdict.json").chmod(0o666)
    said = de._verdict_if_any(cache.directory)
    assert said.evidence == () and "cannot be trusted" in said.note


def look(nvml: FakeNvml, tmp_path: Path) -> de.Said:
    node = NodeView(settings=TABLE.settings, root=write(tmp_path), nvml=lambda: nvml)
    return de.from_nvml(node, de.device_checks(TABLE), (Identity(0, 0),))


def test_our_own_checks_ask_nvml_what_is_asked_before_ranks_start(tmp_path: Path) -> None:
    assert {check.id for check in de.device_checks(TABLE)} == {"gpu-ecc", "gpu-lost", "gpu-nvlink"}
    said = look(FakeNvml({"nvmlDeviceGetTotalEccErrors": 2}), tmp_path)
    assert [(one.source, one.check, one.device) for one in said.evidence] == [("checks", "gpu-ecc", BAD)]
    assert [(one.ordinal, one.index, one.bus) for one in said.identities] == [
        (0, 0, "0000:1b:00"),
        (1, 1, "0000:1c:00"),
    ]
    assert look(FakeNvml(), tmp_path).evidence == ()
    lost = look(FakeNvml({"nvmlDeviceGetTemperature": NVMLError_GpuIsLost("GPU is lost")}), tmp_path)
    assert [one.check for one in lost.evidence] == ["gpu-lost"]


def test_links_that_are_down_speak_against_a_gpu_that_had_them_before(tmp_path: Path) -> None:
    node = NodeView(settings=TABLE.settings, root=write(tmp_path), nvml=lambda: FakeNvml(LINK_DOWN))
    links = [check for check in de.device_checks(TABLE) if check.id == "gpu-nvlink"]
    assert de.from_nvml(node, links, ()).evidence == ()  # bridges may join some of the GPUs only
    said = de.from_nvml(node, links, (), {"gpu-nvlink": {BAD: 18}})
    assert [(one.check, one.device) for one in said.evidence] == [("gpu-nvlink", BAD)]


def test_a_gpu_of_another_job_is_not_counted_among_ours(tmp_path: Path) -> None:
    changes = {"nvmlDeviceGetHandleByIndex": NVMLError_NoPermission("another's"), "nvmlDeviceGetTotalEccErrors": 2}
    said = look(FakeNvml(changes), tmp_path)
    assert said.evidence == () and len(said.identities) == 1


def test_mig_instances_are_known_by_their_gpu(tmp_path: Path) -> None:
    said = look(FakeNvml({"nvmlDeviceGetMigMode": [1, 1]}), tmp_path)
    assert [one.instances for one in said.identities] == [(), ("MIG-10-cccc",)]


def test_xids_of_an_earlier_job_do_not_count(tmp_path: Path) -> None:
    lost = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    root = write(tmp_path, {"/dev/kmsg": kernel_lines((99_990.0, lost))})
    node = NodeView(settings=TABLE.settings, root=root)
    check = TABLE.check("gpu-xid")
    (found,) = de.from_kernel_log(node, check, 99_000.0).evidence
    assert "fallen off the bus" in found.text and found.check == "gpu-xid"
    assert de.from_kernel_log(node, check, 99_995.0).evidence == ()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2,3"}, [(0, 2), (1, 3)]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "2,3"}, [(0, 2), (1, 3)]),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, [(2, 2), (3, 3)]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "SLURM_JOB_GPUS": "2,3"}, []),
        ({}, []),
    ],
)
def test_slurm_tells_which_gpus_a_job_has(
    environment: dict[str, str], expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    node = NodeView(settings=TABLE.settings, root=tmp_path)
    said = de.identities(node, environment)
    assert [(one.ordinal, one.index) for one in said.identities] == expected


def test_the_driver_names_the_gpus_that_slurm_numbers(tmp_path: Path) -> None:
    text = f"Model: \t\tH100\nGPU UUID: \t{BAD}\nDevice Minor: \t3\n"
    node = NodeView(root=write(tmp_path, {"/proc/driver/nvidia/gpus/0000:1c:00.0/information": text}))
    said = de.identities(node, {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2,3"})
    assert Identity(1, 3, BAD, "0000:1c:00") in said.identities


def test_entries_that_cuda_would_not_take_are_none(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert visible_devices({}, tmp_path).entries == ("0", "1")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1,2,0"}, tmp_path).entries == ("1",)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).entries == ()
    assert visible_devices({"HIP_VISIBLE_DEVICES": "1"}, tmp_path / "none").variable == "HIP_VISIBLE_DEVICES"


HANGS = """
import sys, time
print('{"stage":"verdict","evidence":[{"source":"verdict","check":"gpu-ecc","text":"3","device":"GPU-1"}]}', flush=True)
print('{"stage":"NV', end="", flush=True)
time.sleep(600)
"""


def test_a_driver_that_hangs_holds_up_nobody_and_what_was_said_before_counts(tmp_path: Path) -> None:
    now = [1000.0]
    watched = DeviceLook(0.0, tmp_path / "log", 5.0, (sys.executable, "-c", HANGS), clock=lambda: now[0])
    until(lambda: watched.over() or watched._look._buffer, "half a line")
    assert not watched._look.timed_out
    now[0] += 5.0
    assert watched.over()
    assert watched._look.timed_out and watched._look._process.poll() is not None
    assert [said.evidence[0].device for said in watched.said] == ["GPU-1"]
    assert watched.notes() == ["no answer within 5 s after verdict was looked at"]


def test_a_real_look_at_this_machine_ends_and_names_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "health" / "here"
    VerdictCache(directory).write(verdict(Fault("3 errors", BAD, 1)))
    monkeypatch.setenv("RESILIO_HEALTH_DIRECTORY", str(directory))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    watched = DeviceLook(uptime_s(), tmp_path / "log", PATIENCE_S)
    until(watched.over, "the end of the look")
    assert [said.stage for said in watched.said] == ["verdict", "identities", "kernel log", "NVML"], watched.said
    assert [one.device for said in watched.said for one in said.evidence if one.source == "verdict"] == [BAD]
    assert msgspec.json.decode(msgspec.json.encode(watched.said), type=list[de.Said]) == watched.said
