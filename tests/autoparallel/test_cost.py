"""The cost and memory models obey physics: more of a resource never hurts, more work never helps."""

from dataclasses import fields, replace

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.efficiency import NAMES, bounds, read, shipped
from resilio_hpc.autoparallel.base.hardware import Machine, Machines, machine, machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.collectives import tree_gain
from resilio_hpc.autoparallel.cost.cost import Cost, Problem, iteration, stage_layers
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.cost.stage_times import layers_of
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.core.errors import UsageError

GPT3 = Transformer(96, 12288, 96, 49152, 51200, 2048, tied=True, name="GPT-3 175B")
BASE = Layout(tp=8, pp=8, dp=8, micro_batch=2, global_batch=1024)


def asked(layout: Layout = BASE, model: Transformer = GPT3, gpu: Machine | None = None, **stack: object) -> Problem:
    return Problem(
        Transformers.of([model]),
        Layouts.of([layout]),
        Machines.of([gpu or machine("A100")]),
        Stacks.of([Stack(**stack)]),  # type: ignore[arg-type]
    )


def experts(topk: int) -> Transformer:
    return replace(GPT3, layers=48, hidden=2048, heads=32, ffn=768, experts=128, topk=topk, expert_ffn=768)


def seconds(*args: object, **kwargs: object) -> float:
    return float(iteration(asked(*args, **kwargs), shipped()).iteration[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["bf16", "memory_gbytes_s", "link_gbytes_s", "nic_gbytes_s"])
def test_a_faster_machine_is_never_slower(part: str) -> None:
    gpu = machine("A100")
    assert seconds(gpu=replace(gpu, **{part: 2 * getattr(gpu, part)})) <= seconds()


@pytest.mark.parametrize("change", [{"layers": 192}, {"hidden": 24576, "ffn": 98304}, {"vocab": 102400}, {"seq": 4096}])
def test_a_larger_model_is_never_faster(change: dict[str, int]) -> None:
    assert seconds(model=replace(GPT3, **change)) > seconds()


def test_a_batch_twice_as_large_takes_less_than_twice_as_long() -> None:
    once, twice = seconds(), seconds(replace(BASE, global_batch=2048))
    assert once < twice < 2 * once


def test_recomputation_costs_time_and_saves_memory() -> None:
    kinds = [replace(BASE, recompute=kind) for kind in (Recompute.NONE, Recompute.ALTERNATE, Recompute.FULL)]
    times = [seconds(kind) for kind in kinds]
    held = [float(memory(asked(kind)).peak[0]) for kind in kinds]
    assert times == sorted(times) and times[0] < times[-1]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]


def test_full_recomputation_adds_about_a_third() -> None:
    assert 1.2 < seconds(replace(BASE, recompute=Recompute.FULL)) / seconds() < 1.4


def test_time_is_never_below_the_peak_of_the_machine() -> None:
    model, layout = Transformers.of([GPT3]), BASE
    flops = float(model.flops_per_token[0]) * layout.global_batch * GPT3.seq
    assert seconds(layout) > flops / layout.num_gpus / (machine("A100").bf16 * 1e12)


def test_tensor_parallelism_over_nodes_is_slow() -> None:
    assert seconds(replace(BASE, tp=32, pp=2)) > 1.2 * seconds()


def test_a_tree_between_two_nodes_carries_half_of_what_a_ring_does_and_gathers_have_none() -> None:
    tensor = Layout(tp=16, pp=1, dp=4, micro_batch=2, global_batch=1024)
    gpu = replace(machine("A100"), nic_gbytes_s=50.0)

    def traffic(layout: Layout, gain: float) -> float:
        quick = replace(shipped(), tree=gain, link_alpha_us=1e-3, nic_alpha_us=1e-3)
        return float(iteration(asked(layout, gpu=gpu), quick).tensor_parallel[0])

    assert traffic(tensor, 1e-9) / traffic(tensor, 1.0) == pytest.approx(15 / 8, rel=1e-3)
    whole = replace(tensor, sequence_parallel=True)
    assert traffic(whole, 1e-9) == traffic(whole, 1.0)
    many = float(tree_gain(np.array(512.0), np.array(64.0)))
    assert 1 < many < 1.02 and float(tree_gain(np.array(8.0), np.array(1.0))) == 1


