"""A choice as a job of ``resilio plan --submit``: what sbatch gets, and what is told of mistakes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from resilio_hpc.autoparallel.base.layout import Layout, Recompute
from resilio_hpc.autoparallel.base.shapes import Shape
from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.cli.main import main
from resilio_hpc.cli.plan.job import filled, job_of
from resilio_hpc.cli.plan.submit import add_options, check_options, patience_of
from resilio_hpc.core.errors import UsageError

SEARCH = ("llama2-7b", "--gpus", "16", "--gpu", "h100", "--global-batch", "256")


def choice(nodes: int, per_node: int = 8, gpu: str = "h100") -> Choice:
    layout = Layout(
        tp=4, dp=nodes * per_node // 4, micro_batch=2, global_batch=64, zero=1, recompute=Recompute.SELECTIVE
    )
    return Choice(Offer(Shape(nodes, per_node), "big", gpu), layout, 1.0, 0.9, 1.1, 0.4, 0.0, 0.1, 1e9, 2e9)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a training script."""
    folder = tmp_path / "it's a run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("pass\n")
    return folder


def test_a_training_script_is_launched_with_the_layout_and_what_a_resize_changes_is_left_to_the_launcher(
    work: Path,
) -> None:
    job = job_of("train.py", ["time=1:00:00"], ["--tp", "{tp}", "--mb={micro_batch}"], {"HOME": "/h"})(choice(2))
    assert {"--nodes=2", "--gpus-per-node=h100:8", "--partition=big", "--time=1:00:00"} <= set(job.arguments)
    assert "--layout tp=4,pp=1 --fill-arguments train.py --tp '{tp}' --mb=2" in job.script
    assert re.search(r"^RANKS_PER_NODE=8\b", job.script, re.MULTILINE)
    assert {"RESILIO_TP": "4", "RESILIO_DP": "4", "RESILIO_ZERO": "1"}.items() <= job.environment.items()


@pytest.mark.parametrize(
    ("template", "values", "environment", "nodes"),
    [("spares", [], {}, 3), ("spares", ["spares=2"], {}, 4), ("multi-node", [], {}, 2), ("chained", [], {}, 3),
     ("spares", [], {"SPARES": "3"}, 5)],
)  # fmt: skip
def test_spare_nodes_come_on_top_of_the_choice(
    work: Path, template: str, values: list[str], environment: dict[str, str], nodes: int
) -> None:
    job = job_of(template, values, ["train.py"], environment)(choice(2))
    assert f"--nodes={nodes}" in job.arguments


def test_a_script_that_asks_by_gres_gets_its_number_there(work: Path) -> None:
    (work / "job.sh").write_text('#!/bin/bash\n#SBATCH --gres=gpu:1,shard:2\nsrun train "$@"\n')
    job = job_of("./job.sh", [], ["--tp={tp}", "{recompute}"], {})(choice(2))
    assert "--gres=gpu:h100:8,shard:2" in job.arguments
    assert not any(word.startswith("--gpus-per-node") for word in job.arguments)
    assert "--tp=4 selective" in job.script


def test_words_in_braces_become_the_choices_numbers() -> None:
    words = ("{tp}", "{pp}x{dp}", "{zero}", "{accumulation}", "{nodes}", "{ranks_per_node}", "{world_size}")
    assert filled(words, choice(2)) == ("4", "1x4", "1", "8", "2", "8", "16")
    with pytest.raises(UsageError, match=r"\{tensor\}"):
        filled(("{tensor}",), choice(2))


@pytest.mark.parametrize(
    ("value", "told"),
    [("nodes=3", "nodes is chosen by the planner"), ("gpus-per-node=1", "gpus_per_node is chosen"),
     ("gres=gpu:4", "gres is chosen"), ("gpus=4", "gpus is chosen"), ("partition=p", "partition is chosen"),
     ("time", "KEY=VALUE")],
)  # fmt: skip
def test_what_the_planner_chooses_cannot_be_set(value: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        job_of("train.py", [value], [], {})


def test_a_job_without_its_environment_would_not_find_its_layout(work: Path) -> None:
    (work / "job.sh").write_text("#!/bin/bash\n#SBATCH --export=NONE\nsrun train\n")
    with pytest.raises(UsageError, match="RESILIO_TP … would not reach the job"):
        job_of("./job.sh", [], [], {})
    with pytest.raises(UsageError, match="SBATCH_EXPORT=PATH"):
        job_of("train.py", [], [], {"SBATCH_EXPORT": "PATH"})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--max-wait", "60"), "--max-wait goes with --submit SCRIPT"),
        (("--dry-run",), "--dry-run goes with --submit SCRIPT"),
        (("--submit", "train.py", "--emit", "env"), "one of --submit and --emit"),
        (("--submit", "train.py", "--max-wait", "-1"), "--max-wait -1: seconds, 0 or more"),
        (("--submit", "train.py", "--settle", "inf"), "--settle inf"),
        (("--submit", "nowhere.sh"), "nowhere.sh"),
    ],
)
def test_mistakes_are_told_before_slurm_is_asked(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # there is no sbatch
    assert main(["plan", *SEARCH, *words, "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and told in said.err and said.err.count("\n") == 1


def test_patience_is_the_evaluators_where_nothing_is_said() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(["--submit", "train.py", "--max-wait", "60"])
    options.emit = None
    check_options(options)
    assert (patience_of(options).max_wait_s, patience_of(options).settle_s) == (60.0, 60.0)
