"""The spawner's part of an image: CRIU restores a process as a child of the spawner, with the pid that it had.

Its connection to the agent is a new one. The spawner makes it, and says on it whose it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from resilio_hpc.core import criu, rank_link
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import forked_child
from resilio_hpc.launch.workers.forking.spawned_processes import SpawnedProcesses
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand, RankImage

_LOG = "restore.log"


class ImageRestore:
    """One process on its way back."""

    def __init__(self, command: RankCommand, image: RankImage, processes: SpawnedProcesses) -> None:
        """Begin. ``command``: of the rank whose place it takes."""
        self.command = command
        self.image = image
        self._processes = processes
        self._began = time.monotonic()
        self._criu = 0
        self._why = self._begin()

    @property
    def seconds(self) -> float:
        """Return how long it has taken so far."""
        return time.monotonic() - self._began

    def _begin(self) -> str:
        """Start CRIU. Return why that cannot be, or ""."""
        image = self.image
        if process_tree.PROC.joinpath(str(image.pid)).exists():
            return f"another process has its number, {image.pid}"
        link = rank_link.connect(image.command.env)
        if link is None:
            return "the agent's socket does not answer"
        attach = rank_link.Attach(-1, image.command.local_rank, 0, image.pid)
        opened: list[int] = []
        try:
            link.send(rank_link.to_agent.encode(attach))
            opened += forked_child.open_outputs(image.command)
            paths = (image.command.stdout_path, image.command.stderr_path)
            held = {os.path.realpath(path).lstrip("/"): fd for path, fd in zip(paths, opened, strict=True)}
            self._criu = self._start({f"socket:[{image.inode}]": link.fileno(), **held})
        except OSError as error:
            return f"{error.filename or 'the link to the agent'}: {error.strerror}"
        finally:
            link.close()
            for fd in set(opened):
                os.close(fd)
        self._processes.awaited |= {self._criu: None, image.pid: None}
        return ""

    def _start(self, held: dict[str, int]) -> int:
        given = [word for what, fd in held.items() for word in ("--inherit-fd", f"fd[{fd}]:{what}")]
        argv = [
            *(self.image.program, "restore", "--images-dir", self.image.directory, "--log-file", _LOG),
            *("--restore-detached", "--restore-sibling", "--manage-cgroups=ignore", *given, *criu.for_this_user()),
        ]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=tuple(set(held.values())), start_new_session=True,
        )  # fmt: skip
        process.returncode = 0  # its end is taken with those of all children
        return process.pid

    def look(self) -> str | None:
        """Return why it has failed, "" where the process runs, and None as long as neither is known."""
        code, ended = (self._processes.awaited.get(pid) for pid in (self._criu, self.image.pid))
        if not self._why and code is None and self.seconds < self.image.limit_s:
            return None
        if not self._why and code is None:
            self._why = f"not done in {self.image.limit_s:.3g} s"
        elif not self._why and code:
            self._why = self._said() or f"CRIU ended with {code}"
        elif not self._why and ended is not None:
            self._why = "it has ended at once"
        if self._why:
            self.end()
        else:
            self._forget()
        return self._why

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            return criu.first_error(Path(self.image.directory, _LOG).read_text(errors="replace"))
        return ""

    def end(self) -> None:
        """End CRIU, and what it has restored so far. That is stopped first, so that it does nothing more."""
        if self._criu and self._processes.awaited.get(self._criu) is None:
            process_tree.signal_group(self._criu, signal.SIGKILL)
        pid = self.image.pid
        if self._criu and pid in self._processes.children() and pid not in self._processes.ranks:
            process_tree.stop_and_kill(pid)
        self._forget()

    def _forget(self) -> None:
        for pid in (self._criu, self.image.pid):
            self._processes.awaited.pop(pid, None)
