"""The limit of a machine for saves beside training: another process writes as many bytes, and nothing else is done.

``python bare_writer.py FILE BYTES``: for each line on standard input FILE is written anew from memory of its own, past
the page cache, and synced; then it answers with a line. The training process copies nothing and hands nothing over.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PAGE, CHUNK, DEPTH, NICE = 4096, 8 << 20, 4, 10


class BareWriter:
    """That process; what ``write`` returns waits until the bytes are on disk."""

    def __init__(self, path: Path, size: int) -> None:
        argv = [sys.executable, __file__, str(path), str(size)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._waiting = 0
        self._answers = self._process.stdout
        self._wait()

    def write(self) -> Callable[[], None]:
        while self._waiting:
            self._wait()
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._waiting = 1
        return lambda: self._wait() if self._waiting else None

    def _wait(self) -> None:
        assert self._answers
        if not self._answers.readline():
            raise RuntimeError("the process that writes has died")
        self._waiting = 0


def main() -> None:
    from resilio_hpc.native import direct_io

    path, size = sys.argv[1], int(sys.argv[2]) // PAGE * PAGE
    os.nice(NICE)  # as our saver
    room = mmap.mmap(-1, size)
    room.madvise(mmap.MADV_HUGEPAGE)  # 0.03 s of a processor per GB less for the kernel to do
    for at in range(0, size, PAGE):
        room[at] = 1
    print(flush=True)
    for _ in sys.stdin:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        direct_io.write(fd, room, [(0, 0, size)], [], DEPTH, CHUNK, 0.0, True)
        os.fsync(fd)
        os.close(fd)
        print(flush=True)


if __name__ == "__main__":
    main()
