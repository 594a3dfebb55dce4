"""The search looks at every layout, and says what is in the way when none fits."""

from dataclasses import replace

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines, machine
from resilio_hpc.autoparallel.base.layout import Layout, Layouts
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Problem, iteration
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.autoparallel.search.layout_space import Space, divisors, enumerate_layouts
from resilio_hpc.autoparallel.search.search import search

SMALL = Transformer(24, 2048, 16, 8192, 51200, 2048, tied=True, name="small")
MOE = Transformer(16, 2048, 16, 8192, 51200, 2048, experts=8, topk=2, expert_ffn=4096, gated=True, name="moe")
A100 = machine("A100")
H100 = machine("H100")


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 12, 49)] == [[1], [1, 2, 3, 4, 6, 12], [1, 7, 49]]


def test_every_layout_uses_all_gpus_and_the_whole_batch() -> None:
    for model in (SMALL, MOE):
        layouts = enumerate_layouts(model, A100, 8, 8, Space(cp=(1, 2)))
        rows = [layouts.row(i) for i in range(0, layouts.tp.size, 1 + layouts.tp.size // 200)]
        assert len(set(rows)) == len(rows)
        assert all(row.num_gpus == 8 and 8 % (row.micro_batch * row.dp) == 0 for row in rows)
        assert all(row.pp * row.vpp <= model.layers + 2 and row.tp <= 8 for row in rows)
        assert all(row.micro_batches % row.pp == 0 for row in rows if row.vpp > 1)
        assert all(max(model.experts, 1) % row.ep == 0 for row in rows)


def test_the_best_is_the_best_of_all_looked_at_one_by_one() -> None:
    found = search(SMALL, A100, 4, 4)
    layouts = enumerate_layouts(SMALL, A100, 4, 4, Space())
    best = np.inf
    fitting = 0
    for i in range(layouts.tp.size):
        one = Problem(Transformers.of([SMALL]), Layouts.of([layouts.row(i)]), Machines.of([A100]), Stacks.of([Stack()]))
        if memory(one).device[0] <= A100.memory_gb * 1e9:
            fitting += 1
            best = min(best, float(iteration(one, shipped()).iteration[0]))
    assert found.cost.iteration[0] == best
    assert found.looked_at == layouts.tp.size and found.too_large == found.looked_at - fitting


def test_found_layouts_are_sorted_and_fit() -> None:
    found = search(SMALL, A100, 32, 128)
    assert np.all(np.diff(found.cost.iteration) >= 0)
    assert np.all(found.memory.device <= A100.memory_gb * 1e9)


def test_when_nothing_fits_the_smallest_layout_and_what_it_lacks_are_said() -> None:
    huge = Transformer(96, 12288, 96, 49152, 51200, 2048, name="huge")
    found = search(huge, A100, 8, 8)
    assert found.layouts.tp.size == 0 and found.too_large == found.looked_at > 0
    assert found.least_excess > 0 and found.smallest is not None and found.smallest.num_gpus == 8


def test_a_batch_that_no_layout_can_share_finds_nothing() -> None:
    found = search(SMALL, A100, 25, 7)
    assert found.cost.iteration.size == 0


LLAMA = Transformer(80, 8192, 64, 28672, 128256, 8192, kv_heads=8, gated=True, name="llama")


def test_context_parallelism_is_looked_at_where_sequences_are_long_enough() -> None:
    for seq, most in ((4096, 1), (8192, 2), (131072, 32)):
        layouts = enumerate_layouts(replace(LLAMA, seq=seq), H100, 256, 256, Space())
        assert set(layouts.cp) == {float(1 << k) for k in range(most.bit_length())}
    assert set(enumerate_layouts(LLAMA, H100, 256, 256, Space(cp=(4,))).cp) == {4.0}


def test_tensor_parallelism_divides_heads_groups_of_keys_and_mlp() -> None:
    rack = machine("GB200")  # 72 GPUs share NVLink
    degrees = set(enumerate_layouts(LLAMA, rack, 64, 64, Space()).tp)
    assert degrees == {1.0, 2.0, 4.0, 8.0}  # not 16: there are 8 groups of keys


def test_layers_that_no_number_of_stages_divides_are_interleaved_with_both_ends_counted() -> None:
    layouts = enumerate_layouts(replace(LLAMA, layers=126), H100, 256, 256, Space())
    pairs = {(int(pp), int(vpp)) for pp, vpp in zip(layouts.pp, layouts.vpp, strict=True)}
    assert {(16, 1), (16, 2), (16, 4), (16, 8), (2, 63), (32, 2)} <= pairs and (16, 3) not in pairs


def test_micro_batches_that_are_no_multiple_of_the_stages_are_interleaved_where_the_framework_can() -> None:
    def row_sizes(rounds: str, batch: int) -> set[tuple[float, float]]:
        found = enumerate_layouts(SMALL, A100, 8, batch, Space(rounds=rounds, only={"tp": 1, "pp": 4}))
        return set(zip(found.vpp[found.micro_batch == 1], found.micro_batches[found.micro_batch == 1], strict=True))

    assert (2.0, 6.0) not in row_sizes("whole", 12) and (2.0, 6.0) in row_sizes("longer", 12)
    assert (2.0, 3.0) not in row_sizes("longer", 6) and (2.0, 3.0) in row_sizes("any", 6)
    assert (2.0, 9.0) not in row_sizes("any", 18)  # nine do not make two equal rounds


def test_shards_within_groups_of_whole_nodes() -> None:
    space = Space(zero=(3,), replicas=True, only={"tp": 1, "pp": 1})
    layouts = enumerate_layouts(SMALL, H100, 64, 64, space)
    assert set(layouts.replicas) == {1.0, 2.0, 4.0, 8.0}
    one, eight = (Layout(dp=64, global_batch=64, zero=3, replicas=copies) for copies in (1, 8))
    large, stacks = Transformers.of([LLAMA]), Stacks.of([Stack(grad_bytes=2)])
    asked = [Problem(large, Layouts.of([row]), Machines.of([H100]), stacks) for row in (one, eight)]
    whole, parts = (memory(problem).states[0] for problem in asked)
    assert parts > 4 * whole  # each group of 8 GPUs has a copy of everything
    spread, near = (float(iteration(problem, shipped()).data_parallel[0]) for problem in asked)
    assert near < spread  # parameters are gathered inside of nodes; only gradients cross them


def test_memory_that_must_stay_free_is_left_free() -> None:
    for headroom in (0.0, 0.1, 0.3):
        found = search(SMALL, A100, 8, 512, headroom=headroom)
        assert np.all(found.memory.device <= (1 - headroom) * A100.memory_gb * 1e9)
