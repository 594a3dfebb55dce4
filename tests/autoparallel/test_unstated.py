"""What a row of a table leaves open, says in words of its own, or says of an old release."""

from __future__ import annotations

import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.layout import Schedule
from resilio_hpc.autoparallel.measure.predict import predict, predict_rows, read
from resilio_hpc.autoparallel.measure.rows import case

ROW = {
    "id": "x-1", "model": "GPT-3 175B", "layers": "96", "hidden": "12288", "heads": "96", "vocab": "51200",
    "seq": "2048", "global_batch": "1536", "micro_batch": "1", "gpu": "A100-SXM-80GB", "num_gpus": "384", "tp": "8",
    "pp": "12", "dp": "4", "recompute": "full", "precision": "fp16", "framework": "Megatron-LM 2021",
    "interconnect": "8x NVLink/NVSwitch; 8x200Gb/s HDR IB per node",
}  # fmt: skip


@pytest.mark.parametrize("word", ["NS", "ns (none likely)", "not stated", "N/A", "unknown", "-", "?", "not reported"])
def test_a_cell_that_says_nothing_is_empty(word: str) -> None:
    said = case({**ROW, "recompute": word, "zero": word, "kv_heads": word, "attn_kernel": word})
    left_out = case({**ROW, "recompute": "", "zero": "", "kv_heads": "", "attn_kernel": ""})
    assert said == left_out and {"recompute", "zero"} <= said.open


@pytest.mark.parametrize("word", ["none", "none (stated: trained without it)", "full", "selective"])
def test_a_cell_that_says_something_is_not(word: str) -> None:
    assert "recompute" not in case({**ROW, "recompute": word}).open


def test_what_is_not_stated_is_the_fastest_that_fits() -> None:
    row = {**ROW, "micro_batch": "", "vpp": "", "recompute": "NS", "zero": "NS", "schedule": ""}
    (tuned,) = read([row]).cases
    for micro in (1, 2, 4, 8):
        for kind in ("none", "selective", "full"):
            (one,) = read([{**row, "micro_batch": str(micro), "vpp": "1", "recompute": kind, "zero": "1"}]).cases
            both = predict([tuned, one], shipped())
            fits = both.memory.least <= both.problem.machines.memory
            assert fits[0] and (not fits[1] or both.cost.iteration[0] <= both.cost.iteration[1] * (1 + 1e-9))


@pytest.mark.parametrize(
    ("words", "schedule"),
    [("1F1B-I", Schedule.ONE_F_ONE_B), ("interleaved-1f1b", Schedule.ONE_F_ONE_B), ("ZB-1p", Schedule.ZB1P),
     ("zb2p", Schedule.ZB2P), ("ZB-H1", Schedule.ZBH1), ("ZB-V", Schedule.ZBV), ("GPipe", Schedule.GPIPE),
     ("zero bubble", Schedule.ZBH1), ("DualPipe", Schedule.DUALPIPE), ("", Schedule.ONE_F_ONE_B)],
)  # fmt: skip
def test_schedules_are_told_apart(words: str, schedule: Schedule) -> None:
    assert case({**ROW, "schedule": words, "vpp": "1"}).layout.schedule == schedule


def test_releases_before_flash_attention_have_none_unless_it_is_stated() -> None:
    row = {**ROW, "attn_kernel": ""}
    for framework, flash in (("Megatron-LM", 0), ("Megatron-LM (zero-bubble fork)", 0), ("Megatron-Core r0.8.0", 3)):
        assert case({**row, "framework": framework}).stack.flash == flash
    assert case({**row, "framework": "Megatron-LM", "attn_kernel": "flash"}).stack.flash > 0


def test_overlaps_are_read_from_flags_in_the_notes() -> None:
    row = {**ROW, "framework": "Megatron-LM"}
    assert (case(row).stack.overlap_tp, case(row).stack.overlap_dp) == (1, 1)
    notes = "overlap-grad-reduce, overlap-param-gather, tp-comm-overlap on"
    told = case({**row, "notes": notes}).stack
    assert (told.overlap_tp, told.overlap_dp) == (2, 2)


@pytest.mark.parametrize(("gpu", "precision", "fits"), [("A100", "fp8", False), ("H100", "FP8", True),
                                                        ("H100", "nvfp4", False), ("B200", "nvfp4", True)])  # fmt: skip
def test_a_precision_that_the_gpu_does_not_multiply_is_refused(gpu: str, precision: str, fits: bool) -> None:
    (row,) = predict_rows([{**ROW, "gpu": gpu, "precision": precision}], shipped())
    assert (f"{gpu} has no products of" in row["pred_note"]) is not fits
