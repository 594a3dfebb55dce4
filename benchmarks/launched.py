"""A launcher under test: started, watched through its ranks' stamps, and removed with all that it started."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import stamps
from launchers import Launcher

POLL_S = 0.01
SHARED_MEMORY = Path("/dev/shm")
MARKER = "RESILIO_BENCHMARK_TRIAL"


@dataclass(frozen=True)
class Launched:
    """A running launcher and where its ranks write."""

    process: subprocess.Popen[bytes]
    directory: Path
    ranks: int

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Until the condition holds; False when the limit passed or the launcher ended before."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.process.poll() is not None:
                return condition()
            time.sleep(POLL_S)
        return False

    def stamps(self) -> list[list[stamps.Stamp]]:
        return stamps.read(self.directory, self.ranks)

    def wait_for_steps(self, count: int, limit_s: float) -> bool:
        """Until every rank's newest process has completed so many steps."""
        return self.wait_for(lambda: all(stamps.steps_done(rank) >= count for rank in self.stamps()), limit_s)

    def kill_a_rank(self, choice: random.Random, number: int = signal.SIGKILL) -> float:
        """Send the signal to one rank; the time just before it."""
        rank = choice.randrange(self.ranks)
        file = stamps.path_of(self.directory, rank)
        pids = [pid for pid in marked(str(self.directory)) if has_open(pid, file)]
        if not pids:
            raise RuntimeError(f"no process of this trial is rank {rank}")
        killed_at_s = time.time()
        for pid in pids:
            os.kill(pid, number)
        return killed_at_s

    def last_output(self) -> str:
        """Return the launcher's last lines, for a trial that went wrong."""
        return "\n".join((self.directory / "output").read_text(errors="replace").splitlines()[-8:])


def is_marked(pid: int, mark: str) -> bool:
    """Whether the process, or the one that it was forked from, was started by this trial."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # gone, or of another user
    return f"{MARKER}={mark}".encode() in environment


def has_open(pid: int, file: Path) -> bool:
    """Whether the process writes to the file: so a rank is known by its stamps, under any launcher."""
    try:
        return any(entry.readlink() == file for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def marked(mark: str) -> list[int]:
    """Every living process of the trial."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if is_marked(pid, mark)]


def shared_memory(pids: Sequence[int]) -> set[Path]:
    """Entries of /dev/shm that these processes have mapped; a launcher that is killed leaves them behind."""
    found = set()
    for pid in pids:
        try:
            found |= set(re.findall(r" /dev/shm/([^/\n]+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            continue  # gone meanwhile
    return {SHARED_MEMORY / name.removesuffix(" (deleted)") for name in found}


def remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def kill_marked(mark: str) -> None:
    """SIGKILL every process of the trial, until a look around finds none: one may have started another meanwhile."""
    deadline = time.monotonic() + 10
    while pids := marked(mark):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} of a trial do not die")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(argv: Sequence[str], directory: Path, environment: Mapping[str, str], log: str) -> subprocess.Popen[bytes]:
    """Return a process in a session of its own, marked as one of this trial, as everything that it starts will be."""
    own = {"OUT": str(directory), MARKER: str(directory), "OMP_NUM_THREADS": "1"}
    own |= dict.fromkeys(("TMPDIR", "RESILIO_LOCAL_DIR"), str(directory / "tmp"))
    with (directory / log).open("wb") as output:
        return subprocess.Popen(
            argv,
            cwd=directory,
            env={**os.environ, **environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def launched(launcher: Launcher, ranks: int, script: Path, arguments: Sequence[str]) -> Iterator[Launched]:
    """Run a launcher in a directory of its own (its ranks find it as $OUT); nothing of it is left afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="recovery-"))
    memory = Path(tempfile.mkdtemp(prefix="recovery-", dir=SHARED_MEMORY))
    (directory / "tmp").mkdir()
    arguments = [*arguments, f"--shm={memory}"]
    port = str(free_port())
    environment = {name: value.replace("{port}", port) for name, value in launcher.environment.items()}
    companion = [word.replace("{port}", port) for word in launcher.companion]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        if companion:
            processes.append(start(companion, directory, environment, "companion"))
        processes.append(start(launcher.argv(ranks, script, arguments), directory, environment, "output"))
        yield Launched(processes[-1], directory, ranks)
    finally:
        leftovers = {directory, memory, *shared_memory(marked(str(directory)))}
        processes[-1].terminate()  # an orderly end first: what is killed as a whole leaves its shared memory behind
        with suppress(subprocess.TimeoutExpired):
            processes[-1].wait(20.0)
        kill_marked(str(directory))
        for process in processes:
            process.wait()
        for entry in leftovers:
            remove(entry)
