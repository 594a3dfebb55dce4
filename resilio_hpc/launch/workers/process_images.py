"""Images of a node's standby processes: CRIU dumps one that is ready, which ends it, and gives its memory back.

    images = ProcessImages(node)
    dump = images.begin(command, pid)       # a process that waits for a rank's place; None: it waits on in memory
    image = dump.look()                     # in each turn; None as long as it takes, or where it has failed

An image has what the script makes before its ``@train.restartable`` function: imports, a model, what a device holds
where CRIU's plug-in for it can dump that. It has no step's state, so it is good for the whole run. It lies in the
agent's private directory, and is removed with its use, and with the run's end. The first thing that fails ends all of
it on this node: then standby processes wait in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from resilio_hpc.core import criu
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand, RankImage
from resilio_hpc.launch.workers.node_context import NodeContext

DUMP_S, RESTORE_S = 60.0, 15.0  # a rank that starts without takes less than that, nearly always
LEAST_SPEED = 2e8  # bytes a second, of what a process has in memory: so much longer it may take
KEPT_FREE = 0.1  # of the disk
_LOG = "dump.log"
_SEQPACKET = "0005"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class ImageDump:
    """One dump under way. ``image``: what it will be; ``failed``: why it will not."""

    def __init__(self, image: RankImage, limit_s: float) -> None:
        """Begin. Raises OSError."""
        self.image = image
        self._limit_s = limit_s
        self.failed = ""
        self._began = time.monotonic()
        argv = [
            *(image.program, "dump", "--tree", str(image.pid), "--images-dir", image.directory, "--log-file", _LOG),
            *("--manage-cgroups=ignore", "--external", f"unix[{image.inode}]", *criu.for_this_user()),
        ]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._criu = subprocess.Popen(argv, start_new_session=True, **streams)  # type: ignore[call-overload]

    @property
    def seconds(self) -> float:
        """Return how long it has taken so far."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Return whether it has ended, well or not. The process lives on where CRIU itself gave up."""
        code = self._criu.poll()
        if code is None and self.seconds < self._limit_s:
            return False
        if code is None:
            self.failed = f"no image in {self._limit_s:.3g} s"
            self.end()
        elif code:
            self.failed = self._said() or f"CRIU ended with {code}"
        return True

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            return criu.first_error(Path(self.image.directory, _LOG).read_text(errors="replace"))
        return ""

    def end(self) -> None:
        """End it, and the process that it may have left half changed."""
        if self._criu.poll() == 0:
            return  # the process has ended
        if self._criu.returncode is None:
            process_tree.signal_group(self._criu.pid, signal.SIGKILL)
        process_tree.stop_and_kill(self.image.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._criu.wait(1.0)

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(path.stat().st_size for path in Path(self.image.directory).iterdir())


class ProcessImages:
    """Makes and removes the images of one node."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._folder = node.local_dir / "images"
        self._is_on = node.options.reentry.process_images == "on"
        self._program = criu.find(os.environ) if self._is_on else ""  # once: a folder of PATH may hang later

    def begin(self, command: RankCommand, pid: int) -> ImageDump | None:
        """Begin to dump a process that waits; ``command`` started it. None where that cannot be."""
        if not self._is_on:
            return None
        directory = self._folder / str(-command.local_rank)
        try:
            directory.mkdir(mode=0o700, parents=True)
            inode, needed = _connection(pid), _private_bytes(pid)
            why = "" if self._program else "no criu in PATH"
            why = why or self._no_room(needed) or ("" if inode else "its connection to the agent is not the only one")
            if not why:
                more_s = needed / LEAST_SPEED
                image = RankImage(self._program, str(directory), pid, inode, command, RESTORE_S + more_s)
                return ImageDump(image, DUMP_S + more_s)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
        self.give_up("dumped", pid, why)
        return None

    def _no_room(self, needed: int) -> str:
        disk = shutil.disk_usage(self._folder)
        if disk.free - needed > KEPT_FREE * disk.total:
            return ""
        return f"{needed / 1e9:.1f} GB are too much for {self._folder}, of which {disk.free / 1e9:.1f} GB are free"

    def made(self, dump: ImageDump) -> None:
        """Take note of an image that is whole."""
        size, seconds = dump.size, round(dump.seconds, 3)
        self._node.record("process_image", pid=dump.image.pid, bytes=size, seconds=seconds)

    def give_up(self, what: str, pid: int, why: str) -> None:
        """Say why a process could not be ``what``. No other image is made."""
        if self._is_on:
            self._is_on = False
            self._node.tell("process_image_failed", what=what, pid=pid, reason=why[:500])

    def remove(self, image: RankImage) -> None:
        """Remove an image."""
        shutil.rmtree(image.directory, ignore_errors=True)


def _connection(pid: int) -> int:
    """Return the inode of a process's one Unix connection that keeps packets apart; 0 where it has none, or more."""
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if found := _SOCKET.fullmatch(str(link.readlink())):
                held.add(found[1])
    rows = map(str.split, Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:])
    inodes = [int(row[6]) for row in rows if row[6] in held and row[4] == _SEQPACKET]
    return inodes[0] if len(inodes) == 1 else 0


def _private_bytes(pid: int) -> int:
    """Return how much memory of a process an image holds, at least."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(map(int, re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE)))
