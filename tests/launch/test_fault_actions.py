"""What follows from the class of a failure: the table, and what the controller makes of it."""

from __future__ import annotations

import pytest

from resilio_hpc.diagnose.causes.pattern_table import CauseClass, shipped
from resilio_hpc.launch.controller.facts.fault_actions import FaultAction, row_of, rows
from resilio_hpc.launch.controller.facts.repeated_failure import Repeatable, repeatable
from resilio_hpc.launch.protocol.failure_class import MEMORY_OF_OTHERS, classify
from resilio_hpc.launch.protocol.messages import RankFailure
from resilio_hpc.launch.workers.rank_evidence import RankEvidence
from tests.support.environments import ROOT
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

RAISED = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n    load()\n'
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 12.81 MiB is free. Process 4711 has {} memory in use. Including non-PyTorch memory, this process has 9 "
    "GiB memory in use."
)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for send operation to complete"
)


def failed(message: str, traceback: str = RAISED, log: str = "", signal: int | None = None) -> RankFailure:
    kind, code = ("exit", 1) if signal is None else ("signal", None)
    return RankFailure("n1", 0, 0, kind, 1.0, code, signal, message, traceback, None, log=log)


@pytest.mark.parametrize(
    ("failure", "cause", "first", "again"),
    [
        (failed("KeyError: 'lr'"), "user_code", "restart", "stop"),
        (failed("OwnProblem: 7"), "user_code", "restart", "stop"),
        (failed("json.decoder.JSONDecodeError: Expecting value"), "data", "restart", "stop"),
        (failed(OOM.format("500.00 MiB")), "oom_gpu", "restart", "stop"),
        (failed(OOM.format("70.00 GiB")), "oom_gpu", "restart", "move"),
        (failed(ECC), "gpu_hardware", "move", "move"),
        (failed("RuntimeError: CUDA error: the GPU has fallen off the bus"), "gpu_hardware", "move", "move"),
        (failed("killed by SIGABRT", "", f"terminate called: {ECC}", 6), "gpu_hardware", "move", "move"),
        (
            failed(
                "killed by SIGKILL: the out-of-memory killer ended one process in this job (oom_kill event): full",
                "",
                "",
                9,
            ),
            "oom_host",
            "restart",
            "restart",
        ),
        (
            failed("RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed."),
            "oom_host",
            "restart",
            "restart",
        ),
        (
            failed("RuntimeError: CUDA error: an illegal memory access was encountered"),
            "unknown",
            "restart",
            "stop-elsewhere",
        ),
        (
            failed("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error"),
            "unknown",
            "restart",
            "stop-elsewhere",
        ),
        (failed(TIMED_OUT), "unknown", "restart", "restart"),
        (failed("OSError: [Errno 116] Stale file handle"), "storage", "restart", "restart"),
        (failed("OSError: [Errno 5] Input/output error"), "storage", "restart", "move"),
        (failed("OSError: [Errno 98] Address already in use"), "launch_config", "restart", "restart"),
        (failed("ModuleNotFoundError: No module named 'x'"), "software_stack", "restart", "stop"),
        (failed("killed by SIGSEGV (a crash in native code)", "", "", 11), "unknown", "restart", "restart"),
        (
            failed("killed by SIGKILL (often the kernel's or Slurm's out-of-memory killer)", "", "", 9),
            "unknown",
            "restart",
            "restart",
        ),
    ],
)
def test_what_follows_from_an_error(failure: RankFailure, cause: str, first: str, again: str) -> None:
    found = classify(failure)
    row = row_of(found)
    assert (found.cause.value, row.first.value, row.again.value) == (cause, first, again)


PASSING = """OSError: [Errno 121] Remote I/O error
OSError: [Errno 107] Transport endpoint is not connected
OSError: [Errno 28] No space left on device
OSError: [Errno 122] Disk quota exceeded
OSError: [Errno 30] Read-only file system
OSError: [Errno 117] Structure needs cleaning
OSError: [Errno 112] Host is down
OSError: [Errno 113] No route to host
OSError: [Errno 101] Network is unreachable
OSError: [Errno 100] Network is down
TimeoutError: timed out
TimeoutError: [Errno 110] Connection timed out
socket.timeout: timed out
ConnectionRefusedError: [Errno 111] Connection refused
ConnectionResetError: [Errno 104] Connection reset by peer
ConnectionAbortedError: [Errno 103] Software caused connection abort
BrokenPipeError: [Errno 32] Broken pipe
socket.gaierror: [Errno -3] Temporary failure in name resolution
socket.gaierror: [Errno -2] Name or service not known
BlockingIOError: [Errno 11] Resource temporarily unavailable
OSError: [Errno 12] Cannot allocate memory
OSError: [Errno 16] Device or resource busy
RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error.
RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly
requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url
HTTPError: 429 Client Error: Too Many Requests
urllib.error.HTTPError: HTTP Error 502: Bad Gateway
ssl.SSLError: [SSL: WRONG_VERSION_NUMBER] wrong version number
RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution
RuntimeError: PCIe error"""


@pytest.mark.parametrize("message", PASSING.splitlines())
def test_an_error_that_no_program_causes_never_stops_a_run(message: str) -> None:
    mark = repeatable(failed(message), 5, survived=False)
    assert mark is None or not mark.is_again(mark)


