"""What is at fault beyond doubt: a device, a disk, a peer that ended."""

from __future__ import annotations

import pytest

from resilio_hpc.diagnose.causes.known_faults import fault_in
from resilio_hpc.diagnose.causes.pattern_table import FaultOf, LineRole, shipped

PEER_ERRORS = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711",
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Read error [10.0.0.2]:4711: Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "torch.distributed.DistStoreError: Socket Timeout",
    "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error, NCCL 2.28",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
    "RuntimeError: The store might have been closed",
    "killed together with its MPI step",
]
OTHERS = [
    "KeyError: 'lr'",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error",
    "the GPU is lost in thought",
    "",
]


@pytest.mark.parametrize("text", PEER_ERRORS)
def test_errors_that_follow_from_a_peers_end(text: str) -> None:
    assert fault_in(text, FaultOf.PEER) is not None
    assert fault_in(f"Traceback (most recent call last):\n  File x\n{text}\n", FaultOf.PEER) is not None
    assert fault_in(text, FaultOf.DEVICE) is None


@pytest.mark.parametrize("text", OTHERS)
def test_errors_of_which_nothing_is_known(text: str) -> None:
    assert [fault for fault in FaultOf if fault_in(text, fault)] == []


def test_a_device_and_a_disk() -> None:
    found = fault_in("a\n[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered\nb", FaultOf.DEVICE)
    assert found is not None
    assert found[1] == "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert fault_in("OSError: [Errno 5] Input/output error: '/local/x'", FaultOf.DISK) is not None
    assert fault_in("OSError: [Errno 28] No space left on device", FaultOf.DISK) is None


def test_what_follows_from_a_peer_is_never_a_root_and_a_sick_device_always_is() -> None:
    roles = {fault: {one.role for one in shipped().pattern if one.fault is fault} for fault in FaultOf}
    assert LineRole.ROOT not in roles[FaultOf.PEER]
    assert roles[FaultOf.DEVICE] == roles[FaultOf.DISK] == {LineRole.ROOT}
