"""The replicator's giving side: snapshots of this node's memory, read by other nodes piece by piece."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from resilio_hpc.ckpt import arena
from resilio_hpc.ckpt.replicator_messages import ANY, Data, Have, Life, Miss, Read, Want, asking, giving
from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError

CHUNK_BYTES = 1 << 20
"""What is asked for at once."""
FORGOTTEN_S = 30.0
"""A snapshot that nobody has read from for so long is not kept any more: who wanted it is gone."""
_MAX_KEPT = 64


@dataclass
class _Kept:
    """A pinned snapshot that somebody reads."""

    fd: int
    map: mmap.mmap
    read_at: float

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


class SnapshotGiver:
    """Answers whoever has the run's key; each caller reads one snapshot at a time."""

    def __init__(self, socket: zmq.Socket[bytes], directories: Sequence[Path]) -> None:
        """``socket``: a ROUTER that listens. ``directories``: of arenas."""
        self.socket = socket
        self._directories = directories
        self._kept: dict[bytes, _Kept] = {}
        self._life = ANY
        self._early: dict[bytes, tuple[Want, float]] = {}  # with the time: who asks for a life not begun here

    def serve(self) -> None:
        """Answer every request that is waiting."""
        for frames in wire.receive_all(self.socket):
            if len(frames) != 2:
                continue
            caller, frame = frames
            try:
                message = asking.decode(frame)
            except WireError:
                continue
            if isinstance(message, Want):
                self._want(caller, message)
            elif isinstance(message, Read):
                self._read(caller, message)
            else:
                self._release(caller)

    def begin(self, life: Life) -> None:
        """From now on snapshots are of this life."""
        self._life = life
        waiting, self._early = self._early, {}
        for caller, (message, _) in waiting.items():
            self._want(caller, message)

    def tick(self) -> None:
        """Keep nothing for those who are gone."""
        now = time.monotonic()
        heard = {caller: kept.read_at for caller, kept in self._kept.items()}
        heard |= {caller: at for caller, (_, at) in self._early.items()}
        for caller in [caller for caller, at in heard.items() if now - at > FORGOTTEN_S]:
            self._release(caller)

    def _want(self, caller: bytes, message: Want) -> None:
        self._release(caller)
        if message.life > self._life and len(self._early) < _MAX_KEPT:
            self._early[caller] = (message, time.monotonic())  # what is here may be of a life that others have left
            return
        wanted = (message.rank, message.step, message.world_size)
        held = [held for directory in self._directories for held in arena.scan(directory)]
        for snapshot in held:
            found = (snapshot.rank, snapshot.step, snapshot.world_size)
            if found == wanted and message.life <= self._life and len(self._kept) < _MAX_KEPT:
                fd = arena.lock_snapshot(snapshot)
                if fd is not None:
                    kept = _Kept(fd, mmap.mmap(fd, snapshot.size_bytes, prot=mmap.PROT_READ), time.monotonic())
                    self._kept[caller] = kept
                    self._say(caller, Have(message.rank, message.step, kept.map[: arena.PAGE]))
                    return
        self._say(caller, Miss(f"there is no snapshot of step {message.step} of rank {message.rank}"))

    def _read(self, caller: bytes, message: Read) -> None:
        kept = self._kept.get(caller)
        end = message.offset + message.size
        if kept is None or not 0 <= message.offset < end <= len(kept.map) or message.size > CHUNK_BYTES:
            self._say(caller, Miss("it is not kept any more, or it is smaller"))
            return
        kept.read_at = time.monotonic()
        self._say(caller, Data(message.offset), kept.map[message.offset : end])

    def _say(self, caller: bytes, message: Have | Miss | Data, *data: bytes) -> None:
        wire.send(self.socket, [caller, giving.encode(message), *data])

    def _release(self, caller: bytes) -> None:
        self._early.pop(caller, None)
        kept = self._kept.pop(caller, None)
        if kept is not None:
            kept.close()
