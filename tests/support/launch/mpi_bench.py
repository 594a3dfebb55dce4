"""A bench for one node's part of an MPI step: a real spawner, and tasks started as slurmstepd would."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir import node_directories
from resilio_hpc.launch.workers.forking.spawner_messages import (
    RankCommand,
    SpawnerEvent,
)
from resilio_hpc.launch.workers.mpi import step
from resilio_hpc.launch.workers.mpi.spawner import MpiSpawner
from tests.support.environments import scrubbed
from tests.support.waiting import until

E = TypeVar("E")
RUN, NODE = "run-under-test", "n4"
MEMBER = m.Member(NODE, 1, NODE, 2, 4)  # ranks 4 and 5


class Bench:
    """A spawner, and everything that it said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = f"{RUN}:{NODE}:{directory.name}"
        self.programs = directory / "bin"  # where a stand-in for srun may be put
        self.programs.mkdir()
        own = {process_tree.TOKEN_VARIABLE: self.token, "SLURM_JOB_ID": "1"}
        own |= {name: os.environ[name] for name in ("RESILIO_LOCAL_DIR",)}
        self.environment = scrubbed(PATH=f"{self.programs}:{os.environ['PATH']}", **own)
        self.local_dir = node_directories.local(RUN, NODE)
        self.spawner = MpiSpawner(self.environment, self.local_dir)
        self.seen: list[SpawnerEvent] = []
        self.tasks: list[subprocess.Popen[bytes]] = []

    def give(self, source: str, local_rank: int = 0, **variables: str) -> None:
        path = self.directory / f"script{local_rank}.py"
        path.write_text(textwrap.dedent(source))
        out = str(self.directory / f"{local_rank}.out")
        command = RankCommand(local_rank, (str(path),), "script", variables, str(self.directory), out, out)
        self.spawner.spawn(command)

    def task(self, number: int, round_number: int = 0) -> subprocess.Popen[bytes]:
        """A task as slurmstepd starts it."""
        environment = {**self.environment, "SLURMD_NODENAME": NODE, "SLURM_PROCID": str(number)}
        argv = step.task_argv(RUN, round_number)
        self.tasks.append(subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, start_new_session=True))
        return self.tasks[-1]

    def wait(self, kind: type[E], where: Callable[[E], bool] = lambda _: True) -> E:
        return self.until(lambda: next((e for e in self.seen if isinstance(e, kind) and where(e)), None), kind.__name__)

    def until(self, found: Callable[[], E | None], what: str) -> E:
        def looked() -> tuple[E] | None:
            if (result := found()) is None:
                select.select(list(self.spawner.filenos()), [], [], 0.05)
                self.seen += self.spawner.events()
                result = found()
            return None if result is None else (result,)

        return until(looked, what, lambda: f"{self.seen}; {self.output()}", poll_s=0.0)[0]

    def output(self, local_rank: int = 0) -> str:
        path = self.directory / f"{local_rank}.out"
        return path.read_text() if path.exists() else ""

    def line(self, local_rank: int = 0) -> str:
        """The first whole line of a rank's output."""
        return self.until(lambda: self.output(local_rank).partition("\n")[0] or None, "output")

    def close(self) -> None:
        self.spawner.kill()
        for task in self.tasks:
            task.kill()
            task.wait()
            if task.stderr is not None:
                task.stderr.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="mpi-") as local:  # a socket's path may have 107 bytes only
        monkeypatch.setenv("RESILIO_LOCAL_DIR", local)
        made = Bench(tmp_path)
        yield made
        made.close()
        # a rank that was about to start dies with its task, when it has its turn
        until(lambda: not process_tree.with_token(made.token), "the end of all tasks")


def gone(pid: int) -> bool | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z" or None
    except OSError:
        return True


WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
