"""Standby processes as images: CRIU dumps a real one, and restores it in the place of a rank that is killed.

Where a CRIU hangs, a command that sleeps stands in for it.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.checks import check_process_images
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.reentry_options import ReentryOptions
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers import process_images
from resilio_hpc.launch.workers.forking.image_restore import ImageRestore
from resilio_hpc.launch.workers.forking.spawned_processes import SpawnedProcesses
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand, RankImage
from resilio_hpc.launch.workers.process_images import ImageDump, ProcessImages
from tests.support.criu import real_criu
from tests.support.launch.reentry_runs import ReentryOutcome
from tests.support.waiting import until

IMAGES = ("--spare-ranks", "1", "--process-images", "on")


@pytest.mark.slow
def test_a_restored_process_takes_the_place_of_the_rank_that_is_killed(tmp_path: Path) -> None:
    real_criu()
    done = ReentryOutcome(tmp_path, "killed, state outside, standby, image waits", *IMAGES)
    done.check()
    (used,) = done.events("standby_used")
    assert used["rank"] == 1 and used["restored_s"] > 0
    assert used["pid"] == done.events("process_image")[0]["pid"], "the process that was dumped"
    assert done.processes()[1][1] == str(used["pid"])
    assert done.events("process_image_failed") == []
    assert {rank for rank, _ in done.said("BORN")} == {"0", "1"}, "no rank was started again"
    assert [event["kept"] for event in done.events("ranks")] == [0, 2]


@pytest.mark.slow
def test_where_an_image_cannot_be_restored_a_new_rank_starts(tmp_path: Path) -> None:
    real_criu()
    done = ReentryOutcome(tmp_path, "killed, state outside, standby, image waits, damaged", *IMAGES)
    done.check()
    (failed,) = done.events("process_image_failed")
    assert (failed["what"], failed["pid"]) == ("restored", done.events("process_image")[0]["pid"])
    assert done.events("standby_used") == []
    assert len({*done.processes()[1]}) == 2 and len({*done.processes()[0]}) == 1


@pytest.mark.slow
def test_a_process_that_cannot_be_dumped_waits_in_memory(tmp_path: Path) -> None:
    real_criu()
    done = ReentryOutcome(tmp_path, "killed, state outside, standby, image waits, connected", *IMAGES)
    done.check()
    (failed,) = done.events("process_image_failed")
    assert failed["what"] == "dumped" and "tcp" in failed["reason"].lower()
    (used,) = done.events("standby_used")
    assert (used["pid"], used["rank"], "restored_s" in used) == (failed["pid"], 1, False)


# -- without a run -----------------------------------------------------------------------------------------------


@pytest.fixture
def hung(tmp_path: Path) -> str:
    program = tmp_path / "criu"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def standby() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def image(folder: Path, program: str, pid: int) -> RankImage:
    log, link = str(folder / "standby1.log"), str(folder / "agent.sock")
    command = RankCommand(-1, ("t.py",), "script", {"RESILIO_AGENT_SOCKET": link}, "/", log, log)
    return RankImage(program, str(folder), pid, 1, command, 0.2)


def test_a_dump_that_hangs_is_ended_with_the_process_that_it_may_have_changed(
    tmp_path: Path, hung: str, standby: subprocess.Popen[bytes]
) -> None:
    dump = ImageDump(image(tmp_path, hung, standby.pid), 0.2)
    until(dump.is_over, "the end of the dump")
    assert dump.failed == "no image in 0.2 s"
    assert standby.wait(20) == -9


def test_a_restore_that_hangs_is_ended(tmp_path: Path, hung: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(20)
    given = image(tmp_path, hung, ended.pid)
    processes = SpawnedProcesses()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        agent.listen()
        restore = ImageRestore(given.command, given, processes)
        criu = max(processes.awaited)
        until(lambda: restore.look() is not None, "the end of the restore")
    assert restore.look() == "not done in 0.2 s"
    until(lambda: processes.reap() == [] and not process_tree.runs(criu), "the end of CRIU")
    assert processes.awaited == {}


def test_a_process_whose_number_another_one_has_is_not_restored(
    tmp_path: Path, hung: str, standby: subprocess.Popen[bytes]
) -> None:
    given = image(tmp_path, hung, standby.pid)
    restore = ImageRestore(given.command, given, SpawnedProcesses())
    assert restore.look() == f"another process has its number, {standby.pid}"
    assert standby.poll() is None


def test_a_full_disk_leaves_the_process_in_memory(
    tmp_path: Path, standby: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(process_images, "KEPT_FREE", 1.0)  # as if all of the disk had to stay free
    options = SimpleNamespace(reentry=ReentryOptions(spare_ranks=1, process_images="on"))
    node: Any = SimpleNamespace(local_dir=tmp_path, options=options, tell=lambda kind, **fields: told.append(fields))
    (tmp_path / "criu").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    images = ProcessImages(node)
    command = image(tmp_path, "", standby.pid).command
    assert images.begin(command, standby.pid) is None
    assert images.begin(command, standby.pid) is None
    (failed,) = told
    assert failed["what"] == "dumped" and "GB are too much for" in failed["reason"]
    assert standby.poll() is None


@pytest.mark.parametrize(
    ("spares", "text", "why"),
    [
        (0, "exit 0", "add --spare-ranks"),
        (1, "", "no criu in PATH"),
        (1, "echo 'Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds' >&2; exit 1", "vdso: Unexpected"),
    ],
)
def test_it_is_refused_where_nothing_can_be_dumped(tmp_path: Path, spares: int, text: str, why: str) -> None:
    if text:
        (tmp_path / "criu").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "criu").chmod(0o755)
    options = LaunchOptions(script="x.py", kind="script", run_dir="/tmp/no-run-yet")
    options = replace(options, reentry=ReentryOptions(spare_ranks=spares, process_images="on"))
    with pytest.raises(UsageError, match=f"--process-images: .*{why}"):
        check_process_images(options, {"PATH": str(tmp_path)}, True)
