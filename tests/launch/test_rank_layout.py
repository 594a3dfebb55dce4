"""Tensor, pipeline and data parallel of a round, and how scripts are told: environment, and words in arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import parse
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.rank_layout import RankLayout, fill, layout_of, values_of
from resilio_hpc.launch.workers.rank_env import RankPlacement, rank_argv

VALUES = values_of(RankLayout(2, 3, 4), 3, 8)


def options(*words: str, nodes: str = "8") -> LaunchOptions:
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": nodes}
    return parse([*words], Caller(allocation, Path("/here"), 0.0, 11)).options


def test_what_is_left_is_data_parallel() -> None:
    assert layout_of((), 6) == RankLayout(1, 1, 6)
    assert layout_of(("tp=2,pp=3",), 12) == RankLayout(2, 3, 2)
    assert RankLayout(2, 3, 2).variables() == {"RESILIO_TP": "2", "RESILIO_PP": "3", "RESILIO_DP": "2"}


def test_a_row_for_this_number_of_ranks_goes_before_the_one_for_any() -> None:
    rows = ("tp=4", "16:pp=2,tp=8", "8:tp=1")
    assert [layout_of(rows, ranks) for ranks in (8, 12, 16)] == [
        RankLayout(1, 1, 8),
        RankLayout(4, 1, 3),
        RankLayout(8, 2, 1),
    ]


@pytest.mark.parametrize("row", ["tp=0", "dp=2", "tp=2,tp=2", "8", "tp", "tp=2,pp=2,tp=2", ":tp=2", "0:tp=2", ""])
def test_what_is_no_layout_is_told_before_anything_starts(row: str) -> None:
    with pytest.raises(UsageError, match=r"not of the form \[RANKS:\]tp=N,pp=N"):
        options("--layout", row, "train.py")


def test_two_layouts_for_one_number_are_refused() -> None:
    with pytest.raises(UsageError, match="another one for any number of ranks"):
        options("--layout", "tp=2", "--layout", "tp=4", "train.py")


def test_every_number_of_nodes_that_the_run_may_have_must_fit() -> None:
    words = ["--nproc-per-node", "4", "--layout", "tp=4,pp=2", "train.py"]
    with pytest.raises(UsageError, match=r"12 ranks cannot be divided into copies of tp=4 x pp=2"):
        options("--nnodes", "2:4", *words)
    assert options("--nnodes", "2:4", "--node-unit", "2", *words).layouts == ("tp=4,pp=2",)
    assert options("--nnodes", "2:4", "--layout", "12:tp=4", *words).layouts == ("12:tp=4", "tp=4,pp=2")


# -- arguments -------------------------------------------------------------------------------------------------------


def test_words_in_braces_become_numbers() -> None:
    arguments = ("--tensor-parallel", "{tp}", "--mesh={pp}x{dp}x{tp}", "{world_size}/{nodes}/{ranks_per_node}")
    assert fill(arguments, VALUES) == ("--tensor-parallel", "2", "--mesh=3x4x2", "24/3/8")


@pytest.mark.parametrize("text", ['{"tp": 2}', "{}", "{ tp }", "${tp}", "a{2,3}b", "{{", "{'tp': {'x': 1}}", "{1}"])
def test_other_braces_survive(text: str) -> None:
    assert fill((text,), VALUES) == (text,)


def test_doubled_braces_are_the_word_itself() -> None:
    assert fill(("{{tp}}", "{{tp}}={tp}", "{{anything}}"), VALUES) == ("{tp}", "{tp}=2", "{anything}")


def test_an_unknown_word_is_told_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"no \{tensor_parallel\}: .*\{\{tensor_parallel\}\} for the text"):
        options("--fill-arguments", "train.py", "--tp", "{tensor_parallel}")
    with pytest.raises(UsageError, match=r"did you mean \{world_size\}\?"):
        options("--fill-arguments", "train.py", "{worldsize}")


def test_without_the_flag_no_brace_is_touched() -> None:
    plain = options("train.py", "{tp}", "{anything}", "{{tp}}")
    assert rank_argv(plain, 0, RankPlacement(0, 1, 0, 1, 0, 1)) == ("train.py", "{tp}", "{anything}", "{{tp}}")


def test_arguments_follow_the_round() -> None:
    launch = options("--fill-arguments", "--layout", "tp=2", "--layout", "8:tp=4", "--nproc-per-node", "2", "--nnodes",
                     "1:4", "train.py", "--tp={tp}", "--dp={dp}", "--out=${local_rank}")  # fmt: skip
    seen = [rank_argv(launch, 1, RankPlacement(0, nodes, 1, 2, 1, nodes * 2))[1:] for nodes in (1, 3, 4)]
    assert seen == [
        ("--tp=2", "--dp=1", "--out=1"), ("--tp=2", "--dp=3", "--out=1"), ("--tp=4", "--dp=2", "--out=1"),
    ]  # fmt: skip
    assert rank_argv(launch, 0)[1:] == ("--tp={tp}", "--dp={dp}", "--out=0")  # a plan: no round yet
