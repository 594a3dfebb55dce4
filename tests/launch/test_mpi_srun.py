"""The srun of an MPI step, and what its end means: only srun itself is a stand-in."""

from __future__ import annotations

import os
import signal
import sys

from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking.spawner_messages import (
    AllStopped,
    Exited,
    SpawnFailed,
    Started,
)
from tests.support.launch.mpi_bench import MEMBER, NODE, RUN, WAIT, Bench, bench, gone

__all__ = ["bench"]

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
