"""Ranks whose program is over and whose processes stay: real processes under ``rank_main``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking import rank_main
from resilio_hpc.launch.workers.local_round import LINGERS_S, LocalRound
from resilio_hpc.launch.workers.rank_notes import end_file, exit_code, limit_file, may_wait_s
from resilio_hpc.launch.workers.slow_ends import FAILED_S, RECENT_S, SlowEnds
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

MEMBER = m.Member("n1", 0, "n1", 2, 0)
STATE = m.RoundState(1, 5, (MEMBER,), 0, 0, ())
STAYS = "import sys, threading\nthreading.Thread(target=threading.Event().wait).start()\n"
LOST_PEER = "ConnectionError: Connection closed by peer"


class Agent:
    """An agent's ends of ranks, and a clock that tests set."""

    def __init__(self, folder: Path, policy: str = "in-process") -> None:
        self.folder = folder
        self.told: list[dict[str, Any]] = []
        self.raised: list[tuple[int, tuple[str, str]]] = []
        self.now = 0.0
        self.local = LocalRound("n1", STATE, MEMBER, None)
        self.pids: dict[int, int] = {}
        self.files = {number: folder / f"{number}.json" for number in self.local.ranks}
        self.processes: list[subprocess.Popen[bytes]] = []
        node: Any = SimpleNamespace(
            options=SimpleNamespace(reentry=SimpleNamespace(restart_policy=policy)),
            tell=lambda kind, **fields: self.told.append({"e": kind, "node": "n1"} | fields),
        )
        core: Any = SimpleNamespace(local=self.local, ends=SimpleNamespace(raised=self._raised))
        self.slow_ends = SlowEnds(node, core, self.pids, self.files, lambda: self.now)

    def _raised(self, local: LocalRound, local_rank: int, _: float, error: tuple[str, str], *__: object) -> None:
        self.raised.append((local_rank, error))
        local.ranks[local_rank].has_raised = True

    def start(self, local_rank: int, program: str) -> subprocess.Popen[bytes]:
        """A rank in a process group of its own, as the spawner starts it."""
        script = self.folder / f"{local_rank}.py"
        script.write_text(program)
        process = subprocess.Popen(
            [sys.executable, "-u", rank_main.__file__, "script", str(script)], start_new_session=True,
            env=scrubbed(TORCHELASTIC_ERROR_FILE=self.files[local_rank]), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.processes.append(process)
        self.pids[local_rank] = process.pid
        return process

    def is_over(self, local_rank: int) -> int:
        """Wait until a rank's program is over; return its code."""
        file, pid = self.files[local_rank], self.pids[local_rank]
        return until(lambda: None if (code := exit_code(file, pid)) is None else (code,), "the program is over")[0]

    def tick(self, at: float) -> None:
        self.now = at
        self.slow_ends.tick(self.local)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait(PATIENCE_S)


def test_a_failed_rank_that_stays_is_reported_and_killed(agent: Agent) -> None:
    process = agent.start(0, STAYS + "raise RuntimeError('bad batch')")
    assert agent.is_over(0) == 1
    agent.tick(10.0)
    agent.tick(10.0 + FAILED_S)
    assert (agent.told, process.poll()) == ([], None)
    agent.tick(12.0 + FAILED_S)
    assert process.wait(PATIENCE_S) == -9
    assert [(rank, message) for rank, (message, _) in agent.raised] == [(0, "RuntimeError: bad batch")]
    (told,) = agent.told
    said = f"rank 0 on n1 (process {process.pid}) failed 30.0 s ago and has not ended: it is killed"
    assert words(told["e"], told) == said


def test_one_that_called_exit_is_reported_with_its_code(agent: Agent) -> None:
    process = agent.start(1, STAYS + "sys.exit(7)")
    assert agent.is_over(1) == 7
    agent.tick(0.0)
    agent.tick(FAILED_S + 2.0)
    assert process.wait(PATIENCE_S) == -9
    assert agent.raised == [(1, ("failed, exit code 7", ""))]


def test_where_ranks_start_again_alone_its_end_is_the_report(agent: Agent, tmp_path: Path) -> None:
    alone = Agent(tmp_path, "failed")
    alone.pids[0] = agent.start(0, STAYS + "raise RuntimeError('bad batch')").pid
    agent.is_over(0)
    alone.tick(0.0)
    alone.tick(FAILED_S + 2.0)
    assert agent.processes[0].wait(PATIENCE_S) == -9
    assert (len(alone.told), alone.raised) == (1, [])


def test_one_that_ended_well_is_told_of_once_and_lives(agent: Agent) -> None:
    process = agent.start(0, STAYS)
    assert agent.is_over(0) == 0
    for at in (0.0, LINGERS_S, LINGERS_S + 2.0, LINGERS_S + 99.0):
        agent.tick(at)
    assert process.poll() is None
    (told,) = agent.told
    assert (told["e"], told["pid"], agent.raised) == ("exit_overdue", process.pid, [])
    assert "finished 2 min 00 s ago and has not ended" in words(told["e"], told)


def test_a_rank_at_work_is_left_alone_though_an_error_of_it_is_on_record(agent: Agent) -> None:
    """torch's ``record`` writes the file of an error that is caught further out; a child of it may end, too."""
    process = agent.start(0, "import threading\nthreading.Event().wait()")
    agent.files[0].write_text('{"message": "ValueError: caught"}')
    end_file(agent.files[0]).write_text(f"{process.pid + 1} 1")
    agent.tick(0.0)
    agent.tick(FAILED_S + 2.0)
    assert (process.poll(), agent.told, agent.raised) == (None, [], [])
    long_ago = time.time() - RECENT_S - 1.0
    os.utime(agent.files[0], (long_ago, long_ago))
    agent.slow_ends.tell_of_origin(LOST_PEER)
    assert agent.raised == []


def test_the_origin_behind_an_echo_is_reported_before_it_has_ended(agent: Agent) -> None:
    agent.start(0, STAYS + "raise RuntimeError('bad batch')")
    agent.start(1, STAYS + "raise ConnectionError('Connection closed by peer')")
    agent.is_over(0), agent.is_over(1)
    agent.slow_ends.tell_of_origin("ValueError: its own")
    assert agent.raised == []
    agent.slow_ends.tell_of_origin(LOST_PEER)
    ((rank, (message, traceback)),) = agent.raised
    assert (rank, message) == (0, "RuntimeError: bad batch")
    assert traceback.endswith("RuntimeError: bad batch\n")


@pytest.mark.parametrize("content", [b"", b"7", b"x y", b"\xff\xfe 1", b"1 1 1", b"9" * 100_000])
def test_what_a_program_writes_there_itself_does_no_harm(tmp_path: Path, content: bytes) -> None:
    for path in (end_file(tmp_path / "0.json"), limit_file(tmp_path / "0.json")):
        path.write_bytes(content)
    assert exit_code(tmp_path / "0.json", 1) is None
    assert may_wait_s(tmp_path / "0.json", 1) == 0.0


def test_nor_does_a_pipe_which_no_other_process_opens(tmp_path: Path) -> None:
    os.mkfifo(end_file(tmp_path / "0.json"))
    assert exit_code(tmp_path / "0.json", 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["in-process", "failed"])
def test_a_run_goes_on_after_a_rank_that_does_not_end(tmp_path: Path, policy: str) -> None:
    (tmp_path / "train.py").write_text(f"""
import os
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print("up", flush=True)
if first and os.environ["RANK"] == "1":
    {STAYS.replace(chr(10), "; ", 1).rstrip()}
    raise RuntimeError("bad batch")
""")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-torch"),
            *("--nproc-per-node", "2", "--restart-policy", policy, "train.py"),
        ],
        cwd=tmp_path, env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (forced,) = [event for event in read_ledger(tmp_path / "run" / "ledger") if event.kind == "end_forced"]
    assert forced.fields["rank"] == 1
    assert "RuntimeError: bad batch" in done.stderr
