"""After a job: what goes and what stays is one decision; nothing goes that the job's user could not remove."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles
from resilio_hpc.prolog_epilog.hooks.epilog import CleanupPlan, EndedJob, LeftEntry, Policy, Running, decide, job_of
from resilio_hpc.prolog_epilog.hooks.process_cleanup import carry_out, end, see_entries, see_processes
from tests.support.environments import open_the_way_to
from tests.support.requirements import need_root
from tests.support.waiting import PATIENCE_S

USER = 20001
JOB = EndedJob("7", USER)
POLICY = Policy(
    clean=("/dev/shm", "/tmp"),
    cached=("/nvme",),
    keep=("resilio-steps-*",),
    keep_hours=24,
    keep_count=2,
    keep_in_memory=("resilio-*",),
    keep_in_memory_minutes=5,
    grace_s=0.2,
    least_user=1000,
)


def running(pid: int, job: str = "7", user: int = USER, name: str = "python", parent: int = 1) -> Running:
    return Running(pid, 100, user, job, name, parent)


def entry(place: str, name: str, age_s: float = 10.0, user: int = USER) -> LeftEntry:
    return LeftEntry(place, name, user, age_s)


def left(plan: CleanupPlan) -> tuple[list[int], list[str], list[str]]:
    """What is killed, removed and kept."""
    return [one.pid for one in plan.kill], [one.name for one in plan.remove], [one.name for one in plan.kept]


FILES = [entry("/dev/shm", "mine"), entry("/tmp", "theirs", user=20002), entry("/tmp", "system", user=0)]


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([], ([], ["mine"], [])),
        ([running(5)], ([5], ["mine"], [])),
        ([running(5), running(6, user=20002)], ([5], ["mine"], [])),
        ([running(5), running(6, job="8")], ([5], [], ["mine"])),  # another job of the user
        ([running(5), running(6, job="")], ([5], [], ["mine"])),  # logged in, or an environment that cannot be read
        ([running(5), running(6, "7", 0, "slurmstepd")], ([5], ["mine"], [])),  # our own step, about to end
        ([running(6, "8", 0, "slurmstepd")], ([], [], ["mine"])),  # a step whose user cannot be told
        ([running(6, "8", 0, "slurmstepd"), running(9, "8", 20002, parent=6)], ([], ["mine"], [])),
        ([running(5, "7", 0)], ([], ["mine"], [])),  # root's, whatever its environment says
    ],
)
def test_who_is_still_here_decides_what_goes(
    processes: list[Running], expected: tuple[list[int], list[str], list[str]]
) -> None:
    assert left(decide(JOB, processes, FILES, POLICY)) == expected


def test_what_a_successor_reads_is_kept() -> None:
    files = [
        entry("/nvme", "resilio-steps-20001-a", 300),
        entry("/nvme", "resilio-steps-20001-b", 100),
        entry("/nvme", "resilio-steps-20001-c", 200),
        entry("/nvme", "scratch"),
        entry("/dev/shm", "resilio-20001-run"),
        entry("/dev/shm", "resilio-20001-old", 4000),
        entry("/tmp", "resilio-steps-here"),
    ]
    _, removed, kept = left(decide(JOB, [], files, POLICY))
    assert kept == ["resilio-steps-20001-b", "resilio-steps-20001-c", "resilio-20001-run", "resilio-steps-here"]
    assert removed == ["resilio-steps-20001-a", "scratch", "resilio-20001-old"]
    old = [replace(one, age_s=25 * 3600) for one in files]
    assert left(decide(JOB, [], old, POLICY))[2] == []


def test_a_job_of_the_system_leaves_nothing_to_remove() -> None:
    plan = decide(EndedJob("7", 0), [running(5, user=0)], [entry("/tmp", "x", user=0)], POLICY)
    assert left(plan) == ([], [], []) and "system" in plan.why


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7; rm", "SLURM_JOB_UID": "1"}])
def test_without_slurms_environment_nothing_is_done(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="Slurm's Epilog"):
        job_of(environment)


# ---- carried out


def start(*argv: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, env={**os.environ, **env}, start_new_session=True)


def test_processes_are_known_by_their_job_and_end_even_if_they_ignore_it() -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(99)"
    )
    process = subprocess.Popen(
        [shutil.which("python3") or "python3", "-c", stubborn],
        env={**os.environ, "SLURM_JOB_ID": "424242"}, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    other = start("sleep", "99", SLURM_JOB_ID="424243")
    try:
        assert process.stdout and process.stdout.read(1) == b"x"
        seen = [one for one in see_processes(NodeFiles()) if one.job == "424242"]
        assert [one.pid for one in seen] == [process.pid]
        assert end(seen, 0.2) == 1
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for one in (process, other):
            one.kill()
            one.wait()
        if process.stdout:
            process.stdout.close()


def test_a_number_that_another_process_has_got_since_is_left_alone() -> None:
    other = start("sleep", "99")
    try:
        assert end([Running(other.pid, 1, os.geteuid(), "7", "sleep", 1)], 0.1) == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_removal_is_the_users_and_follows_no_link(tmp_path: Path) -> None:
    need_root()
    open_the_way_to(tmp_path)
    shared, kept = tmp_path / "shm", tmp_path / "kept"
    shared.mkdir()
    shared.chmod(0o1777)
    kept.mkdir()
    (kept / "precious").write_text("x")
    mine = shared / "mine"
    mine.mkdir()
    (mine / "deep").mkdir()
    (mine / "deep" / "link").symlink_to(kept)
    (shared / "link").symlink_to(kept)
    (shared / "roots").write_text("x")
    for path in (mine, mine / "deep", shared / "link"):
        os.chown(path, USER, USER, follow_symlinks=False)
    os.chown(mine / "deep" / "link", USER, USER, follow_symlinks=False)
    policy = replace(POLICY, clean=("/shm",), cached=())
    files = NodeFiles(tmp_path)
    entries = see_entries(files, policy.clean, time.time())
    plan = decide(JOB, [], entries, policy)
    assert sorted(one.name for one in plan.remove) == ["link", "mine"]
    forged = replace(plan, remove=(*plan.remove, LeftEntry("/shm", "roots", USER, 0.0)))
    done = carry_out(JOB, forged, policy, files)
    assert [Path(path).name for path in done.removed] == ["link", "mine"]
    assert [text.rpartition(": ")[2] for text in done.failed] == ["Operation not permitted"]
    assert (kept / "precious").exists() and (shared / "roots").exists() and not mine.exists()
