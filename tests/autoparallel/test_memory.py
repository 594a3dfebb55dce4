"""Each allocation that the memory model knows, against bytes computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines, machine
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Problem
from resilio_hpc.autoparallel.cost.memory import CHANNELS, CONTEXT, WORKSPACE, Memory, memory
from resilio_hpc.autoparallel.measure.predict import predict_rows, read
from resilio_hpc.autoparallel.measure.rows import case
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers

TOKENS, HIDDEN, VOCAB = 1024, 512, 51200
SMALL = Transformer(4, HIDDEN, 8, 2048, VOCAB, TOKENS, tied=True, name="small")
LLAMA = Transformer(32, 4096, 32, 14336, 128256, 8192, kv_heads=8, gated=True, name="Llama 3 8B")
EXPERTS = replace(SMALL, layers=12, experts=8, topk=1)
ROW = {
    "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "mlp": "swiglu",
    "vocab": "128256", "seq": "8192", "gpu": "H100", "num_gpus": "8", "dp": "8", "global_batch": "16",
    "micro_batch": "2", "zero": "FSDP2", "recompute": "selective", "framework": "torchtitan+compile",
}  # fmt: skip


def held(layout: Layout, model: Transformer = SMALL, gpu: str = "H100", **stack: object) -> Memory:
    return memory(
        Problem(
            Transformers.of([model]),
            Layouts.of([layout]),
            Machines.of([machine(gpu)]),
            Stacks.of([Stack(**stack)]),  # type: ignore[arg-type]
        )
    )


def kept(layout: Layout, model: Transformer = SMALL, **stack: object) -> float:
    """Bytes of activations and head on the first stage."""
    found = held(layout, model, **stack)
    return float(found.first[0] - found.states[0]) - WORKSPACE


# -- activations -------------------------------------------------------------------------------------------------------


def test_masks_of_dropout_are_two_bytes_where_models_are_trained_with_it() -> None:
    def masks(model: Transformer) -> float:
        return kept(Layout(), model, dropout=True) - kept(Layout(), model)

    assert masks(SMALL) == 2 * TOKENS * HIDDEN * SMALL.layers
    assert masks(replace(SMALL, gated=True)) == 0


@pytest.mark.parametrize(("fused", "per_token"), [(True, 55296), (False, 55296 + 2 * 4096)])
def test_operator_level_checkpointing_keeps_every_second_product(fused: bool, per_token: int) -> None:
    """Input, q, attention's output: 3 x 4096; v: 1024; w1: 14336; of two bytes each. Eager code keeps w2 as well."""
    layout = Layout(dp=8, micro_batch=2, global_batch=16, zero=3, recompute=Recompute.ALTERNATE)
    one, two = (kept(layout, replace(LLAMA, layers=layers), fused=fused, keeps_products=True) for layers in (1, 2))
    assert two - one == per_token * 2 * LLAMA.seq


def test_what_a_stage_sent_is_kept_until_its_backward_pass() -> None:
    layout = Layout(pp=2, dp=2, global_batch=16, recompute=Recompute.FULL)
    more = kept(layout, keeps_outputs=True) - kept(layout)
    assert more == 2 * (2 * TOKENS * HIDDEN)  # two micro-batches are in flight
    last = [float(held(layout, keeps_outputs=keeps).last[0]) for keeps in (False, True)]
    assert last[0] == last[1]  # the last stage sends nothing


def test_what_a_stage_received_is_freed_where_the_framework_does_so() -> None:
    layout = Layout(pp=2, dp=2, vpp=2, global_batch=16)
    less = kept(layout) - kept(layout, frees_inputs=True)
    assert less == 5 * 2 * TOKENS * HIDDEN  # so many chunks are in flight
    again = replace(layout, recompute=Recompute.FULL)  # which starts from it
    assert kept(again) == kept(again, frees_inputs=True)


def test_zero_2_beside_a_pipeline_holds_the_gradients_of_a_chunk() -> None:
    chunk = 12 * HIDDEN**2 * 4  # of one layer, in fp32
    for batch, chunks in ((4, 1), (16, 2)):  # one round of micro-batches, and several
        two, one = (kept(Layout(pp=2, dp=2, vpp=2, global_batch=batch, zero=zero)) for zero in (2, 1))
        assert two - one == pytest.approx(chunks * chunk)