def test_the_table_has_a_row_for_each_class_and_its_patterns_exist() -> None:
    assert {row.cause for row in rows() if not row.pattern} == set(CauseClass)
    known = {pattern.name for pattern in shipped().pattern} | {MEMORY_OF_OTHERS}
    named = [row.pattern for row in rows() if row.pattern]
    assert set(named) <= known
    assert len(named) == len(set(named))
    assert all((row.cause is None) == bool(row.pattern) for row in rows())


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "launching.md").read_text()
    for row in rows():
        name = row.pattern or (row.cause.value if row.cause else "")
        trace = ", traced" if row.trace else ""
        assert f"| `{name}` | {row.first.value} | {row.again.value}{trace} | {row.why} |" in page
    shown = page.partition("<!-- faults -->")[2].partition("<!-- end of faults -->")[0]
    assert shown.count("\n| `") == len(rows())


def test_a_mark_survives_a_change_of_controller() -> None:
    for action in (FaultAction.STOP, FaultAction.STOP_ELSEWHERE, FaultAction.MOVE):
        mark = Repeatable("what", "n1 0", action)
        assert Repeatable.from_text(mark.to_text()) == mark
    assert Repeatable.from_text("what\tn1 0\tdevice") == Repeatable("what", "n1 0", FaultAction.STOP_ELSEWHERE)
    assert Repeatable.from_text("what\tn1 0\tof another version") is None


# -- the controller ----------------------------------------------------------------------------------------------------


def members(world: World) -> list[str]:
    return [str(node) for node in world.records("round")[-1]["members"]]


def test_a_fault_of_the_node_leaves_it_to_a_spare() -> None:
    world = World(nodes=2, spares=1, slots=1)
    world.until_step(12)
    assert members(world) == ["n1", "n2"]
    world.fail_rank(1, exit_code=1, signal=None, message=ECC, traceback=RAISED)
    world.until_round(1)
    assert members(world) == ["n1", "n3"]
    (decided,) = [one for one in world.records("decision") if one["rung"] != "wait_for_node"]
    assert decided["rung"] == "replace_node"
    assert "n2 is at fault: uncorrectable error in a GPU's memory" in decided["reason"]
    world.run(lambda: world.records("recovered") != [])
    world.cut("n1")  # now the suspect is needed again
    world.until_round(2)
    assert sorted(members(world)) == ["n2", "n3"]


def test_a_fault_of_the_node_that_is_told_after_its_echo_leaves_it_to_a_spare_too() -> None:
    world = World(nodes=2, spares=1, slots=1)
    world.until_step(12)
    for site in world.sites.values():
        site.stop_s = 0.5
    began = world.unix()
    world.fail_rank(0, exit_code=1, signal=None, message="RuntimeError: Connection closed by peer", traceback=RAISED)
    world.run(lambda: world.agents["n2"].core.ranks.stop.under_way)
    (ranks := world.agents["n2"].core.ranks).ends.exited(ranks.local, 0, (1, None), began, (ECC, RAISED))
    world.run(lambda: world.records("recovered") != [])
    assert members(world) == ["n1", "n3"]
    assert next(world.controllers()).run.without_progress <= 1


def test_without_a_spare_the_ranks_start_again_where_they_were() -> None:
    world = World(nodes=2, slots=1, max_without_progress=9, script=Script(save_every=1000))
    for number in range(3):
        world.run(lambda number=number: world.starts != [] and world.last.state.round == number and world.step >= 3)  # type: ignore[misc]
        world.fail_rank(1, exit_code=1, signal=None, message=ECC, traceback=RAISED)
    world.until_round(3)
    assert members(world) == ["n1", "n2"]
    assert "no spare is left" in world.records("decision")[-1]["reason"]


def test_a_link_that_fails_twice_on_one_node_is_the_nodes() -> None:
    broken = "RuntimeError: NCCL error: ibv_poll_cq: Got completion with error 12, vendor err 129"
    world = World(nodes=2, spares=1, slots=1, max_without_progress=9)
    for number in range(2):
        world.run(lambda number=number: world.starts != [] and world.last.state.round == number and world.step >= 3)  # type: ignore[misc]
        assert members(world) == ["n1", "n2"]
        world.fail_rank(1, exit_code=1, signal=None, message=broken, traceback=RAISED)
    world.until_round(2)
    assert members(world) == ["n1", "n3"]
    assert [one.get("trace", False) for one in world.records("start")] == [False, True, True]


def test_the_next_controller_knows_which_nodes_are_suspect() -> None:
    world = World(nodes=3, spares=1, slots=1)
    world.until_step(12)
    world.fail_rank(1, exit_code=1, signal=None, message=ECC, traceback=RAISED)
    world.run(lambda: world.records("recovered") != [])
    assert world.last.state.suspects == ("n2",)
    world.cut(next(world.controllers()).run.node)
    world.run(lambda: any(c.run.epoch > 1 and "n2" in c.run.suspects for c in world.controllers()), limit_s=60)


@pytest.mark.parametrize(
    ("message", "log", "traced"),
    [(TIMED_OUT, "", True), ("KeyError: 1", "", False), ("failed, exit code 1", "Watchdog caught collective operation "
     "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600070 milliseconds", True)],
)  # fmt: skip
def test_libraries_write_what_they_do_in_the_round_after_a_collective_failed_and_no_longer(
    message: str, log: str, traced: bool
) -> None:
    world = World(nodes=2, slots=1)
    world.until_step(12)
    error = (message, RAISED if not log else "")
    ranks = world.agents["n2"].core.ranks
    ranks.ends.exited(ranks.local, 0, (1, None), world.unix(), error, RankEvidence(log))
    world.until_round(1)
    world.run(lambda: world.records("recovered") != [])
    world.fail_rank(1)
    world.until_round(2)
    assert [one.get("trace", False) for one in world.records("start")] == [False, traced, False]