def test_a_token_goes_once_to_a_gpu_that_has_several_of_its_experts() -> None:
    layout = Layout(tp=1, pp=1, dp=8, ep=8, micro_batch=2, global_batch=1024)
    quick = replace(shipped(), link_alpha_us=1e-3)
    parts = {
        (topk, once): iteration(asked(layout, experts(topk), dispatch_once=once), quick).expert_parallel[0]
        for topk in (1, 8)
        for once in (False, True)
    }
    assert parts[1, True] == pytest.approx(parts[1, False])
    # Of 8 copies to 8 GPUs at random 8 (1 - (7/8)^8) = 5.25 arrive.
    assert parts[8, True] / parts[8, False] == pytest.approx(5.25 / 8, rel=0.01)


def test_fused_experts_save_passes_over_tokens_and_nothing_of_dense_layers() -> None:
    layout = Layout(tp=1, pp=1, dp=8, ep=8, micro_batch=2, global_batch=1024)
    model, gpu = replace(experts(8), expert_ffn=3072, hidden=4096), machine("GB200")
    assert seconds(layout, model, gpu, fused_experts=True) < 0.95 * seconds(layout, model, gpu)
    assert seconds(gpu=gpu, fused_experts=True) == seconds(gpu=gpu)


def test_interleaving_shrinks_the_bubble_and_holds_more() -> None:
    plain, woven = asked(BASE), asked(replace(BASE, vpp=4))
    assert iteration(woven, shipped()).bubble[0] < iteration(plain, shipped()).bubble[0] / 3
    assert memory(woven).first[0] > memory(plain).first[0]


def test_embedding_and_loss_head_take_the_place_of_a_layer_where_that_makes_stages_even() -> None:
    llama, pipeline = replace(GPT3, layers=126, tied=False), replace(BASE, pp=16, dp=4)
    even = asked(pipeline, llama)
    held = stage_layers(even)
    assert (held.most[0], held.first[0], held.last[0]) == (8, 7, 7)
    assert layers_of(126, 16) == [7, *[8] * 14, 7]
    more = asked(pipeline, replace(llama, layers=128))  # the head comes on top of a full stage
    assert float(iteration(even, shipped()).iteration[0]) < float(iteration(more, shipped()).iteration[0])
    assert float(memory(even).device[0]) < float(memory(more).device[0])


@pytest.mark.parametrize("layers", [61, 70, 80, 105, 125, 126, 127])
@pytest.mark.parametrize("stages", [2, 3, 8, 16])
def test_uneven_stages_have_all_layers_and_the_ends_the_fewest(layers: int, stages: int) -> None:
    spread = layers_of(layers, stages)
    held = stage_layers(asked(replace(BASE, pp=stages), replace(GPT3, layers=layers)))
    assert sum(spread) == layers and max(spread) - min(spread) <= 1
    assert (max(spread), spread[0], spread[-1]) == (held.most[0], held.first[0], held.last[0])
    assert spread[-1] == min(spread)


def test_launches_that_are_slower_than_the_gpu_do_not_hide_collectives() -> None:
    small = replace(GPT3, layers=12, hidden=1024, heads=16, ffn=4096, seq=512)
    layout = replace(BASE, tp=8, pp=1, dp=1, micro_batch=1, global_batch=64)
    slow = replace(machine("A100"), link_gbytes_s=30.0)
    cost, slower = (iteration(asked(layout, small, gpu), shipped()) for gpu in (machine("A100"), slow))
    assert cost.host[0] > cost.compute[0]
    added = slower.tensor_parallel[0] - cost.tensor_parallel[0]
    assert slower.iteration[0] - cost.iteration[0] == pytest.approx(added, rel=0.05)


def test_a_pipeline_gathers_sharded_parameters_once_per_iteration() -> None:
    def gathering(pp: int, global_batch: int) -> float:
        layout = replace(BASE, tp=1, pp=pp, dp=64, micro_batch=1, global_batch=global_batch, zero=3)
        return float(iteration(asked(layout), shipped()).data_parallel[0])

    assert gathering(1, 1024) > 10 * gathering(1, 64)
    assert gathering(8, 1024) < 1.5 * gathering(8, 64)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharding_saves_memory(zero: int) -> None:
    layout = replace(BASE, pp=1, dp=64, micro_batch=1)
    less = memory(asked(replace(layout, zero=zero))).states[0]
    assert less < memory(asked(replace(layout, zero=zero - 1))).states[0]


def test_states_of_one_gpu_are_18_bytes_per_parameter() -> None:
    small = Transformer(12, 512, 8, 2048, 51200, 1024, tied=True, name="small")
    held = memory(asked(Layout(micro_batch=1, global_batch=1), small)).states[0]
    assert held == pytest.approx(18 * float(Transformers.of([small]).parameters[0]))


