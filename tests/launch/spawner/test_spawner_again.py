"""A rank starts again alone: after what its last process left running, and never once its round is over."""

from __future__ import annotations

import os
import signal

from resilio_hpc.launch.workers.spawner import AllStopped, Started

LEAVES = """
    import os, subprocess, sys, time
    long = [sys.executable, "-c", "import time; time.sleep(1000)"]
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
    pids = [forked, subprocess.Popen(long, start_new_session=True).pid]
    with open("left", "w") as file: file.write(" ".join(map(str, pids)) + "\\n")
    print("up", flush=True)
    time.sleep(1000)
"""
SLEEP = "import time; print('up', flush=True); time.sleep(1000)"


def test_only_the_ranks_own_leftovers_end_before_it_starts_again(either) -> None:
    bench = either
    other = {"RESILIO_LOCAL_RANK": "1"}
    bench.spawn(LEAVES.replace('"left"', '"others"'), rank=1, env=other)
    bench.spawn(LEAVES, rank=0, env={"RESILIO_LOCAL_RANK": "0"})
    left = [int(pid) for pid in bench.until(bench.directory / "left").split()]
    others = [int(pid) for pid in bench.until(bench.directory / "others").split()]
    first = bench.pid(0)
    os.kill(first, signal.SIGKILL)
    bench.wait_exit()
    assert not any(map(bench.gone, left))
    bench.command("script", str(bench.script(SLEEP, "again.py")), rank=0, env={"RESILIO_LOCAL_RANK": "0"}, after=first)
    bench.wait(Started, 2, lambda event: event.local_rank == 0)
    assert all(map(bench.gone, left))
    assert not any(map(bench.gone, [bench.pid(1), *others]))
    bench.stop()
    bench.wait_gone(*others)


def test_a_stop_cancels_a_start_that_waits_for_leftovers(either) -> None:
    bench = either
    for count in range(5):
        (bench.directory / "left").unlink(missing_ok=True)
        before = sum(isinstance(event, Started) for event in bench.seen)
        bench.spawn(LEAVES, rank=0, env={"RESILIO_LOCAL_RANK": "0"})
        first = bench.wait(Started, before + 1).pid
        bench.until(bench.directory / "left")
        os.kill(first, signal.SIGKILL)
        bench.command("script", str(bench.script(SLEEP, "again.py")), rank=0, after=first)
        bench.spawner.stop(signal.SIGKILL)
        bench.wait(AllStopped, 2 * count + 1)
        stopped = len(bench.seen)
        bench.spawn(SLEEP, rank=1)  # commands are carried out in their order
        bench.wait(Started, count + 1, lambda event: event.local_rank == 1)
        assert [event.local_rank for event in bench.seen[stopped:] if isinstance(event, Started)] == [1]
        bench.stop()
