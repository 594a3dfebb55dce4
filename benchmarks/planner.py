"""How long the planner takes to look at every layout of GPT-3 175B, and at all shapes of a large cluster.

usage: planner.py [--times 3]

Prints layouts looked at, how many fit, wall and CPU seconds, CPU time per layout, and the best layout.
"""

from __future__ import annotations

import argparse
import time

from resilio_hpc.autoparallel.hardware import machine
from resilio_hpc.autoparallel.search import Found, Space, search
from resilio_hpc.autoparallel.transformer import Transformer

GPT3 = Transformer("GPT-3 175B", 96, 12288, 96, 49152, 51200, 2048, tied=True)


def timed(gpus: list[int], global_batch: int, space: Space, times: int) -> None:
    """Best of several runs: what the machine does beside it is no part of the planner."""
    best_wall, best_cpu, founds = float("inf"), float("inf"), list[Found]()
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        founds = [search(GPT3, machine("A100"), count, global_batch, space=space) for count in gpus]
        best_wall, best_cpu = min(best_wall, time.perf_counter() - wall), min(best_cpu, time.process_time() - cpu)
    looked = sum(found.looked_at for found in founds)
    fitting = looked - sum(found.too_large for found in founds)
    print(f"{len(gpus)} shape(s), up to {max(gpus)} GPUs: {looked} layouts looked at, {fitting} fit")
    print(f"  wall {best_wall:.2f} s, CPU {best_cpu:.2f} s, {best_cpu / max(looked, 1) * 1e6:.2f} us of CPU per layout")
    last = founds[-1]
    if last.cost.iteration.size:
        print(f"  best: {last.layouts.row(0)} {last.cost.iteration[0]:.3f} s, {last.memory.device[0] / 1e9:.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    timed([1024], 1536 * 2, Space(), times)
    timed([4096], 1536 * 8, Space(), times)
    timed([8 * nodes for nodes in range(1, 1001) if (96 * 64) % nodes == 0], 1536 * 8, Space(), times)


if __name__ == "__main__":
    main()
