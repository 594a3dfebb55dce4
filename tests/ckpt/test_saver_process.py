"""Without a launcher the saver is a process of its own: who is killed when, and what is left then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.saver import detached_savers, saver_process
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from resilio_hpc.core.errors import CheckpointError, UsageError
from tests.support.environments import scrubbed
from tests.support.mounts import hanging
from tests.support.waiting import PATIENCE_S as WAIT_S
from tests.support.waiting import until

BEGIN = """
    import os, signal, sys, time
    import numpy as np
    from resilio_hpc.ckpt import Checkpointer
    checkpoint = Checkpointer(sys.argv[1])
    rank = checkpoint.place.rank
    def save(step):
        return checkpoint.save(step, {"x": np.full(300_000, step), "rank": rank})
    def told(*words):
        print(*words, flush=True)
"""


def children_of(pid: int) -> list[int]:
    """Its child processes, zombies too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def saver_of(pid: int) -> int:
    """The saver of a process: its one child."""
    (saver,) = children_of(pid)
    return saver


def session_of(pid: int) -> str:
    """``/autogroup-<N> nice <n>``, or nothing: some share the processors with all others that have no group."""
    return Path(f"/proc/{pid}/autogroup").read_text()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(directory: Path, code: str, rank: int = 0, world: int = 1) -> subprocess.Popen[str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environment = scrubbed(**{name: str(number) for name, number in numbers.items()})
    argv = [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(code), str(directory)]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def steps(directory: Path) -> list[int]:
    return Checkpointer(directory).steps()


def check_whole(directory: Path, expected: list[int]) -> None:
    """These steps, verified, and nothing else."""
    names = {"latest", *(f"step-{step:010d}" for step in expected)}
    until(lambda: {path.name for path in directory.iterdir()} == names, f"only {names} in {list(directory.iterdir())}")
    assert resilio_ckpt(["verify", str(directory)]) == 0


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[int]:
    """That of this process, at work before."""
    Checkpointer(tmp_path / "warm").save(1, {"x": 1}).wait(timeout_s=WAIT_S)
    pid = saver_process._idle[-1]._process.pid
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


_daemons: dict[Path, subprocess.Popen[bytes]] = {}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint directory with step 1 whose next commit hangs: its fence cannot be read. See ``open_gate``."""
    directory = tmp_path / "gated"
    Checkpointer(directory).save(1, {"x": np.full(300_000, 1), "rank": 0}).wait(timeout_s=WAIT_S)
    with hanging(directory / "epoch-fence", b"0\n") as _daemons[directory]:
        yield directory
    del _daemons[directory]


def open_gate(directory: Path) -> None:
    """What waits goes on, and nothing will wait any more. Twice is once."""
    _daemons[directory].send_signal(signal.SIGCONT)


def is_written(directory: Path) -> bool:
    """Is the part of step 2 written? ``glob`` would ask the file system that hangs."""
    names = [name for name in os.listdir(directory) if name.startswith(".staging-step-0000000002-")]  # noqa: PTH208
    return any((directory / name / ".shard-0.json").exists() for name in names)


KILLED = 'save(2); told("saved"); os.kill(os.getpid(), signal.SIGKILL)'


def test_a_process_killed_right_after_its_save_has_that_step(tmp_path: Path) -> None:
    """Also the very first one, which nobody has waited for."""
    code, out, err = ended(start(tmp_path / "there", KILLED))
    assert (code, out, err) == (-9, "saved\n", "")
    until(lambda: (tmp_path / "there" / "latest").exists(), "committed")
    check_whole(tmp_path / "there", [2])


def test_its_output_is_let_go_of_and_its_saver_ends(gate: Path) -> None:
    """Whoever reads what a killed process printed is not kept waiting by a saver that still writes."""
    code = 'save(2); told(open(f"/proc/self/task/{os.getpid()}/children").read()); time.sleep(1000)'
    process = start(gate, code)
    assert process.stdout is not None
    saver = int(process.stdout.readline())
    until(lambda: is_written(gate), "written")
    process.kill()
    assert ended(process) == (-9, "", "")
    until(lambda: list(gate.glob(".orphan-*")), "marked")
    assert is_alive(saver)
    assert "libtorch" not in Path(f"/proc/{saver}/maps").read_text()
    open_gate(gate)
    until(lambda: not is_alive(saver), "its end")
    assert steps(gate) == [1, 2]
    assert sorted(path.name for path in gate.iterdir())[0] == "epoch-fence"


def left_alone(directory: Path) -> int:
    """A run is killed while its saver is about to commit step 2; that saver."""
    process = start(directory, "save(2); time.sleep(1000)")
    until(lambda: is_written(directory), "written")
    saver = saver_of(process.pid)
    process.kill()
    ended(process)
    until(lambda: list(directory.glob(".orphan-*")), "marked")
    return saver


def test_a_restore_waits_for_the_saver_of_the_killed_run(gate: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left_alone(gate)
    found: list[object] = []
    restoring = threading.Thread(target=lambda: found.append(Checkpointer(gate).restore()))
    restoring.start()
    said: list[str] = []

    def is_told() -> bool:
        said.append(capfd.readouterr().err)
        return "a killed run's last save is still being written" in "".join(said)

    until(is_told, "a line on what it waits for")
    restoring.join(0.2)
    assert not found
    open_gate(gate)
    restoring.join(WAIT_S)
    assert found[0][0] == 2  # type: ignore[index]


def test_a_saver_that_hangs_alone_is_not_waited_for_and_commits_nothing_later(gate: Path) -> None:
    saver = left_alone(gate)
    detached_savers.wait_for_orphans(gate, stall_s=0.2)
    assert Checkpointer(gate).restore()[0] == 1  # type: ignore[index]
    assert not list(gate.glob(".orphan-*"))
    open_gate(gate)
    until(lambda: not is_alive(saver), "the saver's end")
    assert steps(gate) == [1]
    assert not list(gate.glob(".staging-*"))


def test_the_same_step_is_saved_again_once_the_saver_of_the_killed_run_is_through(gate: Path) -> None:
    """By a run that has not restored, and so has not waited."""
    left_alone(gate)
    handle = Checkpointer(gate).save(2, {"x": np.full(300_000, 22), "rank": 0})
    with pytest.raises(TimeoutError):
        handle.wait(timeout_s=0.3)
    assert list(gate.glob(".orphan-*"))
    open_gate(gate)
    handle.wait(timeout_s=WAIT_S)
    step, state = Checkpointer(gate).restore() or (0, {})
    assert (step, state["x"][0]) == (2, 22)
    assert resilio_ckpt(["verify", str(gate)]) == 0


def test_a_saver_that_is_killed_fails_that_save_and_the_next_has_another(saver: int, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path / "there")
    os.kill(saver, signal.SIGSTOP)
    lost = checkpoint.save(1, {"x": 1})
    os.kill(saver, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="the process that was writing it was killed by SIGKILL"):
        lost.wait(timeout_s=WAIT_S)
    checkpoint.save(2, {"x": 2}).wait(timeout_s=WAIT_S)
    assert saver not in children_of(os.getpid()), "a zombie is left"
    check_whole(tmp_path / "there", [2])


def test_a_saver_that_died_between_two_saves_costs_none(saver: int, tmp_path: Path) -> None:
    os.kill(saver, signal.SIGKILL)
    os.waitid(os.P_PID, saver, os.WEXITED | os.WNOWAIT)
    Checkpointer(tmp_path / "there").save(1, {"x": 1}).wait(timeout_s=WAIT_S)
    assert saver not in children_of(os.getpid()), "a zombie is left"


def test_patience_ends_while_the_saver_hangs_and_other_directories_have_another(saver: int, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path / "there", patience_s=0.1)
    os.kill(saver, signal.SIGSTOP)
    hung = checkpoint.save(1, {"x": 1})
    refused = checkpoint.save(2, {"x": 2})
    assert "step 1 is still being written" in refused.error
    Checkpointer(tmp_path / "other").save(1, {"x": 1}).wait(timeout_s=WAIT_S)
    os.kill(saver, signal.SIGCONT)
    hung.wait(timeout_s=WAIT_S)
    checkpoint.save(3, {"x": 3}).wait(timeout_s=WAIT_S)
    check_whole(tmp_path / "there", [1, 3])


@pytest.mark.parametrize("victims", [[1], [0], [0, 1]])
def test_ranks_killed_right_after_their_save_have_that_step(victims: list[int], tmp_path: Path) -> None:
    lives = {True: "save(2); os.kill(os.getpid(), signal.SIGKILL)", False: "save(2).wait(timeout_s=300)"}
    processes = [start(tmp_path, lives[rank in victims], rank, 2) for rank in (0, 1)]
    for rank, process in enumerate(processes):
        code, _, err = ended(process)
        assert code == (-9 if rank in victims else 0), err
    until(lambda: (tmp_path / "latest").exists(), "committed")
    check_whole(tmp_path, [2])


def test_rank_0_does_not_wait_long_for_one_that_was_killed_before_its_save(tmp_path: Path) -> None:
    impatient = """
        from resilio_hpc.ckpt.coordination import coordinator
        from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
        from resilio_hpc.ckpt.store.retention import Retention
        coordinator.use(LocalCoordinator(checkpoint.directory, os.environ, Retention(), alone_stall_s=2.0))
        checkpoint = Checkpointer(sys.argv[1])
    """
    code = "os.makedirs(sys.argv[1], exist_ok=True); os.kill(os.getpid(), signal.SIGKILL)"
    assert ended(start(tmp_path, code, 1, 2))[0] == -9
    assert ended(start(tmp_path, textwrap.dedent(impatient) + KILLED, 0, 2))[0] == -9  # last: its mark stays 2 s
    until(lambda: list(tmp_path.glob(".orphan-*")), "marked")
    until(lambda: not list(tmp_path.glob(".orphan-*")), "given up")
    assert steps(tmp_path) == []


def test_a_forked_child_neither_keeps_the_saver_alive_nor_ends_it(tmp_path: Path) -> None:
    code = """
        save(1).wait(timeout_s=300)
        saver = open(f"/proc/self/task/{os.getpid()}/children").read()
        if not os.fork():
            sys.exit(0)  # as a worker that ends by itself
        os.wait()
        save(2).wait(timeout_s=300)
        if not os.fork():
            Checkpointer(sys.argv[1] + "-child").save(7, {"x": 1}).wait(timeout_s=300)
            told(saver)
            time.sleep(1000)
        time.sleep(1000)
    """
    process = start(tmp_path / "there", code)
    assert process.stdout is not None
    saver = int(process.stdout.readline())
    (child,) = [pid for pid in children_of(process.pid) if pid != saver]
    assert saver_of(child) != saver
    process.kill()
    process.wait()
    until(lambda: not is_alive(saver), "the saver's end")
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)
    ended(process)
    assert steps(tmp_path / "there") == [1, 2]
    assert steps(tmp_path / "there-child") == [7]


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_where_no_process_can_be_started_a_thread_writes_and_that_is_said_once(executable: str, tmp_path: Path) -> None:
    code = f"sys.executable = {executable!r}; [save(step).wait(timeout_s=300) for step in (1, 2, 3)]"
    code, out, err = ended(start(tmp_path, code))
    assert (code, out, len(err.splitlines())) == (0, "", 1), err
    assert "no process of its own can write checkpoints" in err
    check_whole(tmp_path, [1, 2, 3])


def test_an_interpreter_that_ends_waits_for_its_saves_and_leaves_no_process(tmp_path: Path) -> None:
    code = 'save(1); save(2); told(open(f"/proc/self/task/{os.getpid()}/children").read())'
    code, out, err = ended(start(tmp_path, code))
    assert (code, err) == (0, "")
    assert not is_alive(int(out))
    check_whole(tmp_path, [1, 2])


def test_ctrl_c_ends_an_interpreter_that_waits_and_the_saver_goes_on(gate: Path) -> None:
    process = start(gate, "save(2); told(1)")
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    until(lambda: is_written(gate), "written")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    ended(process)
    open_gate(gate)
    until(lambda: steps(gate) == [1, 2], "committed")


def test_a_saver_gives_way_and_keeps_to_its_bandwidth(tmp_path: Path) -> None:
    has_sessions = Path("/proc/self/autogroup").is_file()  # where sessions share the processors
    ours = has_sessions and session_of(os.getpid())
    checkpoint = Checkpointer(tmp_path, gb_per_s=0.05)
    started = time.monotonic()
    checkpoint.save(1, {"x": np.ones(2_500_000)}).wait(timeout_s=WAIT_S)
    assert time.monotonic() - started > 0.39  # 20 MB
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(os.getpid())}
    savers = [pid for pid, line in lines.items() if b"local_saver" in line]
    assert savers
    for pid in savers:
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        if has_sessions:
            assert session_of(pid).split()[-2:] == ["nice", "10"]
            assert session_of(os.getpid()) == ours


@pytest.mark.parametrize("gb_per_s", [0.0, -1.0, float("nan")])
def test_a_bandwidth_that_is_none_is_refused(gb_per_s: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gb_per_s is a number of gigabytes per second"):
        Checkpointer(tmp_path, gb_per_s=gb_per_s)
