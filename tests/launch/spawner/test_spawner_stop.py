"""Ranks end: what the agent hears, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import time

import pytest

from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.spawner import AllStopped, Exited, Started, StopFailed

SLEEP = "import time; print('up'); time.sleep(1000)"
IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(1000)"
DAEMONS = """
    import os, subprocess, sys, time
    def start(detach):
        pid = os.fork()
        if pid == 0:
            detach()
            with open("pids", "a") as file: file.write(f"{os.getpid()}\\n")
            time.sleep(1000)
    def double_fork():
        os.setsid()
        if os.fork() > 0: os._exit(0)
    start(lambda: None)
    start(os.setsid)
    start(double_fork)
    with open("/dev/null") as null: child = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
    with open("pids", "a") as file: file.write(f"{child.pid}\\n")
    while len(open("pids").read().split()) < 4: time.sleep(0.01)
    print("up")
"""
FORKS_WITHOUT_END = """
    import os, time
    print("up")
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.01)
            if os.fork() > 0: os._exit(0)
        else:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]: pass
            except ChildProcessError: pass
            time.sleep(0.01)
"""


def up(bench, source: str, ranks: int = 1) -> list[int]:
    for rank in range(ranks):
        bench.spawn(source, rank=rank)
    for rank in range(ranks):
        bench.until(bench.directory / f"{rank}.out", "up")
    return [bench.pid(rank) for rank in range(ranks)]


def test_a_killed_rank_is_reported_with_its_signal_at_once(either) -> None:
    (pid,) = up(either, SLEEP)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    exited = either.wait_exit()
    assert (exited.local_rank, exited.pid, exited.exit_code, exited.signal) == (0, pid, None, signal.SIGKILL)
    assert killed <= exited.time <= time.time()
    assert exited.mode == either.wait(Started).mode


def test_stop_without_grace_kills_at_once(either) -> None:
    pids = up(either, IGNORES_SIGTERM, ranks=4)
    stopped = either.stop(grace_s=0)
    assert all(either.gone(pid) for pid in pids)
    exits = [event for event in either.seen if isinstance(event, Exited)]
    assert sorted(event.local_rank for event in exits) == [0, 1, 2, 3]
    assert {event.signal for event in exits} == {signal.SIGKILL}
    assert either.seen.index(stopped) > either.seen.index(exits[-1])


def test_stop_with_grace_lets_ranks_end_by_themselves(bench) -> None:
    up(
        bench,
        """
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
        print("up")
        time.sleep(1000)
        """,
    )
    bench.stop(signal=signal.SIGUSR1, grace_s=1000)
    assert bench.wait_exit().exit_code == 5


def test_stop_kills_ranks_that_ignore_the_signal_when_the_grace_is_over(bench) -> None:
    up(bench, IGNORES_SIGTERM)
    stopped = bench.stop(grace_s=0.2)
    assert bench.wait_exit().signal == signal.SIGKILL
    assert stopped.seconds >= 0.2


def test_a_second_stop_cuts_the_grace_short(bench) -> None:
    up(bench, IGNORES_SIGTERM)
    bench.spawner.stop(grace_s=1000)
    bench.stop(grace_s=0)
    assert bench.wait_exit().signal == signal.SIGKILL


def test_a_stopped_rank_is_continued_to_hear_the_signal(bench) -> None:
    (pid,) = up(
        bench,
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
        print("up")
        time.sleep(1000)
        """,
    )
    os.kill(pid, signal.SIGSTOP)
    bench.stop(grace_s=1000)
    assert bench.wait_exit().exit_code == 6


def test_a_rank_that_is_told_to_stop_right_after_its_start_hears_it(bench) -> None:
    for rank in range(4):
        bench.spawn("import time; time.sleep(1000)", rank=rank)
    bench.stop(grace_s=1000)
    exits = [event for event in bench.seen if isinstance(event, Exited)]
    assert [event.signal for event in exits] == [signal.SIGTERM] * 4


