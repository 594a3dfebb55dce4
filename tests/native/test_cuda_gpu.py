"""A real GPU under the interposer: what torch launches is counted, graphs are captured, errors stay the program's own.

Not run yet: there was no machine with a GPU. `scripts/gpu_check.sh` runs it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.diagnose.hangs.call_ring import CallRing
from resilio_hpc.native import intercept
from tests.support.waiting import PATIENCE_S, until

FAMILIES = ("nccl", "cuda", "cublas")
PROGRAM = """
import json, time
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
left = torch.ones(512, 512, device="cuda")
total = torch.zeros(512, 512, device="cuda")
def step():
    global total
    product = left @ left
    dist.all_reduce(product)
    total += product / 512
for _ in range(50):
    step()
    torch.cuda.synchronize()
    time.sleep(0.005)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
before = total.double().sum().item()
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
replayed = (total.double().sum().item() - before) / total.numel()
message = ""
try:
    torch.empty(1 << 60, device="cuda")
except RuntimeError as error:
    message = type(error).__name__
times = []
for _ in range(20):
    began = time.perf_counter()
    for _ in range(100):
        step()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - began) / 100)
print(json.dumps({"replayed": replayed, "message": message, "step_us": sorted(times)[len(times) // 2] * 1e6}))
dist.destroy_process_group()
"""
SLEEPER = """
import torch
torch.cuda.set_device(0)
torch.ones(1, device="cuda")
torch.cuda.synchronize()
torch.cuda._sleep(1 << 62)
print("queued", flush=True)
torch.cuda.synchronize()
"""


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _cuda(), reason="needs an NVIDIA GPU")]


def environment(ring: Path | None) -> dict[str, str]:
    if ring is None:
        return dict(os.environ)
    preload = ":".join(str(intercept.library(family)) for family in FAMILIES)
    return {**os.environ, "LD_PRELOAD": preload, "RESILIO_CALLS": str(ring)}


def run(ring: Path | None) -> dict[str, object]:
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env=environment(ring), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_what_torch_asks_of_a_gpu_is_counted_and_nothing_else_changes(tmp_path: Path) -> None:
    plain, seen = run(None), run(tmp_path / "ring")
    assert seen["replayed"] == plain["replayed"] == 3.0
    assert seen["message"] == plain["message"] != ""
    ring = CallRing(tmp_path / "ring")
    gpu = ring.gpu()
    assert gpu is not None
    steps = 50 + 1 + 20 * 100
    assert gpu.gemms >= steps
    assert gpu.flops >= steps * 2.0 * 512**3
    assert gpu.launches >= steps
    assert gpu.graphs == 3
    assert gpu.launching == 0
    assert gpu.waits_for == ""
    assert 0 < gpu.reached <= gpu.sampled
    begun, completed = ring.counts
    assert 1 < completed < begun
    print(f"events: {gpu.sampled} recorded, {gpu.reached} reached; {completed} of {begun} calls were seen to end")


def test_steps_with_and_without_it_take_the_same_time_in_blocks_a_b_b_a(tmp_path: Path) -> None:
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(4):
        for watched in ((False, True), (True, False))[pair % 2]:
            said = run(tmp_path / f"ring{pair}" if watched else None)
            times[watched].append(float(str(said["step_us"])))
    ratios = [b / a for a, b in zip(times[False], times[True], strict=True)]
    plain, seen = (statistics.median(times[watched]) for watched in (False, True))
    print(f"a step takes {plain:.1f} us, with it {seen:.1f} us; ratios {[round(ratio, 3) for ratio in ratios]}")


def test_a_rank_that_waits_for_a_kernel_without_end_is_seen_from_outside(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(argv, env=environment(tmp_path / "ring"), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "queued\n"
            ring = CallRing(tmp_path / "ring")
            until(lambda: (gpu := ring.gpu()) is not None and gpu.waits_for != "" and gpu.waits_s > 0.5, "it waits")
        finally:
            process.kill()
