"""How long the planner takes to look at every layout of large models, and at all shapes of a large cluster.

usage: planner.py [--times 3]

Every layout is looked at: its memory is computed, and its time if it fits. Nothing else is pruned but offload, where
something fits without. Megatron-Core: the layouts of ``resilio plan``. Prints layouts looked at, how many of them fit,
wall and CPU seconds, CPU time per layout beside that of Calculon, and the best layout.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.base.hardware import machine as known_machine
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.autoparallel.search.failures import Reliability
from resilio_hpc.autoparallel.search.frameworks import machine_and_stack, space_of
from resilio_hpc.autoparallel.search.inventory_file import assumed
from resilio_hpc.autoparallel.search.offers import OfferRequest, offers
from resilio_hpc.autoparallel.search.ranking import Training, find, pareto, ranked, search_offers
from resilio_hpc.autoparallel.search.search import Found

GPT3 = Transformer(96, 12288, 96, 49152, 51200, 2048, tied=True, name="GPT-3 175B")

CALCULON_MS = (1.6, 9.5)  # one evaluation of Calculon (GPT-3 175B), measured on a machine like this one


def timed(gpus: list[int], global_batch: int, training: Training, machine: Machine, times: int) -> None:
    """Best of several runs: what the machine does beside it is no part of the planner."""
    best_wall, best_cpu, founds = float("inf"), float("inf"), list[Found]()
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        asked = replace(training, global_batch=global_batch)
        founds = [find(asked, machine, count) for count in gpus]
        best_wall, best_cpu = min(best_wall, time.perf_counter() - wall), min(best_cpu, time.process_time() - cpu)
    looked = sum(found.looked_at for found in founds)
    fitting = looked - sum(found.too_large for found in founds)
    name = training.model.name
    print(f"{name}, {len(gpus)} shape(s), up to {max(gpus)} {machine.gpu}: {looked} layouts looked at, {fitting} fit")
    print(f"  wall {best_wall:.2f} s, CPU {best_cpu:.2f} s, {per_layout(best_cpu, looked)}")
    last = founds[-1]
    if last.cost.iteration.size:
        print(f"  best: {last.layouts.row(0)} {last.cost.iteration[0]:.3f} s, {last.memory.device[0] / 1e9:.1f} GB")


def per_layout(cpu_s: float, looked: int) -> str:
    """Beside the peer's."""
    each = cpu_s / max(looked, 1) * 1e6
    least, most = (value * 1e3 / each for value in CALCULON_MS)
    peer = f"Calculon: {CALCULON_MS[0]}-{CALCULON_MS[1]} ms, {least:.0f}-{most:.0f} times"
    return f"{each:.2f} us of CPU per layout ({peer})"


def every_shape(nodes: int, training: Training, times: int) -> None:
    """``resilio plan`` over an inventory: offers, search, ranking, Pareto front."""
    inventory = assumed(8 * nodes, 8, "A100")
    best_wall, best_cpu = float("inf"), float("inf")
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        offered = offers(inventory, OfferRequest(), 0.0)
        searched = search_offers(offered, training, {"A100": known_machine("A100")}, Reliability(6000 * 3600.0))
        choices, front = ranked(searched, "time"), pareto(searched)
        best_wall, best_cpu = min(best_wall, time.perf_counter() - wall), min(best_cpu, time.process_time() - cpu)
    looked = sum(one.looked_at for one in searched)
    some = f"{looked} layouts looked at, {len(choices)} shapes have one that fits"
    print(f"all {len(offered)} shapes of {nodes} nodes: {some}")
    print(f"  wall {best_wall:.2f} s, CPU {best_cpu:.2f} s, {per_layout(best_cpu, looked)}")
    print(f"  best: {choices[0].offer.shape.nodes} nodes, {choices[0].layout}; {len(front)} on the Pareto front")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    plain, a100 = Training(GPT3, 1536 * 8, shipped()), known_machine("A100")
    timed([1024], 1536 * 2, plain, a100, times)
    timed([4096], 1536 * 8, plain, a100, times)
    every_shape(1000, plain, times)
    print("Megatron-Core, 5 % of the memory left free")
    for name, gpu, gpus, batch in (("gpt3-175b", "A100", 1024, 1536 * 2), ("deepseek-v3", "H100", 2048, 15360),
                                   ("deepseek-v3", "GB200", 2048, 15360)):  # fmt: skip
        node, stack = machine_and_stack(gpu, 0, "Megatron-Core")
        model = uniform(preset(name), 4096)
        megatron = Training(model, batch, shipped(), stack, space_of("Megatron-Core"), headroom=0.05)
        timed([gpus], batch, megatron, node, times)
    node, stack = machine_and_stack("A100", 0, "Megatron-Core")
    every_shape(1000, Training(GPT3, 1536 * 8, shipped(), stack, space_of("Megatron-Core"), headroom=0.05), times)


if __name__ == "__main__":
    main()