def test_activations_are_34_bytes_per_token_and_hidden() -> None:
    """Formula of arXiv:2205.05198 with fused attention; 32 without the masks of dropout."""
    small = Transformer(1, 512, 8, 2048, 51200, 1024, name="small")
    held = memory(asked(Layout(micro_batch=1, global_batch=1), small)).activations[0]
    assert held / (1024 * 512) == pytest.approx(32)


def test_columns_agree_with_single_rows() -> None:
    layouts = [BASE, replace(BASE, tp=4, pp=16), replace(BASE, tp=1, pp=8, dp=64), replace(BASE, vpp=2, zero=1)]
    columns = replace(asked(), layouts=Layouts.of(layouts))
    together = iteration(columns, shipped())
    assert np.allclose(together.iteration, [seconds(layout) for layout in layouts])


def test_the_parts_of_an_iteration_make_up_its_time() -> None:
    cost = iteration(asked(), shipped())
    parts = sum(float(getattr(cost, f.name)[0]) for f in fields(Cost) if f.name != "iteration")
    assert parts == pytest.approx(float(cost.iteration[0]), rel=0.08)  # what is left is waiting for stragglers


def test_every_parameter_lies_within_its_physical_bounds() -> None:
    limits, values = bounds(), shipped().vector()
    assert [
        name for name, low, v, high in zip(NAMES, limits.low, values, limits.high, strict=True) if not low <= v <= high
    ] == []
    assert np.all((limits.low <= limits.prior) & (limits.prior <= limits.high) & (limits.spread > 0))


@pytest.mark.parametrize("text", ["gemm_ampere = 1.7", "unknown = 1.0", 'nic = "fast"', "link = -1"])
def test_a_calibration_outside_physics_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="calibration"):
        read(text)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("A100-SXM-80GB", "A100"), ("a100-sxm4-40gb", "A100-40GB"), ("NVIDIA H200", "H200"), ("h100", "H100"),
     ("H100-96GB-HBM2e", "H100-96GB"), ("H100 PCIe", "H100-PCIE"), ("GB200", "GB200"), ("V100", "V100")],
)  # fmt: skip
def test_gpus_are_known_by_the_names_that_people_use(name: str, gpu: str) -> None:
    assert machine(name).gpu == gpu


def test_an_unknown_gpu_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown GPU 'TPUv5'.*A100"):
        machine("TPUv5")


def test_every_gpu_says_where_its_numbers_are_from() -> None:
    assert [name for name, row in machines().items() if not row.source] == []


def test_gradients_of_experts_are_reduced_among_the_ranks_that_hold_them() -> None:
    # with experts over the eight GPUs of a node, each rank's network port carries its own experts' gradients
    model, gpu = replace(experts(8), expert_ffn=8192), machine("H100")
    spread = Layout(dp=64, ep=8, global_batch=64, zero=1)
    alone = Layout(dp=64, ep=64, global_batch=64, zero=1)
    apart, none = (iteration(asked(row, replace(model, experts=64), gpu), shipped()) for row in (spread, alone))
    assert apart.data_parallel[0] > 2 * none.data_parallel[0]


def test_tokens_that_may_go_to_few_nodes_send_less_between_them() -> None:
    stack = {"dispatch_once": True}
    model = replace(experts(8), experts=64, topk=8, expert_ffn=1024)
    layout = Layout(dp=64, ep=64, global_batch=512)
    free, limited = (
        iteration(asked(layout, one, machine("H100"), **stack), shipped()).expert_parallel[0]
        for one in (model, replace(model, route_nodes=2))
    )
    assert limited < 0.6 * free


def test_transfers_of_an_interleaved_pipeline_run_beside_compute() -> None:
    layout = replace(BASE, vpp=4)
    shown, hidden = (iteration(asked(layout, overlap_p2p=value), shipped()) for value in (False, True))
    assert shown.pipeline_transfers[0] > 0 and hidden.pipeline_transfers[0] == 0
    assert hidden.iteration[0] < shown.iteration[0]


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "MI325X", "mi355x", "H800", "H20", "GH200", "A800", "L40S"])
def test_gpus_of_all_kinds_are_known_with_their_source(name: str) -> None:
    found = machine(name)
    assert found.source and found.memory_gb > 40 and found.nic_gbytes_s > 0
    cost = iteration(asked(replace(BASE, tp=1), replace(GPT3, layers=8), found), shipped())
    assert 0.1 < float(cost.iteration[0]) < 1000
