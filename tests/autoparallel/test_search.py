"""The search looks at every layout, and says what is in the way when none fits."""

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines, machine
from resilio_hpc.autoparallel.base.layout import Layouts
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Problem, iteration
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.autoparallel.search.search import Space, divisors, enumerate_layouts, search

SMALL = Transformer(24, 2048, 16, 8192, 51200, 2048, tied=True, name="small")
MOE = Transformer(16, 2048, 16, 8192, 51200, 2048, experts=8, topk=2, expert_ffn=4096, gated=True, name="moe")
A100 = machine("A100")


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 12, 49)] == [[1], [1, 2, 3, 4, 6, 12], [1, 7, 49]]


def test_every_layout_uses_all_gpus_and_the_whole_batch() -> None:
    for model in (SMALL, MOE):
        layouts = enumerate_layouts(model, A100, 8, 8, Space(cp=(1, 2)))
        rows = [layouts.row(i) for i in range(0, layouts.tp.size, 1 + layouts.tp.size // 200)]
        assert len(set(rows)) == len(rows)
        assert all(row.num_gpus == 8 and 8 % (row.micro_batch * row.dp) == 0 for row in rows)
        assert all(row.pp * row.vpp <= model.layers and row.tp <= 8 for row in rows)
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
