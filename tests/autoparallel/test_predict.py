"""Tables of layouts: what is understood, what is filled in, and what a hostile table gets for an answer."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from resilio_hpc.autoparallel.base.efficiency import read as read_calibration
from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import machine
from resilio_hpc.autoparallel.base.layout import Recompute
from resilio_hpc.autoparallel.measure.nearby import read as read_nearby
from resilio_hpc.autoparallel.measure.predict import COLUMNS, predict_rows, read
from resilio_hpc.autoparallel.measure.rows import case
from resilio_hpc.cli.plan import calibrate, predict
from resilio_hpc.core.errors import UsageError

ROW = {
    "id": "x-1", "model": "GPT-3 175B", "layers": "96", "hidden": "12288", "heads": "96", "vocab": "51200",
    "seq": "2048", "global_batch": "1536", "micro_batch": "1", "gpu": "A100-SXM-80GB", "num_gpus": "384", "tp": "8",
    "pp": "12", "dp": "4", "recompute": "full", "precision": "fp16", "framework": "Megatron-LM 2021",
    "interconnect": "8x NVLink/NVSwitch; 8x200Gb/s HDR IB per node",
}  # fmt: skip


def predicted(**changes: str) -> dict[str, str]:
    return predict_rows([{**ROW, **changes}], shipped())[0]


def test_a_row_gets_time_band_memory_and_flops() -> None:
    row = predicted()
    low, time, high = (float(row[f"pred_iter{part}_s"]) for part in ("_low", "_time", "_high"))
    assert low < time < high and 60 < time < 100  # measured: 76.8 s
    assert 80 < float(row["pred_tflops_per_gpu"]) < 160
    assert row["pred_fits"] == "1" and row["id"] == "x-1"


def test_defaults_that_were_taken_are_said() -> None:
    note = predicted(vocab="", micro_batch="not stated", kv_heads="NS")["pred_note"]
    assert "vocab=51200" in note and "micro_batch=" in note and "kv_heads=96" in note


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layers": ""}, "layers is empty"),
        ({"hidden": "wide"}, "hidden = 'wide' is no number"),
        ({"hidden": "-5"}, "hidden = '-5' is no whole number"),
        ({"seq": "nan"}, "seq = 'nan'"),
        ({"seq": "inf"}, "seq = 'inf'"),
        ({"micro_batch": "1.5"}, "micro_batch = '1.5'"),
        ({"global_batch": "1e300"}, "global_batch = '1e300'"),
        ({"gpu": "abacus"}, "unknown GPU 'abacus'"),
        ({"dp": "5"}, "num_gpus = 384"),
        ({"num_gpus": "", "dp": ""}, "both empty"),
        ({"pp": "99", "dp": "1", "num_gpus": "792"}, "the model has 96 layers"),
        ({"tp": "128", "pp": "3", "dp": "1"}, "tp = 128"),
        ({"layers": "9" * 400}, "layers = '9999"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(changes: dict[str, str], why: str) -> None:
    row = predicted(**changes)
    assert why in row["pred_note"] and len(row["pred_note"]) < 300
    assert row["pred_iter_time_s"] == row["pred_memory_gb"] == row["pred_fits"] == ""


def test_one_bad_row_does_not_spoil_the_others() -> None:
    rows = predict_rows([ROW, {**ROW, "gpu": ""}, ROW], shipped())
    assert [bool(row["pred_iter_time_s"]) for row in rows] == [True, False, True]
    assert rows[0]["pred_iter_time_s"] == rows[2]["pred_iter_time_s"]


def test_open_recomputation_is_as_little_as_fits() -> None:
    small = {**ROW, "recompute": "", "layers": "12", "hidden": "1024", "heads": "16", "pp": "1", "tp": "1", "dp": "8",
             "num_gpus": "8"}  # fmt: skip
    large = {**ROW, "recompute": "", "pp": "6", "dp": "8", "micro_batch": "4"}
    kinds = [found.layout.recompute for found in read([small, large]).cases]
    assert kinds[0] == Recompute.NONE and kinds[1] != Recompute.NONE


@pytest.mark.parametrize(
    ("text", "gbytes"),
    [
        ("8x NVLink/NVSwitch; 8x200Gb/s HDR IB per node (Selene)", 200),
        ("NVLink; 4x OmniPath 100Gb/s per node", 20),  # what NCCL gets of 50
        ("NVLink; 4x InfiniBand 100Gb/s per node", 50),
        ("NVLink; inter 800Gb/s per node (4 IB HCAs)", 100),
        ("NVLink; 400Gb/s RDMA per GPU", 400),
        ("NVLink; inter-node NS", 200),
        ("", 200),
    ],
)
def test_the_network_is_read_from_the_text(text: str, gbytes: float) -> None:
    assert case({**ROW, "interconnect": text}).machine.nic_gbytes_s == gbytes


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("FSDP FULL_SHARD (ZeRO-3)", 3),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", 2),
        ("distributed optimizer", 1),
        ("0", 0),
        ("", 0),
    ],
)
def test_sharding_is_read_from_the_text(text: str, zero: int) -> None:
    assert case({**ROW, "zero": text}).layout.zero == zero


@pytest.mark.parametrize(
    ("framework", "source", "precision", "fused"),
    [
        ("NeMo / Megatron-Core", "performance summary 26.06.01 NeMo Container", "MXFP8", True),
        ("NeMo / Megatron-Core", "performance summary 26.04 NeMo Container", "MXFP8", False),
        ("NeMo / Megatron-Core, 26.08 NeMo Container", "", "fp8-mx", True),
        ("NeMo / Megatron-Core", "performance summary 26.08 NeMo Container", "BF16", False),
        ("NeMo / Megatron-Core", "", "MXFP8", False),
        ("torchtitan", "26.08 NeMo Container", "MXFP8", False),
    ],
)
def test_fused_experts_come_with_the_release_that_has_them(
    framework: str, source: str, precision: str, fused: bool
) -> None:
    row = {**ROW, "framework": framework, "source": source, "precision": precision, "gpu": "GB200"}
    assert case(row).stack.fused_experts is fused


def test_experts_are_read_with_their_widths() -> None:
    mlp = "swiglu moe +1 shared, first 3 layers dense ffn 18432, MLA"
    model = case({**ROW, "mlp": mlp, "experts": "256", "topk": "8", "ffn": "2048"}).model
    assert (model.ffn, model.expert_ffn, model.shared_ffn, model.dense_layers) == (18432, 2048, 2048, 3)


def test_power_limits_are_part_of_the_gpu() -> None:
    assert machine("H100-96GB-HBM2e").power < machine("H100").power


def run(tmp_path: Path, text: str | bytes, *more: str) -> tuple[int, Path]:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    return predict.main(["--rows", str(source), "--out", str(out), *more]), out


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def as_csv(*rows: dict[str, str]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def test_the_command_keeps_columns_and_order(tmp_path: Path) -> None:
    code, out = run(tmp_path, as_csv({**ROW, "notes": "a, b\nc"}, {**ROW, "notes": '"', "layers": "x"}))
    rows = table_of(out)
    assert code == 1 and [row["notes"] for row in rows] == ["a, b\nc", '"']
    assert list(rows[0]) == [*ROW, "notes", *COLUMNS]


def test_predicting_twice_gives_the_same_table(tmp_path: Path) -> None:
    _, out = run(tmp_path, as_csv(ROW))
    first = out.read_text()
    assert run(tmp_path, first)[1].read_text() == first


def test_json_goes_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.csv"
    source.write_text(as_csv(ROW))
    assert predict.main(["--rows", str(source), "--json"]) == 0
    assert float(json.loads(capsys.readouterr().out)[0]["pred_iter_time_s"]) > 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no table of layouts"),
        ("a,b\n1,2\n", "no table of layouts"),
        (b"\xff\xfe\x00layers", "no UTF-8"),
        ("layers,hidden,layers\n1,2,3\n", "named twice"),
        ("layers,hidden\n" + '"' + "x" * 200_000 + '"\n', "no CSV"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str | bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        run(tmp_path, text)


def test_short_and_long_lines_are_rows_too(tmp_path: Path) -> None:
    code, out = run(tmp_path, "layers,hidden,seq,gpu,num_gpus\n12\n12,1024,1024,A100,8,too,many\n")
    rows = table_of(out)
    assert code == 1 and rows[0]["pred_note"] and rows[1]["pred_iter_time_s"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.csv"):
        predict.main(["--rows", str(tmp_path / "gone.csv")])


def test_a_calibration_changes_times_and_narrows_the_band(tmp_path: Path) -> None:
    calibration = tmp_path / "cluster.toml"
    calibration.write_text("gemm_ampere = 0.6\n")
    _, out = run(tmp_path, as_csv(ROW), "--calibration", str(calibration))
    (row,) = table_of(out)
    plain = predicted()
    assert float(row["pred_iter_time_s"]) > float(plain["pred_iter_time_s"])
    width = [float(r["pred_iter_high_s"]) / float(r["pred_iter_low_s"]) for r in (row, plain)]
    assert width[0] < width[1]


def test_calibration_learns_a_cluster_that_is_slower(tmp_path: Path) -> None:
    layouts = [
        {**ROW, "pp": str(pp), "dp": str(48 // pp), "micro_batch": str(mb)} for pp in (6, 12) for mb in (1, 2, 4)
    ]
    rows = predict_rows(layouts, replace(shipped(), gemm_ampere=0.65, nic=0.5))
    source, out = tmp_path / "measured.csv", tmp_path / "cluster.toml"
    source.write_text(as_csv(*({**row, "iter_time_s": row["pred_iter_time_s"], "status": "ok"} for row in rows)))
    assert calibrate.main(["--rows", str(source), "--out", str(out)]) == 0
    text = out.read_text()
    again = predict_rows(layouts, read_calibration(text), nearby=read_nearby(text))
    errors = [
        abs(float(b["pred_iter_time_s"]) / float(a["pred_iter_time_s"]) - 1) for a, b in zip(rows, again, strict=True)
    ]
    assert max(errors) < 0.03


def test_too_few_measurements_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "measured.csv"
    source.write_text(
        as_csv({**ROW, "iter_time_s": "nan", "status": "ok"}, {**ROW, "iter_time_s": "70", "status": "oom"})
    )
    with pytest.raises(UsageError, match="0 usable measurements"):
        calibrate.main(["--rows", str(source)])
