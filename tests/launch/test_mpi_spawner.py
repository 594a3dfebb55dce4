"""One node's part of an MPI step, with real tasks, ranks and agents' sockets; only srun itself is a stand-in."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from resilio_hpc.launch import messages as m
from resilio_hpc.launch import mpi_step, process_tree, run_directory
from resilio_hpc.launch.mpi_spawner import RANK_VARIABLE, MpiSpawner
from resilio_hpc.launch.mpi_tasks import STEP_KILLED
from resilio_hpc.launch.spawner_messages import (
    AllStopped,
    Exited,
    RankCommand,
    SpawnerEvent,
    SpawnFailed,
    Started,
    StoreReady,
)

E = TypeVar("E")
RUN, NODE = "run-under-test", "n4"
MEMBER = m.Member(NODE, 1, NODE, 2, 4)  # ranks 4 and 5
PATIENCE_S = 40.0

# Starts a task for every line of the hostfile that names this node, as slurmstepd would, and waits for them.
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
assert "--mpi=pmix" in words and "SLURM_PROCID" not in os.environ, words
nodes = open(os.environ["SLURM_HOSTFILE"]).read().split()
task = words[words.index("-u") - 1:]
mine = [
    subprocess.Popen(task, env=dict(os.environ, SLURM_PROCID=str(i), SLURMD_NODENAME=node, PMI_FD="42"))
    for i, node in enumerate(nodes) if node == "{node}"
]
sys.exit(max(task.wait() for task in mine) & 255)
"""


class Bench:
    """A spawner, and everything that it said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = f"{RUN}:{NODE}:{directory.name}"
        self.programs = directory / "bin"  # where a stand-in for srun may be put
        self.programs.mkdir()
        self.environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            process_tree.TOKEN_VARIABLE: self.token,
            "SLURM_JOB_ID": "1",
        }
        self.local_dir, _ = run_directory.node_directories(RUN, NODE)
        run_directory.make_private(self.local_dir)
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
        argv = mpi_step.task_argv(RUN, round_number)
        self.tasks.append(subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, start_new_session=True))
        return self.tasks[-1]

    def wait(self, kind: type[E], where: Callable[[E], bool] = lambda _: True) -> E:
        return self.until(lambda: next((e for e in self.seen if isinstance(e, kind) and where(e)), None), kind.__name__)

    def until(self, found: Callable[[], E | None], what: str) -> E:
        deadline = time.monotonic() + PATIENCE_S
        while (result := found()) is None:
            assert time.monotonic() < deadline, f"no {what}: {self.seen}; {self.output()}"
            select.select(list(self.spawner.filenos()), [], [], 0.05)
            self.seen += self.spawner.events()
        return result

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
    monkeypatch.setenv("RESILIO_LOCAL_DIR", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    made = Bench(tmp_path)
    yield made
    made.close()
    assert process_tree.with_token(made.token) == []


def gone(pid: int) -> bool | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z" or None
    except OSError:
        return True


WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_a_task_becomes_the_rank_that_the_agent_gives_it(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give("import os; print(os.environ['RANK'], os.environ['SLURM_PROCID']); raise SystemExit(3)", 1, RANK="5")
    task = bench.task(5)
    started = bench.wait(Started)
    ended = bench.wait(Exited)
    assert (started.local_rank, started.mode) == (1, "mpi") and started.pid != task.pid
    assert (ended.local_rank, ended.pid, ended.exit_code, ended.signal) == (1, started.pid, 3, None)
    assert bench.output(1) == "5 5\n"
    assert task.wait(PATIENCE_S) == 3


def test_a_task_that_comes_first_waits_for_its_round(bench: Bench) -> None:
    bench.task(4, round_number=2)
    bench.spawner.expect(1, MEMBER)
    bench.give("print('of round 1')")
    bench.task(4, round_number=1)
    bench.wait(Exited)
    bench.spawner.expect(2, MEMBER)
    bench.give("print('of round 2')", 0)
    assert bench.wait(Exited, lambda event: event is not bench.seen[1]).exit_code == 0
    bench.until(lambda: bench.output().splitlines() == ["of round 1", "of round 2"] or None, "both")


def test_a_task_of_a_round_that_is_over_is_sent_away(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give("print('never')")
    bench.spawner.stop(signal.SIGKILL, 0.0, None)
    bench.wait(AllStopped)
    late = bench.task(4)
    bench.until(lambda: True if late.poll() is not None else None, "end of the late task")
    assert late.returncode == 0 and b"round 0 is over" in late.communicate()[1]
    assert not [event for event in bench.seen if isinstance(event, Started | SpawnFailed)]
    assert bench.output() == ""


def test_a_task_on_the_wrong_node_is_a_failed_start(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    bench.task(0)
    assert bench.wait(SpawnFailed).error == "srun put task 0 here, where 4 to 5 belong"


def test_a_program_that_does_not_exist_is_a_failed_start(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.spawner.spawn(RankCommand(0, ("./none",), "command", {}, str(bench.directory), "/dev/null", "/dev/null"))
    bench.task(4)
    assert bench.wait(SpawnFailed).error == "./none: no such program, or not executable"


def test_a_killed_rank_is_told_of_by_its_task(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    bench.task(4)
    os.kill(bench.wait(Started).pid, signal.SIGKILL)
    ended = bench.wait(Exited)
    assert (ended.exit_code, ended.signal) == (None, signal.SIGKILL)


def test_a_rank_dies_with_its_task_and_is_known_to_have_gone_with_the_step(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    task = bench.task(4)
    rank = bench.wait(Started).pid
    task.kill()
    assert bench.wait(Exited).exit_code == STEP_KILLED
    bench.until(lambda: gone(rank), "end of the rank")


DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(600)
        os._exit(0)
    time.sleep(600)
"""


