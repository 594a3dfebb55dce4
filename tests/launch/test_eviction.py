"""Which GPUs of a job go out of use, by whatever name, and how many ranks are left."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resilio_hpc.launch.agent.device_eviction import Kept
from resilio_hpc.launch.gpus import eviction
from resilio_hpc.launch.gpus.device_errors import hardware_error
from resilio_hpc.launch.gpus.eviction import DeviceEvidence, Evicted, Identity, Rules, Strikes
from resilio_hpc.launch.rundir.node_memory import NodeMemory

A, B = "GPU-aaaaaaaa-1111-0000-0000-000000000000", "GPU-bbbbbbbb-1111-0000-0000-000000000000"
NVML = (Identity(0, 2, A, "0000:1b:00", ("MIG-a0", "MIG-a1")), Identity(1, 3, B, "0000:1c:00"))


def evidence(device: str = "", index: int = -1, source: eviction.Source = "verdict") -> DeviceEvidence:
    return DeviceEvidence(source, "gpu-ecc", "3 errors", device, index)


@pytest.mark.parametrize(
    ("found", "entries", "identities", "at"),
    [
        (evidence(B), ("0", "1"), NVML, (1,)),  # numbered within the job, named by UUID
        (evidence(index=3), ("0", "1"), NVML, (1,)),  # by Slurm's number, which is the node's
        (evidence("0000:1c:00"), ("0", "1"), NVML, (1,)),  # by PCI address, as an Xid is
        (evidence(B, 2), ("0", "1"), NVML, (1,)),  # a UUID counts more than a number
        (evidence("GPU-cccc", 1), ("0", "1"), NVML, ()),  # of another job
        (evidence(B), (A, B), (), (1,)),  # nothing is known of them: the names are enough
        (evidence(B), ("GPU-bbbb", "GPU-aaaa"), (), (0,)),  # CUDA takes the beginning of a UUID
        (evidence(index=3), (A, B), NVML, (1,)),
        (evidence(index=3), (A, B), (), ()),
        (evidence(A), ("MIG-a0", "MIG-a1"), NVML, (0, 1)),  # both instances are on it
        (evidence(A), (f"MIG-{A}/1/0", f"MIG-{B}/1/0"), (), (0,)),  # the older way to name instances
        (evidence(B), ("MIG-a0",), NVML, ()),
        (evidence(index=5), ("0", "1"), eviction.identities_of_slurm(("0", "1"), "4,5"), (1,)),
        (evidence(B, 5), ("0", "1"), eviction.identities_of_slurm(("0", "1"), "4,5"), (1,)),
        (evidence(), ("0", "1"), NVML, ()),  # names nothing
    ],
)
def test_a_gpu_is_found_by_whatever_name(
    found: DeviceEvidence, entries: tuple[str, ...], identities: tuple[Identity, ...], at: tuple[int, ...]
) -> None:
    assert eviction.positions(found, entries, identities) == at


@pytest.mark.parametrize("gpus", ["", "4", "4,5,6", "4,x", "GPU-1,GPU-2"])
def test_slurms_numbers_are_used_only_where_they_match_the_entries(gpus: str) -> None:
    assert eviction.identities_of_slurm(("0", "1"), gpus) == ()


def gone(*entries: str) -> tuple[Evicted, ...]:
    return tuple(Evicted(entry, "", -1, "gpu-ecc", "", "verdict") for entry in entries)


@pytest.mark.parametrize(
    ("slots", "devices", "evicted", "rules", "left"),
    [
        (8, 8, (), Rules(), 8),
        (8, 8, gone("3"), Rules(), 7),
        (8, 8, gone("3", "3"), Rules(), 7),
        (4, 8, gone("3"), Rules(), 4),  # fewer ranks than devices: they move
        (16, 8, gone("3"), Rules(), 14),  # two share one
        (8, 8, gone("3"), Rules(unit=4), 4),
        (8, 8, gone("3"), Rules(unit=8), 0),
        (8, 8, gone("3"), Rules(least=8), 0),
        (8, 8, gone("3"), Rules(least=7), 7),
        (2, 2, gone("0", "1"), Rules(), 0),
        (3, 0, gone("0"), Rules(), 3),  # a node without GPUs
        (8, 8, gone("another"), Rules(), 8),
    ],
)
def test_ranks_that_are_left(slots: int, devices: int, evicted: tuple[Evicted, ...], rules: Rules, left: int) -> None:
    entries = tuple(map(str, range(devices)))
    assert eviction.slots_left(slots, entries, evicted, rules) == left


def test_each_device_goes_once_for_the_evidence_that_counts_most() -> None:
    found = [evidence(B, source="checks"), evidence(B), evidence(A, source="ranks")]
    new = eviction.newly_evicted(found, ("0", "1"), NVML, ())
    assert [(one.entry, one.source) for one in new] == [("1", "verdict"), ("0", "ranks")]
    assert eviction.newly_evicted(found, ("0", "1"), NVML, new) == ()
    assert eviction.visible_left(("0", "1"), new[:1]) == "0"


def test_two_rounds_in_which_a_rank_alone_failed_for_its_device_take_it_out_of_use() -> None:
    strikes = Strikes()
    assert not strikes.round_over(0, {})
    assert strikes.round_over(0, {"1": "uncorrectable memory error"})
    assert not strikes.round_over(0, {"1": "again"})  # the same round
    assert strikes.evicts() == []
    assert not strikes.round_over(1, {"0": "x", "1": "y"})  # several at once tell of none
    assert strikes.round_over(2, {"0": "x"})
    assert strikes.evicts() == []
    assert strikes.round_over(5, {"1": "uncorrectable memory error"})
    assert strikes.evicts() == ["1"]
    assert eviction.of_strikes(strikes, "1", NVML) == Evicted(
        "1", B, 3, "rank-failures", "ranks on it failed in 2 rounds: uncorrectable memory error", "ranks"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors", "uncorrectable error"),
        ("torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution", "NVLink"),
        ("HIP error: uncorrectable ECC error encountered", "uncorrectable error in a GPU's memory"),
        ("HW Exception by GPU node-3 (Agent handle: 0x5) reason :GPU Hang", "hardware exception"),
        ("NVMLError: GPU is lost", "fell off the bus"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", ""),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", ""),
        ("CUDA error: device-side assert triggered", ""),
        ("NCCL error: unhandled system error", ""),
        ("the GPU is lost in thought", ""),
        ("", ""),
    ],
)
def test_only_errors_that_no_program_causes_count_against_a_device(text: str, says: str) -> None:
    found = hardware_error(f"Traceback\n  line\n{text}\nmore")
    assert (says in found) if says else found == ""
    assert "\n" not in found and len(found) <= 160


def test_the_user_is_told_in_one_line() -> None:
    one = Evicted("1", B, 3, "gpu-ecc", "3 errors", "verdict")
    assert eviction.words("n1", (one,), 7, 8, Rules(), True) == (
        f"n1: GPU 3 ({B}) is out of use (gpu-ecc: 3 errors); 7 of 8 ranks go on with the others"
    )
    assert eviction.words("n1", (one,), 0, 8, Rules(8, 1), True).endswith(
        "; too few are left (--min-devices 8): the node takes no part"
    )
    assert eviction.words("n1", (one,), 4, 8, Rules(1, 4), True).endswith("4 of 8 ranks go on with the others "
                                                                          "(--device-unit 4)")  # fmt: skip
    named = msgspec.structs.replace(one, text=f"GPU 3 ({B}): 3 errors")  # the evidence names the GPU once more
    assert "(gpu-ecc: 3 errors)" in eviction.words("n1", (named,), 7, 8, Rules(), True)
    assert "would be out of use" in eviction.words("n1", (one,), 7, 8, Rules(), False)


def test_an_agents_successor_knows_what_is_out_of_use_and_another_job_begins_anew(tmp_path: Path) -> None:
    kept = Kept(12.5, gone("1"), Strikes({"0": [3]}, {"0": "uncorrectable memory error"}))
    NodeMemory(tmp_path, "7", 0).keep("devices", kept)
    assert NodeMemory(tmp_path, "7", 0).kept("devices", Kept) == kept
    assert NodeMemory(tmp_path, "8", 0).kept("devices", Kept) is None
