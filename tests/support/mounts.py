"""Small file systems in memory: disks that fill up."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.requirements import need_mounts, need_program
from tests.support.waiting import until

LIMIT_S = 60.0


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with ``options`` (``size=10m``) on ``directory``, which is made; skip without that right."""
    need_mounts()
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    subprocess.run(mount, check=True, timeout=LIMIT_S)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=LIMIT_S)


@contextmanager
def hanging(place: Path, data: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """A file with ``data`` in the place of another, whose file system hangs; SIGCONT to the daemon lets it answer."""
    need_mounts()
    need_program("bindfs", package="bindfs")
    behind, mount = place.parent.with_name("behind"), place.parent.with_name("hung")
    for directory in (behind, mount):
        directory.mkdir()
    (behind / "file").write_bytes(data)
    argv = ["bindfs", "-f", "-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0", str(behind), str(mount)]
    daemon = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        until(mount.is_mount, "bindfs mounts", alive=lambda: daemon.poll() is None)
        place.unlink(missing_ok=True)
        place.symlink_to(mount / "file")
        daemon.send_signal(signal.SIGSTOP)
        yield daemon
    finally:
        daemon.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(mount)], check=False, timeout=LIMIT_S)
        daemon.kill()
        daemon.wait()