def test_gathered_inputs_of_attention_and_mlp_are_kept_in_the_layer_that_is_worked_on() -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True, global_batch=8, recompute=Recompute.FULL)
    more = kept(layout, keeps_gathered=True) - kept(layout)
    assert more == 2 * 2 * TOKENS * HIDDEN / 2  # of each, the half that the other rank has


def test_the_recomputed_layer_and_the_loss_do_not_meet() -> None:
    layout = Layout(recompute=Recompute.FULL)
    few = replace(SMALL, vocab=128)
    inputs = 2 * TOKENS * HIDDEN
    assert kept(layout) == SMALL.layers * inputs + 6 * TOKENS * VOCAB + inputs
    assert kept(layout, few) == few.layers * inputs + 32 * TOKENS * HIDDEN


def test_plain_attention_keeps_five_bytes_per_score() -> None:
    assert kept(Layout(), flash=0) - kept(Layout()) == 5 * 8 * TOKENS**2 * SMALL.layers


@pytest.mark.parametrize(("text", "flash"), [("unfused", 0), ("local", 0), ("transformer_engine", 3)])
def test_a_row_can_say_that_attention_is_plain(text: str, flash: int) -> None:
    row = {**ROW, "framework": "Megatron-Core", "attn_kernel": text}
    assert case(row).stack.flash == flash


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "share", "copies"),
    [
        (Layout(tp=2, dp=4, ep=2, zero=1), 4, 2),  # split over both ranks of tp: 8 / (2 x 2)
        (Layout(tp=2, dp=2, ep=4, zero=1), 4, 1),  # all four ranks hold other experts
        (Layout(tp=4, dp=1, ep=2, zero=1), 4, 1),  # two of the four ranks share an expert
    ],
)
def test_experts_are_split_over_the_ranks_that_expert_parallelism_leaves(
    layout: Layout, share: int, copies: int
) -> None:
    states = float(held(layout, EXPERTS, expert_tp=True).states[0])
    experts = 12 * 8 * 2 * HIDDEN * 2048 / share
    others = (12 * (4 * HIDDEN**2 + 8 * HIDDEN) + VOCAB * HIDDEN) / layout.tp
    assert states == pytest.approx(others * (6 + 12 / layout.dp) + experts * (6 + 12 / copies))


def test_ranks_that_share_an_expert_gather_its_tokens() -> None:
    layout = Layout(tp=2, dp=2, sequence_parallel=True)
    more = kept(layout, EXPERTS, expert_tp=True) - kept(layout, EXPERTS)
    assert more == 12 * TOKENS * HIDDEN  # 2 x (2 + 1) / 2 bytes in the place of 2 x 2 / 2


# -- loss head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "bytes_per_logit"), [(1, 12), (2, 16)])
def test_a_loss_over_tensor_parallel_ranks_has_copies_of_its_own(tp: int, bytes_per_logit: int) -> None:
    found = held(Layout(tp=tp, global_batch=1), loss_bytes=12, parallel_loss_bytes=16, loss_gap_bytes=2)
    logits = TOKENS * VOCAB / tp
    assert float(found.head[0]) == bytes_per_logit * logits + 2 * TOKENS * HIDDEN
    assert float(found.gaps[0]) == 2 * logits


@pytest.mark.parametrize(
    ("framework", "loss"),
    [("torchtitan", (12, 16, 2)), ("torchtitan+compile", (12, 16, 2)), ("torchtitan+compile+loss", (4, 0, 0))],
)
def test_a_compiled_loss_has_no_copies_in_fp32(framework: str, loss: tuple[int, int, int]) -> None:
    stack = case({**ROW, "framework": framework}).stack
    assert (stack.loss_bytes, stack.parallel_loss_bytes, stack.loss_gap_bytes) == loss


# -- sharded parameters ------------------------------------------------------------------------------------------------


def test_zero_3_gathers_a_layer_and_the_next_one_beside_embedding_and_head() -> None:
    layout = Layout(dp=8, zero=3, global_batch=8)
    found = held(layout, LLAMA, fp32_weights=True)
    layer, ends = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 2 * 128256 * 4096
    assert float(found.states[0]) == 16 / 8 * (32 * layer + ends) + 2 * (ends + 2 * layer)
    assert float(found.gaps[0]) == 2 * ends  # the buffers that are gathered into; two layers are smaller


def test_zero_3_of_deepspeed_gathers_one_matrix_at_a_time() -> None:
    layout = Layout(dp=8, zero=3, global_batch=8)
    few = replace(SMALL, vocab=128)
    whole, single = (float(held(layout, few, gather_whole=gather).states[0]) for gather in (False, True))
    assert whole - single == 2 * 2 * (12 * HIDDEN**2 - 4 * HIDDEN**2)


