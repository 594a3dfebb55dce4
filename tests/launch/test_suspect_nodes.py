"""Which failures of a run are a node's, and which are the program's, the user's or nobody's."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.launch.chain.suspect_nodes import suspect_nodes
from resilio_hpc.slurm.node_faults.policy import fault_policy

POLICY = fault_policy()


def launch(job: str = "7", mode: str = "batch") -> tuple[str, dict[str, Any]]:
    return "launch", {"job": job, "mode": mode, "nodes": ["n1", "n2"]}


def blamed(*events: tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
    made = [Event(1000.0 + at, "w", kind, fields) for at, (kind, fields) in enumerate(events)]
    return [(fault.node, fault.kind) for fault in suspect_nodes(made, "run1", "alpha")]


LOST = ("node_lost", {"node": "n2", "silent_s": 5.0})
FAILED: dict[str, Any] = {"node": "n1", "rank": 3, "local_rank": 1, "kind": "exit", "exit_code": 1}


def test_a_node_that_fell_silent_is_to_blame_from_its_last_word_on() -> None:
    (fault,) = suspect_nodes([Event(1000.0, "w", *launch()), Event(1010.0, "w", *LOST)], "run1", "alpha")
    assert (fault.node, fault.kind, fault.time, fault.run, fault.job, fault.cluster) == (
        "n2", "node-lost", 1005.0, "run1", "7", "alpha",
    )  # fmt: skip
    assert fault.evidence == "node n2 lost: silent for 5.00 s"


def test_what_a_test_of_nodes_found_is_to_blame_and_what_it_could_not_find_is_not() -> None:
    found = {"outcome": "found", "bad": ["n1"], "slow": ["n2"], "evidence": {"n2": "matrix products 1.8 times as long"}}
    assert blamed(launch(), ("tested", found)) == [("n1", "tested-bad"), ("n2", "tested-slow")]
    events = [Event(1.0, "w", *launch()), Event(2.0, "w", "tested", found)]
    assert [fault.evidence for fault in suspect_nodes(events, "run1", "alpha")] == [
        "bad in a test of nodes", "matrix products 1.8 times as long",
    ]  # fmt: skip
    assert blamed(launch(), ("tested", {"outcome": "failed", "why": "no result"})) == []
    assert blamed(launch(mode="local"), ("tested", found)) == []
    assert blamed(launch(), ("tested", {"bad": "n1", "slow": [3, None], "evidence": []})) == []


def test_a_node_that_came_back_in_the_same_job_was_only_silent() -> None:
    back = ("node_returned", {"node": "n2", "losses": 1})
    assert blamed(launch(), LOST, back) == [("n2", "node-silent")]
    assert blamed(launch(), LOST, back, LOST) == [("n2", "node-silent"), ("n2", "node-lost")]
    assert blamed(launch(), LOST, launch("8"), back) == [("n2", "node-lost")]
    assert blamed(launch(), LOST, ("node_returned", {"node": "n1", "losses": 1})) == [("n2", "node-lost")]


@pytest.mark.parametrize(
    "before",
    [
        ("warned", {"signal": "TERM", "node": "n1"}),
        ("stopping", {"reason": "time_limit"}),
        ("signal", {"signal": "SIGTERM", "to": "agents"}),
        ("signal", {"signal": "SIGTERM", "node": "n2"}),
        ("leaving", {"node": "n2", "within_s": 30.0}),
        ("verdict", {"verdict": "completed"}),
    ],
)
def test_a_node_that_falls_silent_when_it_was_asked_to_end_is_not(before: tuple[str, dict[str, Any]]) -> None:
    assert blamed(launch(), before, LOST) == []
    assert blamed(launch(), before, launch("8"), LOST) == [("n2", "node-lost")]  # that was another job's end


def test_one_node_that_leaves_excuses_no_other() -> None:
    assert blamed(launch(), ("leaving", {"node": "n1", "within_s": 30.0}), LOST) == [("n2", "node-lost")]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "device-error"),
        ("CUDA error: uncorrectable NVLink error detected during the execution", "device-error"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", ""),
        ("torch.OutOfMemoryError: CUDA out of memory", ""),
        ("RuntimeError: CUDA error: device-side assert triggered", ""),
        ("OSError: [Errno 5] Input/output error: '/shared/data'", ""),  # a shared file system is no node's
        ("ValueError: my own mistake", ""),
        ("", ""),
    ],
)
def test_a_rank_is_a_nodes_fault_only_where_its_error_says_so(message: str, kind: str) -> None:
    expected = [("n1", kind)] if kind else []
    assert blamed(launch(), ("rank_failed", {**FAILED, "message": message})) == expected
    assert blamed(launch(), ("rank_failed", {**FAILED, "traceback": f"Traceback\n{message}\n"})) == expected


@pytest.mark.parametrize("number", [6, 7, 9, 11])
def test_a_rank_that_was_killed_says_nothing_of_its_node(number: int) -> None:
    failed = {**FAILED, "kind": "signal", "exit_code": None, "signal": number, "message": "killed"}
    assert blamed(launch(), ("rank_failed", failed)) == []


def test_the_device_is_named_by_its_local_rank() -> None:
    message = "uncorrectable ECC error"
    events = [Event(1.0, "w", *launch()), Event(2.0, "w", "rank_failed", {**FAILED, "message": message})]
    (fault,) = suspect_nodes(events)
    assert fault.device == "local rank 1"


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (("local_failed", {"node": "n1", "step": 3, "error": "[Errno 5] Input/output error: /nvme"}), "disk-error"),
        (("local_failed", {"node": "n1", "step": 3, "error": "[Errno 30] Read-only file system"}), "disk-error"),
        (("local_failed", {"node": "n1", "step": 3, "error": "[Errno 28] No space left on device"}), ""),
        (("persist_failed", {"node": "n1", "step": 3, "error": "[Errno 5] Input/output error"}), ""),
        (("stop_failed", {"node": "n1", "pids": [7]}), "unkillable"),
        (("agent_ended", {"node": "n1", "exit_code": -9}), ""),
        (("launch_failed", {"node": "n1", "exit_code": 1}), ""),
        (("node_left_job", {"node": "n1"}), ""),
        (("agent_left", {"node": "n1", "reason": "done"}), ""),
        (("slow_start", {"round": 1}), ""),
    ],
)
def test_other_events(event: tuple[str, dict[str, Any]], expected: str) -> None:
    assert blamed(launch(), event) == ([("n1", expected)] if expected else [])


def test_nodes_that_one_machine_plays_are_not_remembered() -> None:
    assert blamed(launch(mode="local"), LOST) == []
    assert blamed(LOST) == []


@pytest.mark.parametrize("node", ["", "n1 n2", "../n1", None, 7, "x" * 400])
def test_what_is_no_node_is_not_remembered(node: object) -> None:
    assert blamed(launch(), ("node_lost", {"node": node, "silent_s": 5.0})) == []
