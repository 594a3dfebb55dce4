"""What ranks leave in shared memory, and running, when they are stopped or have ended well."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from resilio_hpc.launch.process import process_tree

SEGMENTS = """
import os, time
from multiprocessing import resource_tracker, shared_memory
tracked = shared_memory.SharedMemory(create=True, size=4096)
forgotten = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(forgotten._name, "shared_memory")
own = os.open("/dev/shm/own-" + os.path.basename(tracked.name), os.O_CREAT | os.O_RDWR)
print(tracked.name, forgotten.name, os.readlink(f"/proc/self/fd/{own}"), "up", flush=True)
time.sleep(1000)
"""


def test_segments_of_shared_memory_go_with_the_ranks_and_a_users_own_file_stays(either) -> None:
    either.spawn(SEGMENTS)
    tracked, forgotten, own, _ = either.until(either.directory / "0.out", "up\n").split()
    try:
        either.stop(grace_s=0)
        assert not Path("/dev/shm", tracked).exists()
        assert not Path("/dev/shm", forgotten).exists()
        assert Path(own).exists()
    finally:
        Path(own).unlink()


def test_what_ranks_that_ended_well_have_left_is_not_killed(either) -> None:
    either.spawn("import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)")
    assert either.wait_exit().exit_code == 0
    left = int(either.out())
    either.stop(spare=True)
    assert not either.gone(left)
    either.stop(grace_s=0)
    assert either.gone(left)


def test_a_grace_is_only_for_ranks_that_handle_the_signal(either) -> None:
    handles = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        print("up", flush=True)
        time.sleep(1000)
        """
    ignores = handles.replace("lambda *_: sys.exit(5)", "signal.SIG_IGN")
    for rank, source in enumerate((handles, ignores)):
        either.spawn(source, rank=rank)
        either.until(either.directory / f"{rank}.out", "up")
    either.stop(signal=signal.SIGTERM, grace_s=1000, heeded_only=True)
    assert either.wait_exit(1).exit_code == 5
    assert either.wait_exit(2).signal == signal.SIGKILL
    either.spawn(ignores, rank=2)
    either.until(either.directory / "2.out", "up")
    either.stop(signal=signal.SIGTERM, grace_s=1000, heeded_only=True)
    assert either.wait_exit(3).signal == signal.SIGKILL


def test_a_killed_spawners_ranks_leave_no_segment_either(make_bench) -> None:
    bench = make_bench(use_zygote=False)
    bench.start()
    bench.spawn(SEGMENTS)
    tracked, forgotten, own, _ = bench.until(bench.directory / "0.out", "up\n").split()
    Path(own).unlink()
    os.kill(bench.pid(), signal.SIGSTOP)
    bench.spawner.kill()
    assert process_tree.with_token(bench.spawner.token) == []
    assert not any(Path("/dev/shm", name).exists() for name in (tracked, forgotten))