def test_a_pipeline_over_sharded_parameters_holds_those_of_its_stage_and_their_gradients() -> None:
    layout = Layout(pp=2, dp=4, zero=3, global_batch=32)
    found = held(layout, fp32_weights=True)
    stage = 2 * 12 * HIDDEN**2 + VOCAB * HIDDEN
    assert float(found.states[0]) == (16 / 4 + 6) * stage


# -- what is around it -------------------------------------------------------------------------------------------------


def test_flat_buffers_hold_gradients_and_weights() -> None:
    for grad_bytes in (2, 4):
        outside = float(held(Layout(dp=2), grad_bytes=grad_bytes, buckets=5e8).buckets[0])
        assert outside == 5e8 * (grad_bytes + 2) + 2 * CHANNELS


def test_the_allocator_holds_more_where_there_is_room() -> None:
    found = held(Layout(micro_batch=64))
    peak = found.peak[0]
    assert found.device[0] == pytest.approx(1.12 * peak + CONTEXT + CHANNELS)
    assert found.least[0] == pytest.approx(1.05 * peak + CONTEXT + CHANNELS)
    room, tight, less = found.device[0] + 1, (found.device[0] + found.least[0]) / 2, found.least[0] / 2
    assert found.seen(np.array([room]))[0] == found.device[0]
    assert found.seen(np.array([tight]))[0] == tight
    assert found.seen(np.array([less]))[0] == found.least[0]  # what does not fit is not made smaller by that
    assert found.reserved(np.array([room]))[0] == pytest.approx(1.12 * peak)


def test_expandable_segments_leave_little_unused() -> None:
    found = held(Layout(micro_batch=64), expandable=True)
    assert found.device[0] == found.least[0]


def test_each_kind_of_measurement_has_its_prediction() -> None:
    kinds = ("peak GiB", "torch max allocated (GB, 1e9)", "nvidia-smi", "GiB reserved")
    rows = [{**ROW, "gpu": "H200", "memory_kind": kind} for kind in kinds]
    reserved, allocated, seen, same = (float(row["pred_memory_gb"]) for row in predict_rows(rows, shipped()))
    assert same == reserved  # torchtitan's log tells what is reserved, Megatron's what is allocated
    other = {**ROW, "gpu": "H200", "framework": "Megatron-Core"}
    plain, named = predict_rows([other, {**other, "memory_kind": "allocated"}], shipped())
    assert plain["pred_memory_gb"] == named["pred_memory_gb"]
    found = held_of(ROW)
    assert allocated == pytest.approx(float(found.peak[0]) / 1e9, rel=1e-5)
    assert reserved == pytest.approx(1.05 * float(found.peak[0] + found.gaps[0]) / 2**30, rel=1e-5)
    assert seen == pytest.approx(reserved + (CONTEXT + 2 * CHANNELS) / 2**30, rel=1e-5)


def held_of(row: dict[str, str]) -> Memory:
    found = case(row)
    return memory(
        Problem(
            Transformers.of([found.model]),
            Layouts.of([found.layout]),
            Machines.of([found.machine]),
            Stacks.of([found.stack]),
        )
    )


# -- rows that leave something open ------------------------------------------------------------------------------------


def test_zero_that_no_source_states_is_the_faster_one_that_fits() -> None:
    row = {**ROW, "framework": "Megatron-Core", "recompute": "none", "zero": ""}
    tight = {**row, "gpu": "A100", "micro_batch": "1"}
    lone, large = read([{**row, "layers": "2", "gpu": "A100", "num_gpus": "1", "tp": "1", "dp": "1"}, tight]).cases
    assert (lone.layout.zero, large.layout.zero) == (0, 1)
    assert "zero=1" in large.assumed
    (stated,) = read([{**tight, "zero": "0"}]).cases
    assert stated.layout.zero == 0


@pytest.mark.parametrize(
    ("changes", "micro_batch"),
    [({}, 4), ({"vpp": "2"}, 2), ({"micro_batch": "1"}, 1), ({"framework": "Megatron-Core"}, 1)],
)
def test_torchtitan_cuts_a_batch_into_as_many_micro_batches_as_there_are_stages(
    changes: dict[str, str], micro_batch: int
) -> None:
    row = {**ROW, "num_gpus": "64", "pp": "8", "global_batch": "256", "micro_batch": ""}
    assert case({**row, **changes}).layout.micro_batch == micro_batch
