"""Whole checks of real processes on this machine: the healthy pass, and each planted fault is named as what it is."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator

import msgspec
import pytest

from resilio_hpc.diagnose import CheckRequest, CheckResult, check, interpreter
from resilio_hpc.diagnose.policy import PairPolicy, pair_policy
from resilio_hpc.diagnose.starters import LocalStarter
from tests.support.environments import SUPPORT, scrubbed

CHECKER = str(SUPPORT / "diagnose" / "faulty_checker.py")
SMALL: PairPolicy = msgspec.structs.replace(
    pair_policy(), cpu_matrix=128, cpu_message_bytes=65536, block_s=0.02, start_s=240.0, budget_s=500.0
)


@pytest.fixture(scope="module")
def probers() -> Iterator[str]:
    """Where probers are forked: a test's nodes then start at once."""
    with tempfile.TemporaryDirectory() as directory:  # short: the path of a socket has at most 107 bytes
        argv = [sys.executable, str(SUPPORT / "diagnose" / "forked_probers.py"), f"{directory}/socket"]
        with subprocess.Popen(argv, env=scrubbed(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdin and server.stdout and server.stdout.readline() == b"ready\n"
            yield argv[-1]
            server.stdin.close()


def run(faults: dict[str, str], count: int, policy: PairPolicy = SMALL, probers: str = "") -> CheckResult:
    """A check of so many nodes; ``probers``: where they are forked (default: each prober imports torch)."""

    def checker_of(node: str) -> tuple[str, ...]:
        fault = faults.get(node)
        if probers:
            return (sys.executable, CHECKER, fault or "none", probers)
        return (sys.executable, CHECKER, fault) if fault else interpreter.command("checker")

    nodes = tuple(f"n{number}" for number in range(1, count + 1))
    request = CheckRequest(nodes=nodes, place="local", policy=policy)
    return check(request, starter=lambda asked: LocalStarter(asked, checker_of))


def found(result: CheckResult) -> dict[str, str | None]:
    return {one.node: one.fault for one in result.nodes if one.state == "bad"}


@pytest.mark.slow
def test_crashes_hangs_and_wrong_results_are_told_apart() -> None:
    policy = msgspec.structs.replace(SMALL, compute_s=20.0, collective_s=20.0)
    faults = {"n2": "crash", "n3": "hang-collective", "n6": "wrong-product"}
    result = run(faults, 7, policy)
    assert found(result) == {"n2": "crashed", "n3": "hung", "n6": "wrong_result"}
    assert result.outcome == "found"
    assert result.rounds <= 5
    said = {one.node: one.evidence for one in result.nodes}
    assert "SIGSEGV" in said["n2"]
    assert "product" in said["n6"]
    assert {one.state for one in result.nodes if one.node not in faults} == {"healthy"}


def test_nodes_that_die_or_cannot_begin_or_add_wrongly_are_named(probers: str) -> None:
    policy = msgspec.structs.replace(SMALL, collective_s=20.0)
    faults = {"n1": "dead", "n4": "no-torch", "n5": "wrong-sum"}
    result = run(faults, 7, policy, probers)
    assert found(result) == {"n1": "silent", "n4": "not_ready", "n5": "wrong_result"}
    said = {one.node: one.evidence for one in result.nodes}
    assert "killed by a fault" in said["n1"]
    assert "No module named 'torch'" in said["n4"]
    assert {one.state for one in result.nodes if one.node not in faults} == {"healthy"}


def test_a_throttled_node_is_slow_and_nobody_else(probers: str) -> None:
    result = run({"n3": "slow"}, 4, msgspec.structs.replace(SMALL, cpu_matrix=256, block_s=0.2), probers)
    assert result.slow == ("n3",)
    assert result.bad == ()
    assert [one.what for one in result.nodes if one.state == "slow"] == ["compute"]
