"""``resilio plan`` in terminals of 80 and 60 columns, and words that it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.autoparallel.base.known_words import (
    FRAMEWORKS,
    PRECISIONS,
    known_framework,
    known_interconnect,
    known_precision,
    misspelt_framework,
    misspelt_precision,
)
from resilio_hpc.autoparallel.base.layout import parse_layout
from resilio_hpc.cli.main import main
from resilio_hpc.core.errors import UsageError
from tests.support.pseudo_terminal import shown, too_long

GPT3 = ("plan", "gpt3-175b", "--gpus", "1024", "--gpu", "a100", "--global-batch", "1536")
LAYOUT = "tp8-pp8-dp16-mb4-vpp12-sp-zero1"
COSTLY = ("plan", "llama3-70b", "--inventory", "cluster.toml", "--gpus", "64-128", "--global-batch", "1024",
          "--rank", "finish", "--tokens", "1e11", "--mtbf", "6000", "--top", "3")  # fmt: skip
EXPLAIN = ("plan", "explain", "tp8-pp4-dp4-mb1-vpp2-sp-zero1-recompute-selective", "--model", "gpt3-175b", "--gpu",
           "a100", "--global-batch", "64")  # fmt: skip
STAGES = ("plan", "model", "gpt3-175b", "--stages", "8", "--band", "0.05")
PRESETS = ("plan", "model", "--list")
INVENTORY = """
[[pool]]
partition = "gpu"
gpu = "h100"
gpus_per_node = 8
nodes = "g[1-16]"
idle = "g[1-8]"

[[pool]]
partition = "a-partition-with-a-long-name"
gpu = "a100"
gpus_per_node = 4
nodes = 32
preemptible = true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.toml").write_text(INVENTORY)
    return tmp_path


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("command", [GPT3, COSTLY, EXPLAIN, STAGES, PRESETS])
def test_no_line_is_broken_by_the_terminal(folder: Path, command: tuple[str, ...], columns: int) -> None:
    lines = shown(columns, *command, cwd=folder)
    assert len(lines) > 5
    assert too_long(lines, columns) == []


@pytest.mark.parametrize(
    ("columns", "names", "left_out"),
    [
        (80, "layout iteration tok/s/GPU TFLOP/s MFU GiB", "bubble, comm."),
        (60, "iteration tok/s/GPU TFLOP/s MFU GiB", "bubble, comm."),
    ],
)
def test_a_narrow_table_keeps_what_matters_most(columns: int, names: str, left_out: str) -> None:
    words = (*GPT3, "--recompute", "none")
    lines = shown(columns, *words)
    head = next(number for number, line in enumerate(lines) if line.split()[:1] == names.split()[:1])
    assert lines[head].split() == names.split()
    rows = [line for line in lines[head + 2 :] if "/79" in line]
    assert len(rows) == 5  # of one shape, the five best layouts
    assert lines[head + 2].startswith(LAYOUT)
    assert any(line.startswith("left out at this width") and left_out in line for line in lines)


def test_costs_stay_when_room_is_short_and_a_long_name_is_cut_with_a_mark(folder: Path) -> None:
    lines = shown(60, *COSTLY, cwd=folder)
    head = next(number for number, line in enumerate(lines) if line.startswith("  shape"))
    assert {"shape", "start", "iteration", "GiB", "finish"} <= set(lines[head].split())
    assert lines[head + 3].startswith("  8 x 8") and lines[head + 3].endswith(" d")
    assert "…" in lines[head + 5] and lines[head + 5].endswith(" d")
    assert [lines[row].startswith("tp") for row in (head + 2, head + 4, head + 6)] == [True] * 3


@pytest.mark.parametrize(("columns", "words"), [(160, ()), (80, ("--wide",))])
def test_with_room_or_on_demand_all_columns_are_in_one_row(columns: int, words: tuple[str, ...]) -> None:
    lines = shown(columns, *GPT3, *words)
    row = next(line for line in lines if line.startswith(f"{LAYOUT} "))
    assert "s (" in row and row.count("%") == 3 and "/79" in row


def test_a_start_is_said_only_where_a_cluster_was_asked(folder: Path) -> None:
    assert not any(" start " in line for line in shown(160, *GPT3))
    assert any(" start " in line for line in shown(160, *COSTLY, cwd=folder))


def test_torchtitan_has_the_names_of_its_own_sharding_and_they_are_read() -> None:
    words = ("plan", "llama3-8b", "--gpus", "64", "--gpu", "h100", "--global-batch", "128", "--framework", "torchtitan",
             "--zero", "3", "--wide")  # fmt: skip
    lines = shown(160, *words)
    names = [line.split()[0] for line in lines if line.startswith("tp")]
    assert any(name.endswith("-fsdp") for name in names) and any("-hsdp" in name for name in names)
    for name in names:
        assert parse_layout(name, 128).zero == 3