def test_children_sessions_daemons_and_unmarked_programs_go_with_their_rank(either) -> None:
    up(either, DAEMONS)
    assert either.wait_exit().exit_code == 0
    left = [int(word) for word in (either.directory / "pids").read_text().split()]
    assert len(left) == 4
    assert not any(either.gone(pid) for pid in left)
    either.stop(grace_s=1000)
    assert all(either.gone(pid) for pid in left)


def test_processes_that_fork_while_being_killed_are_caught(bench) -> None:
    up(bench, FORKS_WITHOUT_END)
    bench.stop(grace_s=0)
    assert bench.spawner.pid is not None
    assert process_tree.descendants(bench.spawner.pid) == []
    assert process_tree.with_token(bench.spawner.token) == [bench.spawner.pid]


def test_a_rank_that_closes_every_descriptor_is_followed_all_the_same(bench) -> None:
    exited = bench.run("import os; os.closerange(0, 4096); os._exit(4)")
    assert exited.exit_code == 4
    up(bench, "import os, time; print('up'); os.closerange(0, 4096); time.sleep(1000)", ranks=1)
    bench.stop(grace_s=0)


def test_ranks_asked_for_during_a_stop_start_after_it(bench) -> None:
    up(bench, IGNORES_SIGTERM)
    bench.spawner.stop(grace_s=0.1)
    bench.spawn("print('next round')", rank=1)
    bench.wait(Exited, where=lambda event: event.local_rank == 1)
    kinds = [type(event) for event in bench.seen]
    assert kinds.index(AllStopped) < kinds.index(Started, 1)
    assert bench.out(1) == "next round\n"


def test_processes_that_outlive_sigkill_are_named_and_not_waited_for(make_bench, tmp_path_factory) -> None:
    """With no time at all to die, a process that frees much memory counts as one that cannot; it goes after all."""
    bench = make_bench(use_zygote=False, kill_timeout_s=0.0)
    bench.start()
    failed: list[StopFailed] = []
    while not failed:  # on a busy machine it may be dead before the spawner looks
        bench.use(tmp_path_factory.mktemp("attempt"))
        (pid,) = up(bench, "import time; held = bytearray(b'x') * (400 << 20); print('up'); time.sleep(1000)")
        bench.stop(grace_s=0)
        failed = [event for event in bench.seen if isinstance(event, StopFailed)]
    assert pid in failed[0].pids


@pytest.mark.parametrize("times", [3])
def test_stopping_nothing_is_done_at_once(either, times: int) -> None:
    for _ in range(times):
        either.seen.clear()
        either.stop(grace_s=1000)


def test_kept_ranks_live_on_with_what_is_below_them_and_all_others_end(bench) -> None:
    with_child = """
        import subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(child.pid, "up", flush=True)
        time.sleep(1000)
    """
    pids = up(bench, with_child, ranks=3)
    children = [int(bench.out(rank).split()[0]) for rank in range(3)]
    bench.stop(grace_s=0, keep=(pids[1],))
    assert all(bench.gone(pid) for pid in (pids[0], pids[2], children[0], children[2]))
    assert not bench.gone(pids[1]) and not bench.gone(children[1])
    assert [event.local_rank for event in bench.seen if isinstance(event, Exited)] in ([0, 2], [2, 0])
    bench.spawn(SLEEP, rank=0)  # beside the one that was kept
    bench.until(bench.directory / "0.out", "up")
    bench.stop(grace_s=0)
    assert bench.gone(pids[1]) and bench.gone(children[1])


def test_an_order_that_keeps_none_ends_what_one_before_has_kept(bench) -> None:
    pids = up(bench, IGNORES_SIGTERM, ranks=2)
    bench.spawner.stop(signal.SIGTERM, 1000.0, keep=(pids[0],))
    bench.stop(grace_s=0)
    assert all(bench.gone(pid) for pid in pids)
