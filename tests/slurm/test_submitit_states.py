"""The state of a chain of jobs in one word, and what Slurm's commands say of its jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.slurm.submit.submitit_states import (
    JobStates,
    RunEnd,
    chain_state,
    jobs_of,
    living,
    parse,
    read_verdict,
)

STATES = [
    # states of the jobs, verdict, chained → word
    (["PENDING"], "", True, "PENDING"),
    (["RUNNING", "PENDING"], "", True, "RUNNING"),
    (["RUNNING", "PENDING"], "completed", True, "COMPLETED"),
    (["TIMEOUT", "PENDING"], "", True, "PENDING"),
    (["TIMEOUT", "PENDING"], "time_limit", True, "PENDING"),
    (["COMPLETED", "RUNNING", "PENDING"], "time_limit", True, "RUNNING"),
    (["FAILED", "RUNNING"], "terminated", True, "RUNNING"),
    (["COMPLETED", "CANCELLED"], "completed", True, "COMPLETED"),
    (["CANCELLED", "CANCELLED"], "", True, "CANCELLED"),
    (["CANCELLED", "CANCELLED"], "terminated", True, "CANCELLED"),
    (["NODE_FAIL", "CANCELLED"], "", True, "NODE_FAIL"),
    (["UNKNOWN"], "", True, "UNKNOWN"),
    (["COMPLETED", "UNKNOWN"], "time_limit", True, "UNKNOWN"),
    (["UNKNOWN", "UNKNOWN"], "completed", True, "COMPLETED"),
    (["UNKNOWN", "FAILED"], "", True, "UNKNOWN"),
    (["PURGED", "PURGED"], "", True, "PURGED"),
    (["RUNNING", "PENDING"], "no_progress", True, "FAILED"),
    (["COMPLETED"], "time_limit", False, "TIMEOUT"),
    (["FAILED"], "terminated", False, "CANCELLED"),
    (["PREEMPTED", "PENDING"], "", True, "PREEMPTED"),
    ([], "", False, "UNKNOWN"),
]


@pytest.mark.parametrize(("states", "verdict", "chained", "word"), STATES)
def test_one_word_for_a_chain(states: list[str], verdict: str, chained: bool, word: str) -> None:
    assert chain_state(states, verdict, chained) == word


def test_what_squeue_and_sacct_say() -> None:
    text = "12|RUNNING|n[1-2]\n13_4|PENDING|\n14|CANCELLED by 0|None assigned\n15|OUT_OF_ME+|n1\nnothing\n|x|\n"
    states, nodes = parse(text)
    assert states == {"12": "RUNNING", "13_4": "PENDING", "14": "CANCELLED", "15": "OUT_OF_ME"}
    assert nodes["12"] == "n[1-2]"


def test_a_cancel_goes_to_those_that_may_live() -> None:
    states = {"1": "TIMEOUT", "2": "RUNNING", "3": "PENDING"}
    assert living(["1", "2", "3", "4"], JobStates(states, {}, sure=True)) == ["2", "3"]
    assert living(["1", "2", "3", "4"], JobStates(states, {}, sure=False)) == ["2", "3", "4"]


def test_a_run_directory_tells_jobs_and_verdict(tmp_path: Path) -> None:
    assert (jobs_of("7", tmp_path), read_verdict(tmp_path)) == (["7"], RunEnd())
    links = [{"number": 1, "job": "7"}, {"number": 2, "job": "8"}]
    (tmp_path / "chain.json").write_text(json.dumps({"v": 1, "links": links}))
    first = {"rank": 1, "node": "n2", "message": "ValueError: x"}
    told = {"verdict": "no_progress", "reason": "2 restarts", "first_failure": first}
    (tmp_path / "verdict.json").write_text(json.dumps(told))
    assert jobs_of("7", tmp_path) == ["7", "8"]
    assert read_verdict(tmp_path) == RunEnd("no_progress", "2 restarts", "rank 1 on n2: ValueError: x")
    (tmp_path / "verdict.json").write_text('["torn')
    assert read_verdict(tmp_path) == RunEnd()
