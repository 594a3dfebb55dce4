"""Under the real launcher: with --restart-policy failed a rank that fails starts again alone, and the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.diagnose.cascade.in_ledger import last_origin
from resilio_hpc.launch.process import process_tree
from resilio_hpc.report.faults import faults
from resilio_hpc.report.goodput import goodput
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path

WHAT, RANK = sys.argv[1], int(os.environ["RANK"])
LIFE = int(os.environ["RESILIO_RANK_RESTARTS"])
SAME = [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RESILIO_ROUND")]
print("BORN", RANK, LIFE, os.getpid(), os.environ["TORCHELASTIC_RESTART_COUNT"], *SAME, flush=True)

def there(name, wanted=True):
    while Path(name).exists() is not wanted:
        time.sleep(0.01)

def note(name):
    Path(name + ".new").write_text(str(os.getpid()))
    os.rename(name + ".new", name)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def left(kind):
    # processes that outlive their rank: in its session, in one of their own, and a daemon's child
    daemon = "import os, time; os.fork() and os._exit(0); time.sleep(1000)"
    long = [sys.executable, "-c", "import time; time.sleep(1000)"]
    subprocess.Popen([sys.executable, "-c", daemon]).wait()
    own = [subprocess.Popen(long), subprocess.Popen(long, start_new_session=True)]
    if not os.fork():
        note("forked")
        time.sleep(1000)
    there("forked")
    return [*(process.pid for process in own), int(Path("forked").read_text())]

def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

if WHAT == "killed":
    if RANK == 0 and LIFE < 2:  # the second time it is just being started again
        there("finished")
        die()
    if RANK == 0:
        note("again")
    if RANK == 1:
        there("again")
    if RANK == 2:
        note("finished")
elif WHAT == "at the same instant":
    if RANK < 2 and not LIFE:
        note(f"ready{RANK}")
        there("ready0"), there("ready1")
        die()
    if RANK < 2:
        note(f"again{RANK}")
    there("again0"), there("again1")
elif WHAT == "the same error":
    if RANK == 1:
        raise RuntimeError("no such table")
    time.sleep(1000)
elif WHAT == "again and again":
    if RANK == 1:
        die()
    time.sleep(1000)
elif WHAT == "leaves children":
    if RANK == 0:
        mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        there("again")
        print("MINE", runs(mine.pid), flush=True)
        mine.kill()
    elif not LIFE:
        pids = left("x")
        Path("left").write_text(" ".join(map(str, pids)))
        die()
    else:
        print("LEFT", *(runs(int(pid)) for pid in Path("left").read_text().split()), flush=True)
        note("again")
elif WHAT == "all":
    if os.environ["RESILIO_ROUND"] == "0":
        note(f"ready{RANK}")
        for rank in range(3):
            there(f"ready{rank}")
        if LIFE:
            time.sleep(1000)  # it waits for the others
        if RANK == 1:
            die()
        time.sleep(0.2 * RANK)
        raise ConnectionError("Connection closed by peer")
elif WHAT == "a collective":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(20):
        if RANK == 1 and step == 3 and os.environ["RESILIO_ROUND"] == "0":
            die()
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
elif WHAT == "lost agent":
    if os.environ["RESILIO_ROUND"] == "0":
        note(f"waits{RANK}")
        time.sleep(1000)
elif WHAT == "stopped":
    if RANK == 1 and LIFE < int(sys.argv[2]):
        die()
    note(f"waits{RANK}")
    time.sleep(1000)
elif WHAT == "steps":
    from resilio_hpc import train
    run = train.attach()
    for step in run.steps(0, 4):
        if RANK == 1 and step == 2 and run.restart_count == 0:
            die()
        time.sleep(0.05)
print("END", RANK, LIFE, flush=True)
"""


class Outcome:
    """What the ranks printed, and what the ledger holds of it."""

    def __init__(
        self, folder: Path, what: str, *words: str, ranks: int = 3, code: int = 0, nodes: int = 0, torch: bool = False
    ) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(SCRIPT)
        argv = ["--run-dir", "run", "--nproc-per-node", str(ranks), "--restart-policy", "failed"]
        argv += [] if torch else ["--no-torch"]
        first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
        arguments, options = words[:first], words[first:]
        environment = {**scrubbed(), **({"RESILIO_LOCAL_NODES": str(nodes)} if nodes else {})}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv, *options, "worker.py", what, *arguments],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._code = code

    def end(self) -> Outcome:
        out, self.said_by_launcher = self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == self._code, out[-2000:] + self.said_by_launcher[-3000:]
        self._lines = [line.partition("] ")[2].split() for line in out.splitlines()]
        self.ledger = list(read_ledger(self.folder / "run" / "ledger"))
        return self

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def agents(self) -> list[int]:
        below = process_tree.children(self._process.pid)
        return [pid for pid in below if b"agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def said(self, word: str) -> list[list[str]]:
        return sorted(line[1:] for line in self._lines if line[:1] == [word])

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.ledger if event.kind == kind]

    def born(self, rank: int) -> int:
        """How often a rank has said so in its log until now."""
        logs = (self.folder / "run" / "logs").rglob(f"{rank}.log")
        return sum(path.read_text().count("BORN") for path in logs)

    def lives(self) -> dict[int, int]:
        """By rank: how often it was born."""
        born = [int(line[0]) for line in self.said("BORN")]
        return {rank: born.count(rank) for rank in set(born)}


