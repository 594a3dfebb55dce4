"""Which run a word names: a path, a directory's name, an id and its beginning, a job; and what is said of others."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.slurm.runs import run_names
from resilio_hpc.slurm.runs.of_job import JobsRuns
from resilio_hpc.slurm.runs.places import identify, run_paths


def slurm_is_away(job: str) -> JobsRuns:
    return JobsRuns(False)


def slurm_is_not_asked(job: str) -> JobsRuns:
    raise AssertionError(f"Slurm was asked for {job}")


def a_run(path: Path, run_id: str, *jobs: str, age_s: float = 0.0) -> Path:
    """A run directory as a launch makes it, with a given id, whose jobs have each begun."""
    run_directory.open_run(path)
    made = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**made, "run_id": run_id, "created": time.time() - age_s}))
    for job in jobs:
        run_directory.expect_verdict(path, job)
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    runs = tmp_path / "resilio-runs"
    a_run(runs / "4711", "0dbbcdbf63de", "4711", age_s=300.0)
    a_run(runs / "4711-2", "0dffcdbf63de", "4711", age_s=200.0)
    a_run(runs / "large", "87b091a920e5", "4720", "4721", age_s=100.0)
    a_run(tmp_path / "small", "47cc00000000", "local-7-8", age_s=50.0)
    return tmp_path


def named(word: str, here: Path, ask: object = slurm_is_not_asked, **environment: str) -> str:
    path = run_names.run_path(word, environment, here, ask)  # type: ignore[arg-type]
    return str(path.relative_to(here))


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("4711", "resilio-runs/4711"),  # the directory's name, though the job has two runs
        ("4711-2", "resilio-runs/4711-2"),
        ("4720", "resilio-runs/large"),
        ("4721", "resilio-runs/large"),
        ("local-7-8", "small"),
        ("0dbbcdbf63de", "resilio-runs/4711"),
        ("0dbb", "resilio-runs/4711"),
        ("0DBB", "resilio-runs/4711"),
        ("8", "resilio-runs/large"),
        ("small", "small"),
        ("resilio-runs/large", "resilio-runs/large"),
        ("nowhere/at/all", "nowhere/at/all"),  # a path: each command says what is wrong with it
        (".", "."),
    ],
)
def test_a_word_names_one_run(word: str, path: str, here: Path) -> None:
    assert named(word, here, slurm_is_away) == path


def test_the_next_job_of_a_chain_and_a_joiner_name_the_run(here: Path) -> None:
    run = here / "resilio-runs" / "large"
    (run / "chain.json").write_text(json.dumps({"v": 1, "links": [{"number": 1, "job": "4720"},
                                                                    {"number": 2, "job": "4799"}]}))  # fmt: skip
    (run / "joiners").mkdir()
    (run / "joiners" / "4750.out").touch()
    assert named("4799", here) == named("4750", here) == "resilio-runs/large"


def test_two_runs_are_named_newest_first(here: Path) -> None:
    with pytest.raises(UsageError) as refused:
        named("0d", here)
    assert str(refused.value) == (
        f"the ids of 2 runs begin with '0d': 0dffcdbf63de ({here}/resilio-runs/4711-2), "
        f"0dbbcdbf63de ({here}/resilio-runs/4711)"
    )


def test_an_unknown_word_is_told_the_nearest(here: Path) -> None:
    with pytest.raises(UsageError) as refused:
        named("larg", here)
    assert str(refused.value).startswith(
        f"larg does not exist, nor a run of that name; runs here: 87b091a920e5 ({here}/resilio-runs/large), "
    )
    for number in range(9):
        a_run(here / "resilio-runs" / f"more-{number}", f"aaaa0000000{number}")
    with pytest.raises(UsageError) as refused:
        named("zzz", here)
    assert str(refused.value).count("(") == run_names.MOST_NAMED and str(refused.value).endswith("and 8 more")


def test_a_file_is_no_run(here: Path) -> None:
    (here / "train.py").touch()
    with pytest.raises(UsageError, match=r"^train\.py is not a directory; runs here: "):
        named("train.py", here)


def test_slurm_is_asked_for_a_job_that_is_not_known_here(here: Path, tmp_path: Path) -> None:
    far = a_run(tmp_path / "far" / "resilio-runs" / "99", "cccc00000000")
    asked: list[str] = []

    def slurm(job: str) -> JobsRuns:
        asked.append(job)
        return JobsRuns(True, (tmp_path / "nothing", far))

    assert run_names.run_path("99", {}, here, slurm) == far
    assert asked == ["99"]
    with pytest.raises(UsageError, match=r"^47 is a job, and the beginning of an id: cccc.*, 47cc"):
        run_names.run_path("47", {}, here, lambda job: JobsRuns(True, (far,)))
    assert named("47", here, slurm_is_away) == "small"
    with pytest.raises(UsageError, match="job 98 does not tell its run directory; runs here: "):
        run_names.run_path("98", {}, here, lambda job: JobsRuns(True))
    with pytest.raises(UsageError, match="Slurm does not answer, or knows no job 98 any more; runs here: "):
        named("98", here, slurm_is_away)


def test_the_same_run_from_two_sides_is_one(here: Path) -> None:
    (here / "resilio-runs" / "again").symlink_to(here / "small")
    assert named("47cc", here) in ("resilio-runs/again", "small")
    assert named("local-7-8", here, RESILIO_RUN_DIR=str(here / "small")) == "small"
    assert len(run_paths([here / "resilio-runs", here])) == 4


def test_an_array_keeps_its_runs_one_folder_deeper(here: Path) -> None:
    a_run(here / "resilio-runs" / "800" / "3", "dddd00000000", "803")
    assert named("dddd", here) == named("803", here) == "resilio-runs/800/3"


def test_damaged_runs_are_named_by_their_directory_alone(here: Path) -> None:
    damaged = a_run(here / "resilio-runs" / "5000", "eeee00000000")
    (damaged / "run.json").write_text('{"run_id": "ee')
    assert identify(damaged).problem == "its run.json is damaged"
    os.chdir(here)
    assert named("5000", here) == "resilio-runs/5000"  # status then says what is wrong
    with pytest.raises(UsageError, match="nor a run of that name"):
        named("eeee", here)


# -- without a word ----------------------------------------------------------------------------------------------------


def test_the_newest_run_is_meant(here: Path) -> None:
    assert run_names.newest({}, here).path == here / "small"
    assert run_names.newest({"RESILIO_RUN_DIR": str(here / "resilio-runs" / "large")}, here).run_id == "87b091a920e5"
    assert run_names.newest({}, here / "resilio-runs" / "4711").run_id == "0dbbcdbf63de"
    (here / "small" / "status.json").write_text("{}")
    assert run_names.newest({}, here).path == here / "small"  # it alone is under way


def test_nothing_is_guessed_while_another_run_is_under_way(here: Path) -> None:
    status = here / "resilio-runs" / "large" / "status.json"
    status.write_text("{}")
    with pytest.raises(UsageError, match=r"^which run\? The newest .* under way: 47cc00000000 .*, 87b091a920e5 "):
        run_names.newest({}, here)
    os.utime(status, (time.time() - 100, time.time() - 100))  # it is silent since
    assert run_names.newest({}, here).path == here / "small"


def test_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no run here \(in .*, or resilio-runs in it\): name one$"):
        run_names.newest({}, tmp_path)