def test_the_pipeline_of_an_explained_layout_fits(folder: Path) -> None:
    lines = shown(60, *EXPLAIN)
    drawn = [line for line in lines if line[:6].strip().isdigit() and "·" in line]
    assert len(drawn) == 4 and {len(line) for line in drawn} == {60}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--framework", "Megatrn"), "--framework 'Megatrn' is not known: did you mean Megatron-Core? known are Mega"),
        (("--framework", "nothing like it"), "--framework 'nothing like it' is not known: known are Megatron-Core"),
        (("--framework", ""), "--framework '' is not known: known are"),
        (("--precision", "bf61"), "--precision 'bf61' is not known: did you mean bf16? known are bf16, fp16, fp32"),
        (("--interconnect", "fast"), "--interconnect 'fast' names no rate: it is written 8x400Gb/s, 400Gb/s per GPU"),
        (("--interconnect", "8x400GB/s"), "did you mean 8x3200Gb/s?"),
        (("--interconnect", "4 x HDR 200"), "did you mean 4x200Gb/s?"),
        (("--interconnect", "400Gbps per gpu"), "did you mean 400Gb/s per GPU?"),
        (("--gpu", "h10"), "unknown GPU 'h10': did you mean H100"),
        (("--recompute", "ful"), "--recompute: 'ful' is not known: did you mean full? known are none, selective"),
        (("--rank", "tim"), "--rank: 'tim' is not known: did you mean time?"),
        (("--emit", "\x1b[31mmegatrn"), "did you mean megatron?"),
        (("--headroom", "110%"), "--headroom '110%': a part of the memory such as 10%"),
        (("--precision", "fp4"), "precision fp4: H100 has no products of 4 bits"),
        (("--zero", "7"), "--zero: 7 is not known: known are 0, 1, 2, 3"),
    ],
)
def test_a_search_refuses_unknown_words(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    given = ["plan", "llama3-8b", "--gpus", "16", "--gpu", "h100", "--global-batch", "96", *words]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1 and "\x1b" not in err


@pytest.mark.parametrize("words", [("--framework", "torchtitn"), ("--precision", "fp61"), ("--interconnect", "IB")])
def test_an_explanation_refuses_them_too(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    given = ["plan", "explain", "tp8-pp2", "--model", "llama3-8b", "--gpu", "h100", "--global-batch", "64", *words]
    assert main(given) == 2
    assert words[0] in capsys.readouterr().err


TABLE = "layers,hidden,heads,seq,global_batch,gpu,num_gpus,tp,pp,precision,framework\n"
ROW = "32,4096,32,2048,64,h100,8,2,1,{},{}\n"


def test_a_table_names_misspelt_words_of_its_rows(tmp_path: Path) -> None:
    rows = [("bf61", "Megatron-Core"), ("bf16", "Megatrn-Core"), ("amp_bf16 MP=DEFAULT", "MegaScale"), ("", "")]
    (tmp_path / "in.csv").write_text(TABLE + "".join(ROW.format(*row) for row in rows))
    assert main(["plan", "predict", "--rows", str(tmp_path / "in.csv"), "--out", str(tmp_path / "out.csv")]) == 1
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert "precision = 'bf61' is not known: did you mean bf16?" in lines[1]
    assert "framework = 'megatrn-core' is not known: did you mean Megatron-Core?" in lines[2]
    assert "did you mean" not in lines[3] + lines[4]


def test_calibration_refuses_a_table_of_misspelt_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(ROW.replace("\n", ",1.5\n").format("fp61", "NeMo") for _ in range(3))
    (tmp_path / "in.csv").write_text(TABLE.replace("\n", ",iter_time_s\n") + rows)
    assert main(["plan", "calibrate", "--rows", str(tmp_path / "in.csv")]) == 2
    assert "did you mean fp16?" in capsys.readouterr().err


def test_known_words_in_any_spelling() -> None:
    today = {"Megatron-LM": "Megatron-Core"}  # whose core that is
    assert [known_framework(name) for name in FRAMEWORKS] == [today.get(name, name) for name in FRAMEWORKS]
    assert [known_precision(name) for name in PRECISIONS] == list(PRECISIONS)
    for text, name in {
        "megatron_core": "Megatron-Core", "MCORE": "Megatron-Core", "Torchtitan+compile+AsyncTP":
        "torchtitan+compile+AsyncTP", "26.06 NeMo Container": "26.06 NeMo Container", "fsdp2": "FSDP",
    }.items():  # fmt: skip
        assert known_framework(text) == name
    assert known_precision("BFloat16") == "bf16"
    for text in ("", "8x400Gb/s", "8 x HDR 200 Gb/s", "400Gb/s RDMA per GPU", "1600gb/s per node"):
        assert known_interconnect(text) == text
    with pytest.raises(UsageError):
        known_framework("26.06 NeMo Containr")


@pytest.mark.parametrize(
    "cell",
    ["", "Meta internal", "MegaScale", "NeMo / Megatron-Core", "Megatron-DeepSpeed (stated)", "torchtitan+compile"],
)
def test_tables_may_name_other_software(cell: str) -> None:
    assert misspelt_framework(cell) == ""


@pytest.mark.parametrize("cell", ["", "fp16/bf16 NS", "amp_fp8 MP=DEFAULT", "fp8 (float8 linear)", "NVFP4", "mixed"])
def test_tables_may_say_more_of_the_precision(cell: str) -> None:
    assert misspelt_precision(cell) == ""