def test_a_killed_rank_starts_again_and_no_other_is_touched(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "killed").end()
    assert run.lives() == {0: 3, 1: 1, 2: 1}  # rank 2 had finished, and stays so
    assert [line[:2] for line in run.said("END")] == [["0", "2"], ["1", "0"], ["2", "0"]]
    births = [line for line in run.said("BORN") if line[0] == "0"]
    assert [line[3] for line in births] == ["0", "1", "2"]  # torchrun's count
    assert len({tuple(line[4:]) for line in births}) == 1  # the same place in the same world
    assert len(run.events("round")) == 1
    assert run.events("recovered") == []
    assert [told["alone"] for told in run.events("rank_failed")] == [True, True]
    assert [told["rung"] for told in run.events("decision")] == ["restart_rank"] * 2
    assert [(told["rank"], told["restarts"]) for told in run.events("rank_restarted")] == [(0, 1), (0, 2)]
    found = faults(run.ledger)
    assert [(fault.kind, fault.rank, fault.plan) for fault in found] == [("rank_killed", 0, "restart_rank")] * 2
    assert all(fault.recovered and fault.recovery_s is not None for fault in found)
    assert goodput(run.ledger).recovery_s == 0.0


def test_two_ranks_that_fail_at_the_same_instant_count_once(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "at the same instant", "--max-restarts", "1").end()
    assert run.lives() == {0: 2, 1: 2, 2: 1}
    assert [told["without_progress"] for told in run.events("decision")] == [1, 1]


def test_the_same_error_again_ends_the_run(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "the same error", code=1).end()
    (verdict,) = run.events("verdict")
    assert verdict["verdict"] == "no_progress"
    assert verdict["first_failure"]["rank"] == 1
    assert "the same failure again" in verdict["reason"]
    assert "RuntimeError: no such table" in run.said_by_launcher
    assert run.lives() == {0: 1, 1: 2, 2: 1}
    origin = last_origin(run.ledger)
    assert origin is not None
    assert origin.rank == 1


def test_a_rank_that_fails_again_and_again_spends_the_budget(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "again and again", "--max-restarts", "2", code=1).end()
    (verdict,) = run.events("verdict")
    assert (verdict["verdict"], verdict["first_failure"]["rank"]) == ("no_progress", 1)
    assert "2 restarts did not advance the last durable step (--max-restarts 2)" in verdict["reason"]
    assert run.lives() == {0: 1, 1: 3, 2: 1}
    assert [told.get("alone", False) for told in run.events("rank_failed")] == [True, True, False]


@pytest.mark.parametrize("how", ["forked", "executed"])
def test_what_a_rank_left_running_ends_before_it_starts_again(tmp_path: Path, how: str) -> None:
    run = Outcome(tmp_path, "leaves children", *(("--no-zygote",) if how == "executed" else ()), ranks=2).end()
    assert run.said("LEFT") == [["False", "False", "False"]]
    assert run.said("MINE") == [["True"]]  # another rank's process


def test_where_all_ranks_fail_together_the_whole_round_starts_again(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "all").end()
    (told,) = run.events("restarts_all")
    assert "all 3 ranks failed within 10 s" in told["reason"]
    assert len(run.events("round")) == 2
    assert [line[:2] for line in run.said("END")] == [["0", "0"], ["1", "0"], ["2", "0"]]
    decisions = run.events("decision")
    assert (decisions[-1]["rung"], decisions[-1]["without_progress"]) == ("restart_ranks", 1)
    (origin,) = run.events("origin")
    assert origin["rank"] == 1  # not the last one, whose connections broke


@pytest.mark.slow
def test_ranks_of_one_collective_start_again_together(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "a collective", torch=True).end()
    assert len(run.events("restarts_all")) == 1
    assert len(run.events("round")) == 2
    assert [line[0] for line in run.said("END")] == ["0", "1", "2"]
    (origin,) = run.events("origin")
    assert origin["rank"] == 1


def test_ranks_that_report_steps_go_back_together(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "steps", ranks=2).end()
    (told,) = run.events("restarts_all")
    assert "report steps" in told["reason"]
    assert run.events("rank_restarted") == []
    assert run.lives() == {0: 2, 1: 2}
    assert len(run.events("recovered")) == 1


@pytest.mark.parametrize(("deaths", "awaited"), [("1", (0, 1, 2)), ("9", (0, 2))], ids=["it runs", "it waits to"])
def test_a_stop_ends_a_rank_that_was_started_again_too(tmp_path: Path, deaths: str, awaited: tuple[int, ...]) -> None:
    run = Outcome(tmp_path, "stopped", deaths, "--max-restarts", "9", code=143)
    until(lambda: all((tmp_path / f"waits{rank}").exists() for rank in awaited), "these ranks run")
    until(lambda: run.born(1) >= 2, "the rank was started again")
    run.signal(signal.SIGTERM)
    run.end()
    (verdict,) = run.events("verdict")
    assert verdict["verdict"] == "terminated"
    assert run.events("stop_overdue") == []
    assert {rank: count for rank, count in run.lives().items() if rank != 1} == {0: 1, 2: 1}


def test_a_rank_of_another_node_than_the_controllers_starts_again(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "at the same instant", ranks=1, nodes=3).end()
    assert run.lives() == {0: 2, 1: 2, 2: 1}
    assert len(run.events("round")) == 1
    assert len({told["node"] for told in run.events("rank_restarted")}) == 2


def test_a_lost_agent_ends_the_round(tmp_path: Path) -> None:
    run = Outcome(tmp_path, "lost agent", ranks=1, nodes=3)
    until(lambda: all((tmp_path / f"waits{rank}").exists() for rank in range(3)), "all ranks run")
    os.kill(run.agents()[-1], signal.SIGKILL)
    run.end()
    assert len(run.events("round")) == 2
    assert run.events("rank_restarted") == []
    assert [line[0] for line in run.said("END")] == ["0", "1", "2"]
