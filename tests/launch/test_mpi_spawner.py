"""One node's part of an MPI step, with real tasks, ranks and agents' sockets."""

from __future__ import annotations

import json
import os
import signal

from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking.spawner_messages import (
    AllStopped,
    Exited,
    RankCommand,
    SpawnFailed,
    Started,
    StoreReady,
)
from resilio_hpc.launch.workers.mpi.spawner import RANK_VARIABLE
from resilio_hpc.launch.workers.mpi.tasks import STEP_KILLED
from tests.support.launch.mpi_bench import MEMBER, WAIT, Bench, bench, gone
from tests.support.waiting import PATIENCE_S

__all__ = ["bench"]


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
    bench.wait(Started)  # the spawner knows of it
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
