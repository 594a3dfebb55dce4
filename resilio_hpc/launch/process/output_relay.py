"""Passes the children's output on to this process's output through pipes, so no child waits for a file that hangs.

The output of a batch job is often a file on the shared file system. An srun whose task was killed writes a line about
it before it ends: if that write hung, no process would learn that an agent has died.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque

READ_BYTES = 1 << 18
PIPE_BYTES = 1 << 20
MOST_BYTES = 16 << 20  # bytes that are kept while the output is slow
HANGS_S = 5.0  # an output that takes no bytes for so many seconds hangs; then surplus bytes are left out
LAST_READ_S = 2.0
LAST_WRITE_S = 20.0


class Relay:
    """One output of this process; ``fd`` is for children. If it hangs, they do not; the ranks' logs hold everything."""

    def __init__(self, target: int, most_bytes: int = MOST_BYTES, hangs_s: float = HANGS_S) -> None:
        self._target = target
        self._most_bytes = most_bytes
        self._hangs_s = hangs_s
        self._chunks: deque[bytes] = deque()
        self._left_out = 0
        self._hangs = False
        self._ended = False  # all writers are gone
        self._done = False  # and all bytes were passed on
        self._changed = threading.Condition()
        self._read, self.fd = os.pipe2(os.O_CLOEXEC)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # pipes of a user may be limited in size; a large one only saves time
        for work in (self._take, self._give):
            threading.Thread(target=work, name="output", daemon=True).start()

    def close(self) -> None:
        """Pass on the rest, if that is possible in a short time."""
        os.close(self.fd)
        with self._changed:
            self._changed.wait_for(lambda: self._ended, LAST_READ_S)
            self._changed.wait_for(lambda: self._done or not (self._ended or self._chunks), LAST_WRITE_S)

    def _take(self) -> None:
        while data := os.read(self._read, READ_BYTES):
            with self._changed:
                if not self._hangs and not self._changed.wait_for(self._has_room, self._hangs_s):
                    self._hangs = True
                while self._hangs and len(self._chunks) > 1 and not self._has_room():
                    self._left_out += len(self._chunks[1])  # the first chunk is being written
                    del self._chunks[1]
                if len(self._chunks) > 1 and len(self._chunks[-1]) < READ_BYTES:
                    self._chunks[-1] += data
                else:
                    self._chunks.append(data)
                self._changed.notify_all()
        os.close(self._read)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return sum(map(len, self._chunks)) < self._most_bytes

    def _give(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._chunks) or self._ended)
                if not self._chunks:
                    self._done = True
                    self._changed.notify_all()
                    return
                data, left_out = self._chunks[0], self._left_out
            if left_out:
                self._write(f"[resilio] {left_out} bytes of output are left out here: see the ranks' logs\n".encode())
            self._write(data)
            with self._changed:
                self._chunks.popleft()
                self._left_out -= left_out
                self._hangs = False
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except OSError:
            pass  # no process reads it any more


class Outputs:
    """Standard output and error for children, as Popen takes them. Children write to a terminal directly."""

    def __init__(self) -> None:
        self._relays: list[Relay] = []
        self.stdout = self._open(1)
        same = os.path.sameopenfile(1, 2)
        self.stderr = self.stdout if same else self._open(2)

    def _open(self, target: int) -> int | None:
        if os.isatty(target):
            return None
        self._relays.append(Relay(target))
        return self._relays[-1].fd

    def close(self) -> None:
        """Pass on the rest."""
        relays, self._relays = self._relays, []
        for relay in relays:
            relay.close()
