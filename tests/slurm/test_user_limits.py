"""Nodes that accounting allows, and how busy GPUs are: what sacctmgr and nvidia-smi print, read without trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import Completed
from resilio_hpc.slurm.client.gpu_utilisation import NO_ANSWER_S, GpuLooks, parse_utilisation
from resilio_hpc.slurm.client.model import Job
from resilio_hpc.slurm.client.runner import Runner
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.client.states import job_state
from resilio_hpc.slurm.client.user_limits import NodeLimit, fetch_limits, nodes_left, parse_associations, parse_qos

MINE = Job(1, job_state(["RUNNING"]), user="bob", account="physics", qos="normal", node_count=3)


def test_associations_of_the_account_and_of_the_user_in_it() -> None:
    text = "physics||node=8\nphysics|bob|cpu=100,gres/gpu=32,node=4\nphysics|eve|node=1\nother|bob|node=1\ntorn|\n"
    assert parse_associations(text, "bob", "physics") == (
        NodeLimit(8, None, account="physics"), NodeLimit(4, 32, "bob", "physics"),
    )  # fmt: skip
    assert parse_associations("physics|bob|\n", "bob", "physics") == ()


def test_limits_of_a_qos() -> None:
    text = "low|node=1|node=1|\nnormal|node=100|gres/gpu=16|billing=5,node=20\n"
    assert parse_qos(text, "bob", "physics", "normal") == (
        NodeLimit(100, None, qos="normal"), NodeLimit(None, 16, "bob", qos="normal"),
        NodeLimit(20, None, account="physics", qos="normal"),
    )  # fmt: skip
    assert parse_qos(text, "bob", "physics", "gone") == parse_qos("", "", "", "") == ()


def test_limits_without_an_answer_are_not_none() -> None:
    def without_accounting(told: str) -> Runner:
        def run(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
            if told and argv[0] == "scontrol":
                return Completed(tuple(argv), 0, told, "")
            raise CommandError(argv, 1, stderr="sacctmgr: error: Problem talking to the database: Connection refused")

        return run

    for told in ("", "ClusterName = dev\n", "AccountingStorageEnforce = associations,limits\n"):
        with pytest.raises(Unanswered):
            fetch_limits("bob", "physics", "normal", without_accounting(told))
    assert fetch_limits("bob", "physics", "normal", without_accounting("AccountingStorageEnforce = none\n")) == ()


def test_what_is_left_is_the_least_of_all_limits() -> None:
    others = [replace(MINE, user="eve", node_count=4), replace(MINE, state=job_state(["PENDING"]), node_count=50)]
    limits = [NodeLimit(9, None, account="physics"), NodeLimit(None, 32, "bob")]
    assert nodes_left(limits, [MINE, *others], 8) == 1
    assert nodes_left(limits[:1], [MINE, *others], 8) == 2
    assert nodes_left([NodeLimit(1)], [MINE], 8) == 0
    assert nodes_left(limits[1:], [MINE], 0) is nodes_left([], [MINE], 8) is None


@pytest.mark.parametrize(
    ("text", "share"),
    [("97\n 3 \n", 0.5), ("0\n0\n", 0.0), ("[N/A]\n", None), ("", None), ("no devices", None), ("500\n", None)],
)
def test_how_busy_gpus_are(text: str, share: float | None) -> None:
    assert parse_utilisation(text) == share


def test_gpus_are_as_busy_as_in_the_busiest_of_the_last_looks_and_no_step_is_wasted() -> None:
    answers: list[float | None] = [0.9, 0.1, 0.1, 0.2, None]
    asked: list[str] = []

    def fetch(job: str) -> float | None:
        asked.append(job)
        return answers.pop(0)

    looks = GpuLooks(60.0, fetch)
    assert [looks.busiest("7", now) for now in (0.0, 59.0)] == [0.9, 0.9]
    assert asked == ["7"]
    assert [looks.busiest("7", 60.0 * count) for count in (1, 2, 3)] == [0.9, 0.9, 0.2]
    assert looks.busiest("7", 240.0) is None
    assert looks.busiest("7", 240.0 + NO_ANSWER_S - 1) is None
    assert not answers
    answers.append(0.5)
    assert looks.busiest("8", 240.0) == 0.5  # another job of the chain
