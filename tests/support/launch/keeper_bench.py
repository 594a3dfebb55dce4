"""An agent keeper whose time a test drives, with an srun of our own making."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import Ledger, read_ledger
from resilio_hpc.launch.allocation.job_watch import JobView, JobWatch
from resilio_hpc.launch.allocation.placements import GROUP_VARIABLE, Placement, Recipe, Site, SiteMode
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.run_directory import RunIdentity
from resilio_hpc.launch.supervisor.agent_supervisor import AgentKeeper
from resilio_hpc.slurm.client.allocation import Allocation
from tests.support.waiting import until

SRUN = """#!/bin/sh
nodes=
for word in "$@"; do
    case $word in
    --nodelist=*) nodes=${word#--nodelist=} ;;
    --no-kill|--kill-on-bad-exit=0|--wait=0|--overlap|--export=ALL|--nodes=*|--ntasks=*|--ntasks-per-node=1) ;;
    --chdir=/|--cpus-per-task=*|--mpi=none|--unbuffered|--job-name=*) ;;
    -*) echo "unknown flag $word" >&2; exit 99 ;;
    *) break ;;
    esac
done
echo "$*" >> "$FAKE_SRUN/argv"
echo "$nodes" >> "$FAKE_SRUN/started"
if [ -e "$FAKE_SRUN/exit" ]; then exit "$(cat "$FAKE_SRUN/exit")"; fi
exec sleep 1000
"""


class StillWatch(JobWatch):
    """Says what the test sets, and asks nobody."""

    def __init__(self) -> None:
        super().__init__("7")
        self.asked = 0

    def start(self) -> None:
        pass

    def look_now(self) -> None:
        self.asked += 1

    def says(self, *nodes: str, end_time: float | None = None) -> None:
        self.view = JobView(nodes, end_time)
        self.answers += 1


class Shown:
    """What the keeper is shown of the run directory; while ``hangs``, nothing new."""

    def __init__(self, run: RunIdentity) -> None:
        self.ledger = Ledger(run.path / "ledger", "7-supervisor-main")
        self.verdict: dict[str, Any] | None = None
        self.status: dict[str, Any] = {}
        self.hangs = self.gone = False
        self.ends: list[tuple[str, float | None]] = []

    def seen_since(self, moment: float, now: float) -> bool:
        return not self.hangs and now > moment

    def move_end(self, key: str, end_time: float | None) -> None:
        self.ends.append((key, end_time))


def settled(placement: Placement) -> bool:
    process = placement.process
    if process is None or process.poll() is not None:
        return True
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep")


class Bench:
    """A keeper whose time the test drives."""

    def __init__(self, path: Path, nodes: int, leaves: bool = False) -> None:
        self.path = path
        self.now = 1000.0
        self.run = run_directory.open_run(path / "run")
        names = tuple(f"n{number}" for number in range(1, nodes + 1))
        options = LaunchOptions(script="train.py", kind="script", run_dir=str(self.run.path), join_timeout_s=100.0)
        settings = AgentSettings(options, "", "7", names, "")
        recipe = Recipe(settings, Allocation("7", names, "n1", False), by_srun=True)
        self.watch = StillWatch()
        self.files = Shown(self.run)
        site = Site(SiteMode.BATCH, "7", names, True)
        self.keeper = AgentKeeper(site, self.run, recipe, self.files, leaves, self.watch)

    def tick(self, seconds: float = 0.05) -> bool:
        """The keeper's clock stands until every srun has come to its end, or to its sleep."""
        until(lambda: all(settled(each) for each in self.keeper.placements), "sruns at rest", poll_s=0.001)
        self.now += seconds
        return self.keeper.tend(self.now)

    def until(self, reached: Callable[[], bool], seconds: float = 0.05) -> None:

        def reached_by_then() -> bool:
            if not reached():
                self.tick(seconds)
            return reached()

        until(reached_by_then, "what the keeper does", self.started, poll_s=0.0)

    def started(self) -> list[str]:
        path = self.path / "started"
        return path.read_text().split() if path.exists() else []

    def of(self, node: str) -> Placement:
        return next(each for each in self.keeper.placements if node in each.nodes)

    def kill(self, node: str) -> None:
        process = self.of(node).process
        assert process is not None
        process.kill()
        process.wait()

    def ending(self, code: int | None) -> None:
        """What sruns do from now on: end at once with this code, or run."""
        if code is None:
            (self.path / "exit").unlink()
        else:
            (self.path / "exit").write_text(str(code))

    def status(self, pulse: int, agents: list[str], lost: list[str]) -> None:
        self.files.status = {"epoch": 1, "pulse": pulse, "agents": {node: {} for node in agents}, "lost": lost}

    def kinds(self) -> list[str]:
        return [f"{event.kind} {event.fields.get('node', '')}" for event in read_ledger(self.run.path / "ledger")]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SRUN", str(tmp_path))
    made: list[Bench] = []

    def make(nodes: int, group: int = 1, leaves: bool = False) -> Bench:
        monkeypatch.setenv(GROUP_VARIABLE, str(group))
        made.append(Bench(tmp_path, nodes, leaves))
        return made[0]

    yield make
    for each in made:
        each.keeper.kill()