def test_ranks_and_their_daemons_die_with_the_agent(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give(DAEMON)
    task = bench.task(4)
    rank, daemon = bench.wait(Started).pid, int(bench.line())
    for connection in list(bench.spawner._tasks._tasks.values()):
        connection.socket.close()  # what the kernel does for an agent that was killed
    bench.spawner._tasks._tasks.clear()
    bench.until(lambda: gone(rank) and gone(daemon), "end of the rank and its daemon")
    assert task.wait(PATIENCE_S) == 1


def test_a_stop_ends_daemons_and_frozen_ranks_too(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give(DAEMON, 0)
    bench.give(WAIT, 1)
    bench.task(4)
    bench.task(5)
    frozen = bench.wait(Started, lambda event: event.local_rank == 1).pid
    daemon = int(bench.line(0))
    bench.line(1)
    os.kill(frozen, signal.SIGSTOP)
    bench.spawner.stop(signal.SIGKILL, 0.0, None)
    bench.wait(AllStopped)
    assert gone(frozen) and gone(daemon)
    assert process_tree.with_token(bench.token, variable=RANK_VARIABLE) == []
    assert not [event for event in bench.seen if isinstance(event, Exited)]


def test_a_stop_with_grace_lets_ranks_end_by_themselves(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
        print("ready", flush=True)
        time.sleep(600)
    """)
    bench.task(4)
    bench.line()
    bench.spawner.stop(signal.SIGTERM, PATIENCE_S, None)
    bench.wait(AllStopped)
    assert bench.output() == "ready\nsaved\n"


def test_signals_that_slurm_gives_to_the_whole_step_are_left_to_the_agent(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    task = bench.task(4)
    rank = bench.wait(Started).pid
    bench.line()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        task.send_signal(number)
    os.kill(rank, signal.SIGUSR2)
    os.kill(rank, signal.SIGTERM)  # of a program that does not know us: its own affair, as everywhere
    ended = bench.wait(Exited)
    assert (ended.exit_code, ended.signal) == (None, signal.SIGTERM)


def test_a_rank_that_fails_does_not_wait_in_finalize(bench: Bench) -> None:
    bench.spawner.expect(0, MEMBER)
    bench.give("""
        import atexit, sys, time, types
        sys.modules["mpi4py.MPI"] = types.SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False)
        atexit.register(time.sleep, 600)  # as mpi4py's MPI_Finalize would, with peers that are not coming
        raise ValueError("planted")
    """, TORCHELASTIC_ERROR_FILE=str(bench.directory / "error.json"))  # fmt: skip
    bench.task(4)
    assert bench.wait(Exited).exit_code == 1
    assert "ValueError: planted" in bench.output()
    assert "planted" in json.loads((bench.directory / "error.json").read_text())["message"]["message"]


def test_a_port_is_kept_ready_for_programs_that_use_torch_too(bench: Bench) -> None:
    bench.spawner.open_store(3, "localhost")
    ready = bench.wait(StoreReady)
    assert ready.round == 3 and ready.port > 0


# -- srun ------------------------------------------------------------------------------------------------------------


def put_srun(bench: Bench, text: str) -> None:
    program = bench.programs / "srun"
    program.write_text(text)
    program.chmod(0o755)


def test_the_whole_of_a_round(bench: Bench) -> None:
    put_srun(bench, SRUN.format(python=sys.executable, node=NODE))
    bench.spawner.expect(0, MEMBER)
    for local_rank in (0, 1):
        bench.give("import os; print(os.environ['SLURM_PROCID'], os.environ['PMI_FD'])", local_rank)
    bench.spawner.launch(RUN, 0, "pmix", (m.Member("other", 0, "other", 4, 0), MEMBER))
    assert bench.wait(Exited, lambda event: event.local_rank == 0).exit_code == 0
    assert bench.wait(Exited, lambda event: event.local_rank == 1).exit_code == 0
    assert (bench.output(0), bench.output(1)) == ("4 42\n", "5 42\n")
    bench.spawner.stop(signal.SIGKILL, 0.0, None)
    bench.wait(AllStopped)
    assert not [event for event in bench.seen if isinstance(event, SpawnFailed)]


def test_an_srun_that_cannot_start_the_step_is_a_failed_start(bench: Bench) -> None:
    put_srun(bench, "#!/bin/sh\necho 'srun: error: Unable to create step' >&2\nexit 1\n")
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    bench.spawner.launch(RUN, 0, "pmix", (MEMBER,))
    wanted = "the srun of the MPI step ended with exit code 1: srun: error: Unable to create step"
    assert bench.wait(SpawnFailed).error == wanted


def test_a_step_that_failed_elsewhere_is_a_failed_start_though_our_ranks_ran(bench: Bench) -> None:
    text = "#!/bin/sh\nread _ <'{fifo}'\necho 'srun: error: Application launch failed: Socket timed out' >&2\nexit 1\n"
    fifo = bench.directory / "fifo"
    os.mkfifo(fifo)
    put_srun(bench, text.format(fifo=fifo))
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    bench.spawner.launch(RUN, 0, "pmix", (MEMBER,))
    bench.task(4)
    bench.wait(Started)
    fifo.write_text("go on\n")
    assert "Application launch failed" in bench.wait(SpawnFailed).error


def test_no_srun_at_all_is_a_failed_start(bench: Bench) -> None:
    bench.spawner._environment["PATH"] = str(bench.programs)
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    bench.spawner.launch(RUN, 0, "pmix", (MEMBER,))
    assert bench.wait(SpawnFailed).error == "cannot start srun: No such file or directory"


def test_a_killed_srun_is_noticed_while_ranks_run(bench: Bench) -> None:
    put_srun(bench, f"#!/bin/sh\necho $$ >'{bench.directory}/srun.pid'\nexec sleep 600\n")
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    bench.spawner.launch(RUN, 0, "pmix", (MEMBER,))
    bench.task(4)
    bench.wait(Started)
    file = bench.directory / "srun.pid"
    os.kill(int(bench.until(lambda: (file.exists() and file.read_text()) or None, "srun")), signal.SIGKILL)
    assert bench.wait(SpawnFailed).error == "the srun of the MPI step was killed by signal 9"


def test_a_stop_is_over_when_srun_is_gone_however_stubborn(bench: Bench) -> None:
    put_srun(bench, f"#!/bin/sh\ntrap '' TERM\necho $$ >'{bench.directory}/srun.pid'\nexec sleep 600\n")
    bench.spawner.expect(0, MEMBER)
    bench.give(WAIT)
    bench.spawner.launch(RUN, 0, "pmix", (MEMBER,))
    file = bench.directory / "srun.pid"
    pid = int(bench.until(lambda: (file.exists() and file.read_text()) or None, "srun"))
    bench.spawner.stop(signal.SIGKILL, 0.0, None)
    bench.wait(AllStopped)
    assert gone(pid)
    assert not [event for event in bench.seen if isinstance(event, SpawnFailed)]
