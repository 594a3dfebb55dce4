"""A real run, looked at by somebody else on the same machine."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from tests.support.security.another_user import as_another_user, needs_root
from tests.support.security.live_run import Running


def below(base: Path) -> list[Path]:
    """All that is there now: the run goes on meanwhile, and removes old checkpoints."""
    return [Path(folder) / name for folder, folders, names in os.walk(base) for name in (*folders, *names)]


def sockets(running: Running) -> list[Path]:
    return [path for base in running.local for path in below(base) if path.is_socket()]


def files(running: Running) -> list[Path]:
    return [path for base in running.local for path in below(base) if path.is_file()]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # the run has removed it
        return b""


def connect(path: Path) -> str:
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as link:
            try:
                link.connect(str(path))
            except OSError as error:
                last = type(error).__name__
            else:
                return "connected"
    return last


def test_the_secret_is_in_its_file_and_nowhere_else(running: Running) -> None:
    """Not in arguments, environments, logs, ledger, status, spool or arenas."""
    processes = running.processes()
    assert len(processes) >= 5  # supervisor, agent, zygote, two ranks: else the search found nothing
    for pid in processes:
        for name in ("cmdline", "environ"):
            try:
                assert running.secret not in (Path("/proc") / str(pid) / name).read_bytes(), f"{name} of {pid}"
            except OSError:  # it has ended
                continue
    kept = [path for path in [*below(running.path), *files(running)] if path.is_file()]
    assert len(kept) > 8
    holders = [path for path in kept if running.secret in content(path)]
    assert holders == [running.path / "secret"]


def test_a_run_keeps_its_things_in_closed_directories(running: Running) -> None:
    assert {base.parent for base in running.local} == {Path("/tmp"), Path("/dev/shm")}
    for base in running.local:
        assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert sockets(running)
    assert stat.S_IMODE((running.path / "secret").stat().st_mode) == 0o600


def test_no_socket_is_in_the_abstract_namespace(running: Running) -> None:
    """Those have no permissions: everybody may connect."""
    ours = {link for pid in running.processes() for link in descriptors(pid)}
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    abstract = [
        line[7] for line in listed if len(line) > 7 and line[7].startswith("@") and f"socket:[{line[6]}]" in ours
    ]
    assert abstract == []


def descriptors(pid: int) -> list[str]:
    try:
        return [str(path.readlink()) for path in (Path("/proc") / str(pid) / "fd").iterdir()]
    except OSError:
        return []


@needs_root
def test_another_user_reads_no_secret_and_enters_no_directory_of_ours(running: Running) -> None:
    assert as_another_user(lambda: (running.path / "secret").read_text()) == "PermissionError"
    for base in running.local:
        assert as_another_user(lambda base=base: [str(path) for path in base.iterdir()]) == "PermissionError"
    for file in files(running):
        assert as_another_user(lambda file=file: file.read_bytes().hex()) == "PermissionError"


@needs_root
def test_another_user_reaches_no_socket_of_ranks_and_agents(running: Running) -> None:
    for path in sockets(running):
        assert connect(path) == "connected"
        assert as_another_user(lambda path=path: connect(path)) == "PermissionError"


@needs_root
def test_another_user_changes_nothing_in_the_run_directory(running: Running) -> None:
    for path in [running.path, *(path for path in below(running.path) if path.is_dir())]:
        answer = as_another_user(lambda path=path: (path / "planted").write_text("x"))
        assert answer == "PermissionError" or (answer == "FileNotFoundError" and not path.exists()), path


@needs_root
def test_another_user_sees_no_memory_or_environment_of_our_processes(running: Running) -> None:
    for pid in running.processes():
        for name in ("environ", "mem", "fd"):
            path = Path("/proc") / str(pid) / name
            if path.exists():
                answer = as_another_user(lambda path=path: look_into(path))
                assert answer in ("PermissionError", "FileNotFoundError"), path


def look_into(path: Path) -> str:
    return str([str(entry) for entry in path.iterdir()] if path.is_dir() else path.read_bytes())
