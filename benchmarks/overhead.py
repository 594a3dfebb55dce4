#!/usr/bin/env python3
"""What noting calls costs a training step: with and without the interposer in ABBA blocks, and each call by itself.

    python benchmarks/overhead.py --pairs 10 --json overhead.json
    python benchmarks/overhead.py --pairs 0    # what each call costs, and no training

Two gloo ranks train a small DDP model; a block is a start of both, and its figure the median iteration of rank 0. The
blocks' order is A B B A, so a machine that becomes slower strikes both. The interval is a bootstrap of the pairs'
ratios. Where it is wider than the effect, the other figure counts: calls of one iteration times the measured cost of
one, from a loop in C beside an empty wrapper. The calls of a GPU are made to fakes, since they do nothing themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from resilio_hpc.diagnose.hangs.call_ring import CallRing
from resilio_hpc.native import intercept

HERE = Path(__file__).resolve().parent
WRITER = HERE.parent / "tests" / "support" / "native" / "ring_writer.c"
CALLS = 5_000_000
GPU_CALLS = 100_000
GPU_KINDS = ("kernel launch", "cublasSgemm", "cublasLtMatmul", "cudaStreamSynchronize", "ncclAllReduce", "the clock")
WARM = 10
LIMIT_S = 300.0


def train(steps: int) -> None:
    """One rank of a block."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(512, 512) for _ in range(12)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    batch, times = torch.randn(128, 512), []
    for step in range(WARM + steps):
        began = time.perf_counter()
        model(batch).sum().backward()
        if step >= WARM:
            times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def block(steps: int, watched: bool, folder: Path) -> tuple[float, float]:
    """Return the median iteration, seconds, and how many calls it makes (0 where they are not noted)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in (0, 1):
        ring = folder / f"ring{rank}"
        ring.unlink(missing_ok=True)
        extra = {"LD_PRELOAD": str(intercept.library("gloo")), "RESILIO_CALLS": str(ring)} if watched else {}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                       "RANK": str(rank), "OMP_NUM_THREADS": "1", **extra}  # fmt: skip
        argv = [sys.executable, __file__, "--rank", str(steps)]
        ranks.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    begun = CallRing(folder / "ring0").counts[0] if watched else 0
    return statistics.median(json.loads(said[0])), begun / (WARM + steps)


def of_one_call(folder: Path) -> tuple[float, float]:
    """Return nanoseconds of a noted call, and of one through an empty wrapper: the medians of five loops."""
    program = folder / "writer"
    compiler = shutil.which("cc") or sys.exit("needs a C compiler")
    subprocess.run([compiler, "-O2", "-pthread", "-o", program, WRITER], check=True, timeout=LIMIT_S)
    found = []
    for turn in range(5):
        environment = {**os.environ, "RESILIO_CALLS": str(folder / f"speed{turn}")}
        argv = [program, "speed", str(CALLS)]
        done = subprocess.run(argv, env=environment, check=True, capture_output=True, text=True, timeout=LIMIT_S)
        noted, empty = map(float, done.stdout.split())
        found.append((noted, empty))
    return statistics.median(noted for noted, _ in found), statistics.median(empty for _, empty in found)


def of_gpu_calls(folder: Path) -> dict[str, tuple[float, float]]:
    """Return nanoseconds of each kind of call through our wrapper and an empty one: the best of 40 loops."""
    sys.path.insert(0, str(HERE.parent))
    from tests.support.native import gpu_program

    program = gpu_program.build(folder, shutil.which("cc") or sys.exit("needs a C compiler"))
    ours = ":".join(str(intercept.library(family)) for family in ("cuda", "cublas", "nccl"))
    found: dict[str, list[list[float]]] = {"empty": [], "ours": []}
    for turn in range(40):
        for which, preload in (("empty", str(folder / "empty.so")), ("ours", ours)):
            environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": preload, "FAKE_RESULTS": "0",
                           "FAKE_FAST": "1", "RESILIO_CALLS": str(folder / f"gpu{turn}")}  # fmt: skip
            argv = [program, "speed", str(GPU_CALLS)]
            done = subprocess.run(argv, env=environment, check=True, capture_output=True, text=True, timeout=LIMIT_S)
            found[which].append(list(map(float, done.stdout.split())))
    best = {which: [min(column) for column in zip(*turns, strict=True)] for which, turns in found.items()}
    return dict(zip(GPU_KINDS, zip(best["ours"], best["empty"], strict=True), strict=True))


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median ratio."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="iterations of a block")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return train(options.rank)
    without: list[float] = []
    noted: list[float] = []
    calls = 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        call_ns, empty_ns = of_one_call(folder)
        print(f"a noted call: {call_ns:.0f} ns; through an empty wrapper: {empty_ns:.0f} ns", flush=True)
        gpu_calls = of_gpu_calls(folder)
        for kind, (ours_ns, nothing_ns) in gpu_calls.items():
            print(f"{kind}: {ours_ns:.0f} ns; empty {nothing_ns:.0f} ns; {ours_ns - nothing_ns:+.0f} ns", flush=True)
        if not options.pairs:
            return None
        for pair in range(options.pairs):
            for watched in ((False, True), (True, False))[pair % 2]:
                median_s, calls_here = block(options.steps, watched, folder)
                (noted if watched else without).append(median_s)
                calls = max(calls, calls_here)
            print(f"pair {pair + 1}: {without[-1] * 1e3:.2f} ms without, {noted[-1] * 1e3:.2f} ms with", flush=True)
    ratios = [b / a for a, b in zip(without, noted, strict=True)]
    low, high = interval(ratios)
    iteration_s = statistics.median(without)
    share = calls * (call_ns - empty_ns) / (iteration_s * 1e9)
    print(
        f"iteration {iteration_s * 1e3:.2f} ms; with: {(statistics.median(ratios) - 1) * 100:+.2f} % "
        f"(95 %: {(low - 1) * 100:+.2f} to {(high - 1) * 100:+.2f} %)\n"
        f"{calls:.1f} calls an iteration x {call_ns - empty_ns:.0f} ns = {share * 100:.5f} % of it"
    )
    if options.json:
        figures = {"call_ns": call_ns, "empty_ns": empty_ns, "calls": calls, "without_s": without, "with_s": noted,
                   "ratio": statistics.median(ratios), "interval": [low, high], "share": share,
                   "gpu_calls": gpu_calls}  # fmt: skip
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
