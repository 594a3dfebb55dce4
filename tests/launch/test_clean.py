"""``resilio clean`` on what really killed launches left, beside launches that run, stand still, or just begin."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core import process_title
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.process import process_tree
from tests.support.launch.private_node import PrivateNode, private_node
from tests.support.waiting import PATIENCE_S, until

TRAINS = """
import os, subprocess, time
from multiprocessing import resource_tracker, shared_memory
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

run, state = train.attach(), {"x": b"x" * 100_000}
checkpoint = Checkpointer()
if run.rank == 0:
    segment = shared_memory.SharedMemory(create=True, size=1 << 20)
    resource_tracker.unregister(segment._name, "shared_memory")
    subprocess.Popen(["sleep", "5000"], start_new_session=True, pass_fds=[segment._fd])
restored = checkpoint.restore(state)
for step in run.steps(restored[0] if restored else 0, 2000, save=lambda done: checkpoint.save(done, state), every=20):
    if os.path.exists("go"):
        continue
    with open(f"steps.{os.environ['RESILIO_RUN_ID']}", "w") as file:
        file.write(str(step))
    time.sleep(0.02)
"""
CLEAN = (sys.executable, "-m", "resilio_hpc.cli.main", "clean")


@pytest.fixture
def node() -> Iterator[PrivateNode]:
    with private_node() as made:
        (made.path / "train.py").write_text(TRAINS)
        yield made


class Training:
    """A launch without torch that trains in a run directory of its own, with a helper that is detached from it."""

    def __init__(self, node: PrivateNode, name: str, awaited: bool = True) -> None:
        self.node, self.run_path = node, node.path / name
        words = ["--no-torch", "--nproc-per-node=2", f"--run-dir={name}", "train.py"]
        self.process = node.start("resilio_hpc.cli.resilio_launch", *words, log=f"{name}.txt")
        if awaited:
            self.goes_on()

    @property
    def run_id(self) -> str:
        return str(json.loads((self.run_path / "run.json").read_text())["run_id"])

    def step(self) -> int:
        try:
            return int((self.node.path / f"steps.{self.run_id}").read_text() or -1)
        except (OSError, ValueError):
            return -1

    def said(self) -> str:
        return Path(f"{self.run_path}.txt").read_text()

    def goes_on(self) -> None:
        before = self.step()
        until(lambda: self.step() > before + 7, "more steps", self.said, alive=lambda: self.process.poll() is None)

    def tree(self) -> list[int]:
        return [self.process.pid, *process_tree.descendants(self.process.pid)]

    def sleeper(self) -> int:
        (pid,) = [pid for pid in self.tree() if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
        return pid

    def kill_all(self) -> int:
        """Kill all at once, but the process that its rank has detached. Returns that one."""
        sleeper = self.sleeper()
        doomed = [pid for pid in self.tree() if pid != sleeper]
        process_tree.send(doomed, signal.SIGSTOP)  # none of them can tidy up
        process_tree.send(doomed, signal.SIGKILL)
        self.process.wait()
        until(lambda: not any(map(process_tree.runs, doomed)), "all are dead")
        return sleeper

    def end(self) -> int:
        (self.node.path / "go").touch()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def begun(node: PrivateNode) -> Iterator[list[Training]]:
    made: list[Training] = []
    yield made
    for each in made:
        process_tree.send(process_tree.kill_descendants(each.process.pid), signal.SIGKILL)
        each.process.kill()
        each.process.wait()
        if (each.run_path / "run.json").exists():
            process_tree.sweep(f"{each.run_id}:{os.uname().nodename.partition('.')[0]}")


def cleaned(node: PrivateNode, *words: str) -> list[dict[str, Any]]:
    done = node.run(*CLEAN, "--json", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(json.loads(done.stdout)["launches"])


def gone(launches: list[dict[str, Any]]) -> list[str]:
    return [path for one in launches if not one["kept"] for path in one["directories"]]


@pytest.mark.slow
def test_a_killed_launch_goes_and_its_neighbours_stay(node: PrivateNode, begun: list[Training]) -> None:
    begun += [dead := Training(node, "dead"), alive := Training(node, "alive")]
    titles = sorted(cmdline(pid).replace(b"\0", b" ").decode().strip() for pid in dead.tree())
    shown = [re.sub(rf" \S+ run {dead.run_id}.*", " NODE", title) for title in titles if title.startswith("resilio ")]
    ranks = [title for title in titles if re.fullmatch(r"resilio rank [01] \S+: python -u train\.py", title)]
    assert len(ranks) == 2
    assert shown[:3] == ["resilio agent NODE", "resilio io_worker NODE", "resilio io_worker NODE"]
    assert shown[-2:] == ["resilio saver NODE", "resilio zygote NODE"]
    before = set(node.names())
    sleeper = dead.kill_all()
    assert process_tree.runs(sleeper) and len(before) == 6 and set(node.names()) == before
    segments = list(node.inside("/dev/shm").glob("psm_*"))
    assert len(segments) == 2
    assert gone(cleaned(node)) == []  # it may be started again
    text = node.run(*CLEAN).stdout
    assert (
        ": stays\n  its launch may go on; it counts as dead after 300 s\n" in text
        and "nothing to remove; 3 folders in use" in text
    )

    would = cleaned(node, "--older=0", "--dry-run")
    assert len(gone(would)) == 3 and set(node.names()) == before and process_tree.runs(sleeper)

    done = cleaned(node, "--older=0")
    assert sorted(gone(done)) == sorted(gone(would)) == sorted(before - set(node.names()))
    (agents,) = [one for one in done if not one["kept"] and one["node"]]
    assert (agents["run_id"], list(agents["processes"])) == (dead.run_id, [str(sleeper)])
    assert sum(agents["directories"].values()) > 200_000  # snapshots of two ranks
    assert not process_tree.runs(sleeper) and process_tree.runs(alive.sleeper())
    assert [path.exists() for path in segments].count(True) == 1 and len(agents["segments"]) == 1
    alive.goes_on()

    tree = alive.tree()
    process_tree.send(tree, signal.SIGSTOP)
    before = set(node.names())
    assert gone(cleaned(node, "--older=0")) == [] and set(node.names()) == before
    process_tree.send(tree, signal.SIGCONT)
    alive.goes_on()
    assert alive.end() == 0, alive.said()
    assert process_tree.runs(sleeper_of(alive))  # a rank that ended well has left it on purpose
    assert cleaned(node, "--older=0") == []
    assert process_tree.runs(sleeper_of(alive))


def sleeper_of(ended: Training) -> int:
    (left,) = [event for event in read_ledger(ended.run_path / "ledger") if event.kind == "left_running"]
    return int(left.fields["pids"][0])


@pytest.mark.slow
def test_a_launch_whose_agent_alone_died_is_in_use(node: PrivateNode, begun: list[Training]) -> None:
    begun.append(one := Training(node, "one"))
    supervisor = one.process.pid
    (agent,) = [pid for pid in one.tree() if is_agent(pid)]
    os.kill(supervisor, signal.SIGSTOP)  # it cannot start another agent
    os.kill(agent, signal.SIGKILL)
    until(lambda: not process_tree.runs(agent), "the agent is dead")
    before = node.names()
    kept = cleaned(node, "--older=0")
    assert gone(kept) == [] and node.names() == before
    assert any("its launcher lives" in each["kept"] for each in kept)
    os.kill(supervisor, signal.SIGCONT)
    one.goes_on()
    assert one.end() == 0, one.said()


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_agent(pid: int) -> bool:
    return process_title.is_agent([os.fsdecode(word) for word in cmdline(pid).split(b"\0")])


@pytest.mark.slow
def test_two_cleans_at_once_and_beside_a_start_of_the_same_run(node: PrivateNode, begun: list[Training]) -> None:
    begun.append(first := Training(node, "one"))
    first.kill_all()
    begun.append(second := Training(node, "one", awaited=False))
    reports: list[dict[str, Any]] = []
    while second.step() < 20:
        both = [subprocess.Popen(node.argv([*CLEAN, "--json", "--older=0"]), stdout=subprocess.PIPE) for _ in range(2)]
        for each in both:
            out, _ = each.communicate(timeout=PATIENCE_S)
            assert each.returncode == 0, out
            reports += json.loads(out)["launches"]
        assert second.process.poll() is None, second.said()
    removed = gone(reports)
    assert len(set(removed)) == len(removed)  # each thing by one of them
    assert sum(bool(one["node"]) for one in reports if not one["kept"]) <= 1
    second.goes_on()
    assert second.end() == 0, second.said()
    assert "another agent" not in second.said()
