"""What lies in the host's memory: bytes, seconds, and a search that looks at it only where it can be the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machine, Machines, machine, machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Offload, Recompute
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Cost, Problem, iteration
from resilio_hpc.autoparallel.cost.memory import Memory, memory
from resilio_hpc.autoparallel.cost.offload import HOST_SHARE
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.autoparallel.search.frameworks import space_of
from resilio_hpc.autoparallel.search.layout_space import Space, enumerate_layouts
from resilio_hpc.autoparallel.search.search import search

DENSE = Transformer(24, 4096, 32, 16384, 51200, 2048, name="dense")
MOE = Transformer(16, 2048, 16, 8192, 51200, 2048, experts=8, topk=2, expert_ffn=4096, gated=True, name="moe")
A100, GH200 = machine("A100"), machine("GH200")
PARAMETERS = 24 * 12 * 4096**2 + 2 * 51200 * 4096
TOKENS = 2048


def asked(layout: Layout, model: Transformer = DENSE, on: Machine = A100, **stack: object) -> Problem:
    return Problem(
        Transformers.of([model]),
        Layouts.of([layout]),
        Machines.of([on]),
        Stacks.of([Stack(**stack)]),  # type: ignore[arg-type]
    )


def held(layout: Layout, model: Transformer = DENSE, **stack: object) -> Memory:
    return memory(asked(layout, model, **stack))


def cost(layout: Layout, model: Transformer = DENSE, on: Machine = A100, **stack: object) -> Cost:
    return iteration(asked(layout, model, on, **stack), shipped()).full(1)


def moved(layout: Layout, offload: Offload, **stack: object) -> tuple[float, float]:
    """Bytes of states that leave the GPU, and bytes on the host."""
    whole, less = (held(replace(layout, offload=kind), **stack) for kind in (Offload.NONE, offload))
    return float(whole.states[0] - less.states[0]), float(less.host[0])


def test_optimizer_states_leave_the_gpu_and_the_host_has_the_gradients_too() -> None:
    layout = Layout(dp=4, global_batch=16, zero=1)
    assert moved(layout, Offload.OPTIMIZER) == pytest.approx((12 * PARAMETERS / 4, 16 * PARAMETERS / 4))


def test_with_zero_2_gradients_leave_the_gpu_and_with_fsdp_parameters() -> None:
    two, three = Layout(dp=4, global_batch=16, zero=2), Layout(dp=4, global_batch=16, zero=3)
    assert moved(two, Offload.OPTIMIZER) == pytest.approx((16 * PARAMETERS / 4,) * 2)
    assert moved(three, Offload.OPTIMIZER, fp32_weights=True) == pytest.approx((16 * PARAMETERS / 4,) * 2)


def test_activations_leave_the_gpu_but_for_those_of_two_layers_and_of_the_mlp() -> None:
    layout = Layout(dp=4, global_batch=4, zero=1)
    whole, less = (held(replace(layout, offload=kind)) for kind in (Offload.NONE, Offload.ACTIVATIONS))
    each = TOKENS * (
        6 * 4096 + 2 * 4 * 4096
    )  # inputs of norms and of the first product; q, k, v and attention's result
    assert whole.activations[0] - less.activations[0] == pytest.approx((24 - 2) * each)
    assert less.host[0] == pytest.approx(24 * each)


def test_of_recomputed_layers_their_inputs_leave_the_gpu() -> None:
    layout = Layout(dp=4, global_batch=4, zero=1, recompute=Recompute.FULL, offload=Offload.ACTIVATIONS)
    assert held(layout).host[0] == pytest.approx(24 * TOKENS * 2 * 4096)


def test_the_host_steps_as_fast_as_its_memory_and_its_link_let_it() -> None:
    layout = Layout(dp=4, global_batch=16, zero=1, offload=Offload.OPTIMIZER)
    adam = 28 * PARAMETERS / 4 / (51e9 * 0.5)
    assert cost(layout).optimizer[0] == pytest.approx(adam)
    assert cost(layout, on=GH200).optimizer[0] == pytest.approx(adam * 51 / 512)
    whole = cost(replace(layout, offload=Offload.NONE)).optimizer[0]
    assert whole < cost(layout, on=GH200).optimizer[0] < cost(layout).optimizer[0]


def test_copies_show_only_where_computing_does_not_hide_them() -> None:
    layout = Layout(dp=4, global_batch=16, zero=1, offload=Offload.ACTIVATIONS)
    assert cost(layout, on=GH200).offload[0] == 0
    slow = replace(A100, host_gbytes_s=1.0)
    assert cost(layout, on=slow).offload[0] > 0
    with_copies, without = (cost(replace(layout, offload=kind), on=slow) for kind in (layout.offload, Offload.NONE))
    assert with_copies.iteration[0] - without.iteration[0] == pytest.approx(with_copies.offload[0], rel=0.05)


@pytest.mark.parametrize("name", sorted(machines()))
def test_every_gpu_has_a_host(name: str) -> None:
    one = machines()[name]
    assert 16 <= one.host_gbytes_s <= one.link_gbytes_s or name.startswith("L40S")
    assert one.host_memory_gb > 0 and one.host_memory_gbytes_s > 0 and "host:" in one.source


# -- the search --------------------------------------------------------------------------------------------------------

SPACES = {
    "every kind": Space(offload=tuple(Offload), offload_ranked=True),
    "Megatron-Core": replace(space_of("Megatron-Core"), offload_ranked=True),
    "DeepSpeed": replace(space_of("DeepSpeed"), offload_ranked=True),
    "torchtitan": replace(space_of("torchtitan"), offload_ranked=True),
}


def exhaustive(model: Transformer, on: Machine, gpus: int, batch: int, space: Space) -> float:
    """The best time of all layouts, looked at one kind of offload after another, without a bound."""
    best = np.inf
    for kind in space.offload:
        layouts = enumerate_layouts(model, on, gpus, batch, replace(space, offload=(kind,)))
        if not layouts.tp.size:
            continue
        every = Problem(Transformers.of([model]), layouts, Machines.of([on]), Stacks.of([Stack()]))
        need = memory(every)
        fits = (need.device <= on.memory_gb * 1e9) & (need.host <= HOST_SHARE * on.host_memory_gb * 1e9)
        times = np.broadcast_to(iteration(every, shipped()).iteration, fits.shape)
        best = min(best, float(np.where(fits, times, np.inf).min()))
    return best


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize(("memory_gb", "gpus", "batch"), [(85.0, 4, 8), (42.5, 4, 16), (24.0, 8, 8), (14.0, 4, 12)])
def test_what_is_passed_over_is_never_the_best(
    name: str, model: Transformer, memory_gb: float, gpus: int, batch: int
) -> None:
    for on in (replace(A100, memory_gb=memory_gb), replace(GH200, memory_gb=memory_gb, host_memory_gb=40.0)):
        found = search(model, on, gpus, batch, space=SPACES[name])
        best = float(found.cost.iteration[0]) if found.cost.iteration.size else np.inf
        assert best == exhaustive(model, on, gpus, batch, SPACES[name])


def test_offload_is_looked_at_only_where_nothing_fits_without_unless_asked_for() -> None:
    space = space_of("Megatron-Core")
    roomy = search(DENSE, A100, 4, 16, space=space)
    assert roomy.cost.iteration.size and not np.any(roomy.layouts.offload)
    tight = search(DENSE, replace(A100, memory_gb=26.0), 4, 16, space=space)
    assert tight.cost.iteration.size and np.all(tight.layouts.offload > 0)
    ranked = search(DENSE, A100, 4, 16, space=replace(space, offload_ranked=True))
    assert ranked.looked_at >= roomy.looked_at and ranked.cost.iteration[0] <= roomy.cost.iteration[0]


def test_a_host_without_room_is_no_way_out() -> None:
    space = space_of("Megatron-Core")
    none = search(DENSE, replace(A100, memory_gb=26.0, host_memory_gb=1.0), 4, 16, space=space)
    assert none.cost.iteration.size == 0 and none.least_excess > 0
