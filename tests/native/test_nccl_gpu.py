"""Real NCCL on a real GPU under the interposer: calls are noted, graphs are captured, results are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.diagnose.hangs.call_ring import CallRing
from resilio_hpc.native import intercept
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import json, os, time
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
ones = torch.ones(1 << 20, device="cuda")
for _ in range(20):
    dist.all_reduce(ones)
torch.cuda.synchronize()
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.graph(graph):
    dist.all_reduce(ones)
    ones.add_(1)
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
began = time.perf_counter()
for _ in range(2000):
    dist.all_reduce(ones)
queued = time.perf_counter() - began
torch.cuda.synchronize()
print(json.dumps({"sum": ones.double().sum().item(), "call_us": queued / 2000 * 1e6}))
dist.destroy_process_group()
"""


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(not _cuda(), reason="needs an NVIDIA GPU")
def test_calls_of_a_real_nccl_are_noted_and_graphs_are_captured(tmp_path: Path) -> None:
    def run(**extra: str) -> dict[str, float]:
        argv = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(argv, env={**os.environ, **extra}, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return said

    plain = run()
    watched = run(LD_PRELOAD=str(intercept.library("nccl")), RESILIO_CALLS=str(tmp_path / "ring"))
    assert watched["sum"] == plain["sum"] == (1 << 20) * 4.0
    print(f"a call takes {plain['call_us']:.2f} us, noted {watched['call_us']:.2f} us")
    groups, calls = CallRing(tmp_path / "ring").look()
    assert [(group.family, group.rank, group.size) for group in groups] == [("nccl", 0, 1)]
    assert groups[0].entered >= 20 + 1 + 2000
    assert calls[-1].op == "all_reduce"
    assert calls[-1].shape == f"{1 << 20} float32"
