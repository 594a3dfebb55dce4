"""The agent or the spawner dies: nothing goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from resilio_hpc.core.errors import LaunchError
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.spawner import Exited, Ready, Spawner, SpawnerDied, Started

RANK_WITH_DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open("daemon", "w") as file: file.write(f"{os.getpid()}\\n")
            time.sleep(1000)
        os._exit(0)
    os.wait()
    print("up")
    time.sleep(1000)
"""
AGENT = """
    import os, select, sys, time
    from pathlib import Path
    from resilio_hpc.launch.workers.spawner import RankCommand, Spawner
    here = Path(sys.argv[1])
    environment = {**os.environ, "RESILIO_TREE_TOKEN": sys.argv[2]}
    spawner = Spawner(environment, use_zygote=sys.argv[3] == "fork", directory=here)
    spawner.start()
    for r in range(2):
        out, err = f"{here}/{r}.out", f"{here}/{r}.err"
        spawner.spawn(RankCommand(r, ("script.py",), "script", {}, str(here), out, err))
    spawner.open_store(0, "localhost")
    print(spawner.pid, flush=True)
    while True:
        for event in spawner.events(): print(event, flush=True)
        time.sleep(0.01)
"""


def start_rank(bench) -> tuple[int, int]:
    bench.spawn(RANK_WITH_DAEMON)
    bench.until(bench.directory / "0.out", "up")
    return bench.pid(), int(bench.until(bench.directory / "daemon"))


@pytest.mark.parametrize("mode", ["fork", "exec"])
def test_when_the_agent_is_killed_everything_goes_daemons_included(bench, mode: str) -> None:
    (bench.directory / "agent.py").write_text(textwrap.dedent(AGENT))
    bench.script(RANK_WITH_DAEMON, "script.py")
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    with (bench.directory / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            [sys.executable, bench.directory / "agent.py", bench.directory, token, mode], stdout=log, stderr=log
        )
    try:
        bench.until(bench.directory / "agent.log", "StoreReady")
        for rank in range(2):
            bench.until(bench.directory / f"{rank}.out", "up")
        tree = process_tree.descendants(agent.pid)
        assert len(tree) >= 5  # spawner, two ranks, the store, at least one daemon
    finally:
        agent.kill()
        agent.wait()
    bench.wait_gone(*tree)
    assert process_tree.with_token(token) == []


def test_when_the_spawner_is_killed_everything_goes_and_it_can_be_started_again(make_bench) -> None:
    bench = make_bench(use_zygote=False)
    bench.start()
    rank, daemon = start_rank(bench)
    spawner = bench.spawner.pid
    os.kill(spawner, signal.SIGKILL)
    died = bench.wait(SpawnerDied)
    assert (died.exit_code, died.signal) == (None, signal.SIGKILL)
    assert daemon in died.swept
    bench.wait_gone(rank, daemon)
    bench.seen.clear()
    bench.start()
    assert bench.run("print('again')").exit_code == 0


def test_a_killed_zygote_takes_its_forked_ranks_along(make_bench) -> None:
    bench = make_bench(torch=False)
    bench.start()
    rank, daemon = start_rank(bench)
    assert bench.wait(Started).mode == "fork"
    os.kill(bench.spawner.pid, signal.SIGKILL)
    bench.wait(SpawnerDied)
    bench.wait_gone(rank, daemon)


def test_a_hanging_spawner_is_killed_with_its_ranks(make_bench) -> None:
    bench = make_bench(use_zygote=False)
    bench.start()
    rank, daemon = start_rank(bench)
    os.kill(bench.spawner.pid, signal.SIGSTOP)
    bench.spawner.stop()  # does not block
    died = bench.spawner.kill()
    assert died is not None and died.signal == signal.SIGKILL
    bench.wait_gone(rank, daemon)
    assert bench.spawner.kill() is None


def test_a_hanging_spawner_does_not_block_the_agent(make_bench) -> None:
    bench = make_bench(use_zygote=False)
    bench.start()
    path = str(bench.script("pass"))
    os.kill(bench.spawner.pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match="hangs"):
        for _ in range(100_000):
            bench.command("script", path)


def test_the_next_agent_sweeps_what_an_earlier_one_left(tmp_path: Path) -> None:
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, process_tree.TOKEN_VARIABLE: token})
    other = subprocess.Popen(["sleep", "1000"], env={**os.environ, process_tree.TOKEN_VARIABLE: token + "0"})
    try:
        assert process_tree.sweep(token) == [left.pid]
        assert left.wait() == -signal.SIGKILL or left.returncode == 0  # sweep may have reaped it
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_spawner_is_started_once_and_used_only_while_it_runs(tmp_path: Path) -> None:
    spawner = Spawner(dict(os.environ), use_zygote=False, directory=tmp_path)
    with pytest.raises(LaunchError, match=r"start\(\) first"):
        spawner.stop()
    spawner.start()
    try:
        with pytest.raises(LaunchError, match="runs already"):
            spawner.start()
    finally:
        spawner.kill()
    assert spawner.events() == []


def test_ready_comes_before_what_was_asked_for_before_it(make_bench) -> None:
    bench = make_bench(use_zygote=False)
    bench.spawner.start()
    bench.spawn("pass")
    bench.wait(Exited)
    assert isinstance(bench.seen[0], Ready)


def test_a_sigterm_that_slurm_gives_to_the_whole_step_does_not_end_the_spawner(bench) -> None:
    """With proctrack/linuxproc every process of a step gets it; only the agent's death may end the spawner."""
    bench.spawn("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(1000)")
    bench.until(bench.directory / "0.out", "up")
    os.kill(bench.spawner.pid, signal.SIGTERM)
    bench.spawn("print('still here')", rank=1)
    bench.until(bench.directory / "1.out", "still here")
