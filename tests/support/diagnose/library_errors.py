"""What programs, PyTorch, gloo, NCCL and C++ libraries write when they fail, word for word."""

from __future__ import annotations

EXCEPTIONS = [
    "ValueError: loss is not finite at step 412",
    "KeyError: 'attention_mask'",
    "RuntimeError: The size of tensor a (4096) must match the size of tensor b (2048) at non-singleton dimension 1",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB",
    "AssertionError",
    "model.CheckFailed: router entropy collapsed",
    "OSError: [Errno 28] No space left on device",
]
DATA = [
    "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f31c8>",
    "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is corrupted or it is not one.",
    "RuntimeError: DataLoader worker (pid 48121) is killed by signal: Killed.",
    "OSError: [Errno 5] Input/output error: '/data/shard-00412.tar'",
    "RuntimeError: stack expects each tensor to be equal size, but got [3, 64, 64] at entry 0 and [1, 9, 9] at entry 5",
]
GPU = [
    "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",  # noqa: E501
    "RuntimeError: CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",  # noqa: E501
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
    "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
]
GLOO = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [{address}]:{port}",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [{address}]:{port}: Connection reset by peer",  # noqa: E501
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:446] Write error [{address}]:{port}: Broken pipe",
    "RuntimeError: Application timeout caused pair closure",
]
NCCL = [
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer {address}<{port}>",  # noqa: E501
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2027, unhandled system error, NCCL version 2.20.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nSocket recv failed while polling for opId=0x7f6d",  # noqa: E501
]
NCCL.append(
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nNET/IB : Got completion from peer {address}<{port}> with status=12 opcode=0 len=0 vendor err 129 (Recv)"  # noqa: E501
)
KERNEL = "killed by SIGKILL: the kernel's out-of-memory killer ended one process in this job (oom_kill event): the memory limit of its cgroup, 64 GiB, was reached"  # noqa: E501
ABORTS = [
    "python: /src/fused/kernel.cpp:88: void launch(const Params&): Assertion `params.rows > 0' failed.",
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: device-side assert triggered",
    "free(): invalid pointer",
]
WATCHDOG = "torch.distributed.DistBackendError: [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=8388608, NumelOut=8388608, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."  # noqa: E501
TIMEOUTS = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",  # noqa: E501
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:137] Timed out waiting 1800000ms for send operation to complete",  # noqa: E501
]


def traceback_of(place: tuple[str, int], text: str) -> str:
    file, line = place
    frames = [("/job/train.py", 120), ("/job/train.py", 77), place]
    said = "".join(f'  File "{at}", line {number}, in step\n    x = f(x)\n' for at, number in frames[:2] if at != file)
    return f'Traceback (most recent call last):\n{said}  File "{file}", line {line}, in run\n    y = f(x)\n{text}'
