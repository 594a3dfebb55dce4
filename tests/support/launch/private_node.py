"""A /tmp and a /dev/shm of a test's own: what is cleaned there is nothing of this machine's other launches."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.environments import scrubbed
from tests.support.requirements import need_mounts
from tests.support.waiting import PATIENCE_S

_MAKE = "mount -t tmpfs none /dev/shm && mount -t tmpfs none /tmp && chmod 1777 /tmp /dev/shm && echo made && exec cat"
_ENTER = 'cd "$1" && shift && exec "$@"'


class PrivateNode:
    """Runs commands in the folder ``path``, where /tmp and /dev/shm are empty at first."""

    def __init__(self, path: Path, pid: int) -> None:
        self.path = path
        self._pid = pid

    def argv(self, words: Sequence[str]) -> list[str]:
        """The command that runs ``words`` there."""
        return ["nsenter", "-t", str(self._pid), "-m", "-r", "--", "sh", "-c", _ENTER, "sh", str(self.path), *words]

    def start(self, module: str, *words: str, log: str, environment: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Start a module of Python in a session of its own; its output goes to the file ``log``."""
        with (self.path / log).open("wb") as output:
            return subprocess.Popen(
                self.argv([sys.executable, "-m", module, *words]), stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env={**scrubbed(), **environment}, start_new_session=True,
            )  # fmt: skip

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        return subprocess.run(
            self.argv(words), env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def names(self) -> list[str]:
        """The entries with our names in both places."""
        root = Path(f"/proc/{self._pid}/root")
        return sorted(
            f"{place}/{path.name}" for place in ("/tmp", "/dev/shm") for path in (root / place[1:]).glob("resilio-*")
        )

    def inside(self, path: str) -> Path:
        """The path from outside of something there."""
        return Path(f"/proc/{self._pid}/root") / path[1:]


@contextmanager
def private_node() -> Iterator[PrivateNode]:
    """Make one; skip without the right to."""
    need_mounts()
    path = Path(tempfile.mkdtemp(dir="/var/tmp"))  # it must not lie in /tmp, which is hidden
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MAKE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"made\n"
        yield PrivateNode(path, holder.pid)
    finally:
        holder.stdin.close()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
        shutil.rmtree(path, ignore_errors=True)
