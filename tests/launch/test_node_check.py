"""The pair check before a job's first round: when it is due, who is left out, and that nothing of it holds a run up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.diagnose import CheckRequest, CheckResult, NodeResult
from resilio_hpc.diagnose.policy import pair_policy
from resilio_hpc.diagnose.result import State
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.cli import checks
from resilio_hpc.launch.config.options import CheckNodes, LaunchOptions
from resilio_hpc.launch.gpus.devices import NodeDevices
from resilio_hpc.launch.supervisor import node_check
from tests.support.waiting import PATIENCE_S, until

NODES = ("n1", "n2", "n3", "n4", "n5")


def options(check_nodes: CheckNodes) -> LaunchOptions:
    return LaunchOptions("train.py", "script", "/runs/a", check_nodes=check_nodes)


def result(**states: State) -> CheckResult:
    nodes = tuple(
        NodeResult(node=node, state=states.get(node, "healthy"), compute_ratio=float(node[1:])) for node in NODES
    )
    return CheckResult(outcome="found", why="", nodes=nodes, rounds=2, seconds=1.0)


@pytest.mark.parametrize(
    ("asked", "mode", "link", "restarts", "nodes", "due"),
    [
        ("never", "batch", 2, 1, NODES, False),
        ("start", "batch", 1, 0, NODES, True),
        ("start", "local", 1, 0, NODES, True),
        ("start", "step", 1, 0, NODES, False),
        ("start", "batch", 1, 0, ("n1",), False),
        ("restart", "batch", 1, 0, NODES, False),
        ("restart", "batch", 2, 0, NODES, True),
        ("restart", "batch", 1, 1, NODES, True),
    ],
)
def test_when_it_is_due(
    asked: CheckNodes, mode: str, link: int, restarts: int, nodes: tuple[str, ...], due: bool
) -> None:
    assert node_check.is_due(options(asked), Site(SiteMode(mode), "7", nodes, True, restarts), link) is due


def test_bad_nodes_are_left_out_even_where_too_few_remain() -> None:
    left = node_check.leave_out(result(n2="bad", n4="bad"), NODES, 5)
    assert (left.nodes, left.left_out, left.kept) == (("n1", "n3", "n5"), ("n2", "n4"), ())


def test_slow_nodes_are_left_out_as_far_as_there_are_spares_the_slowest_first() -> None:
    left = node_check.leave_out(result(n1="bad", n3="slow", n5="slow"), NODES, 3)
    assert (left.nodes, left.left_out, left.kept) == (("n2", "n3", "n4"), ("n1", "n5"), ("n3",))


def test_who_is_unsure_stays() -> None:
    assert node_check.leave_out(result(n1="unsure"), NODES, 4).nodes == NODES


def child(source: str, budget_s: float = PATIENCE_S, extra_s: float = 0.0) -> node_check.NodeCheck:
    policy = msgspec.structs.replace(pair_policy(), budget_s=budget_s)
    request = CheckRequest(nodes=NODES, place="local", policy=policy)
    return node_check.NodeCheck(request, (sys.executable, "-c", source), extra_s)


def test_its_result_comes_back() -> None:
    text = msgspec.json.encode(result(n2="bad")).decode()
    assert child(f"input(); print({text!r})").run(("SIGTERM",)) == result(n2="bad")


@pytest.mark.parametrize("source", ["print('nonsense')", "import sys; sys.exit('no ports are left')", ""])
def test_a_check_that_fails_says_why_and_no_more(source: str) -> None:
    found = child(source).run(("SIGTERM",))
    assert found == ("no ports are left" if "ports" in source else "it gave no answer")


def test_a_check_that_hangs_is_ended() -> None:
    assert child("import time; time.sleep(3600)", budget_s=0.1, extra_s=0.1).run(("SIGTERM",)) == "it took too long"


def test_a_signal_ends_it_and_is_kept_and_handlers_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    started = tmp_path / "started"
    check = child(f"open({str(started)!r}, 'w'); import time; time.sleep(3600)")

    def strike() -> None:
        until(started.exists, "the check")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
            until(lambda number=number: number in check.received, "the signal", poll_s=0.002)

    thread = threading.Thread(target=strike)
    thread.start()
    assert check.run(("SIGTERM", "SIGINT")) == "a signal ended it"
    thread.join()
    assert check.received == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_task_of_srun_refuses_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    asked = LaunchOptions(str(script), "script", str(tmp_path / "run"), check_nodes="start")
    with pytest.raises(UsageError, match="task of srun"):
        checks.check(asked, step, tmp_path, NodeDevices(0, 0, 2, 0))
