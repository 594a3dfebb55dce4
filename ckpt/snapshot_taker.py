"""The replicator's taking side: copies another node's snapshots into arenas of this one."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq

from resilio_hpc.ckpt import arena
from resilio_hpc.ckpt.arena import PAGE, Header
from resilio_hpc.ckpt.arena_writer import ArenaPair, Owner, Slot
from resilio_hpc.ckpt.replicator_messages import (
    Answer,
    StillFetching,
    Data,
    Fetch,
    Fetched,
    FetchFailed,
    Have,
    Miss,
    Read,
    Release,
    Want,
    asking,
    giving,
)
from resilio_hpc.ckpt.snapshot_giver import CHUNK_BYTES
from resilio_hpc.core import wire
from resilio_hpc.core.errors import CheckpointError, WireError

SILENT_S = 10.0
"""Nothing came for so long: the other side is gone."""
TELL_S = 1.0
"""How often the agent hears of a fetch that takes long."""
_DEPTH = 12
"""Chunks that are asked for and not here yet."""


@dataclass
class _Arriving:
    """A snapshot on its way into a slot."""

    pair: ArenaPair
    slot: Slot
    room: memoryview
    header: Header
    asked_to: int = PAGE
    missing: dict[int, int] = field(default_factory=dict)  # offset → size of what was asked for


@dataclass
class _Fetching:
    """The fetch that is being carried out."""

    order: Fetch
    socket: zmq.Socket[bytes]
    ranks: deque[int]
    began: float
    heard_at: float
    told_at: float
    size_bytes: int = 0
    arriving: _Arriving | None = None


class SnapshotTaker:
    """Carries out one fetch at a time, in the order in which they were wanted."""

    def __init__(self, context: zmq.Context[Any], keys: wire.Keys, arenas: Path, copies: Path, spill: Path) -> None:
        """``arenas``: of this node's own ranks; ``copies``: of others'; ``spill``: see ArenaPair."""
        self._context, self._keys = context, keys
        self._arenas, self._copies, self._spill = arenas, copies, spill
        self._waiting: deque[Fetch] = deque()
        self._now: _Fetching | None = None
        self._pairs: dict[int, ArenaPair] = {}  # of copies, by rank: their pages stay mapped
        self._answers: list[Answer] = []

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """For poll, while something is fetched."""
        return self._now.socket if self._now is not None else None

    def answers(self) -> list[Answer]:
        """How fetches have ended."""
        answers, self._answers = self._answers, []
        return answers

    def begin(self, order: Fetch) -> None:
        """Fetch, when it is its turn."""
        self._waiting.append(order)
        self._next()

    def forget_all_but(self, copies: Collection[tuple[int, int]]) -> None:
        """Only these copies, (rank, step), are of the present life."""
        for held in arena.scan(self._copies):
            if (held.rank, held.step) not in copies:
                arena.mark_empty(held.path, held.step)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Give these up; what was half here is nothing."""
        self._waiting = deque(order for order in self._waiting if order.number not in numbers)
        if self._now is not None and self._now.order.number in numbers:
            self._hang_up()
            self._next()

    def tick(self) -> None:
        """Do not wait for ever."""
        now = self._now
        if now is None:
            return
        if time.monotonic() - now.heard_at > SILENT_S:
            self._fail(f"{now.order.endpoint} said nothing for {SILENT_S:g} s")
        elif time.monotonic() - now.told_at > TELL_S:
            now.told_at = time.monotonic()
            self._answers.append(StillFetching(now.order.number))

    def serve(self) -> None:
        """Take what has come."""
        now = self._now
        if now is None:
            return
        for frames in wire.receive_all(now.socket):
            try:
                self._take(now, giving.decode(frames[0]), frames[1:])
            except (WireError, CheckpointError, OSError) as error:
                self._fail(str(error))
            if self._now is not now:
                return

    def _take(self, now: _Fetching, message: Have | Miss | Data, rest: list[bytes]) -> None:
        now.heard_at = time.monotonic()
        if isinstance(message, Miss):
            raise CheckpointError(message.error)
        if isinstance(message, Have):
            self._take_header(now, message)
        elif now.arriving is not None and rest:
            arriving, data = now.arriving, rest[0]
            if arriving.missing.pop(message.offset, -1) != len(data):
                raise CheckpointError("bytes came that nobody asked for")
            arriving.room[message.offset : message.offset + len(data)] = data
            self._ask(now, arriving)

    def _take_header(self, now: _Fetching, message: Have) -> None:
        header = arena.unpack(message.header)
        wanted = (now.ranks[0], now.order.step, now.order.world_size)
        found = () if header is None else (header.rank, header.step, header.world_size)
        if header is None or found != wanted or now.arriving is not None:
            raise CheckpointError("another snapshot came than was asked for")
        pair = self._pair(now.order, header)
        slot, room, sequence = pair.reserve(header.step, header.size_bytes)
        order = now.order
        if order.into_arenas:
            local_rank = header.rank - order.first_rank
            header = replace(header, local_rank=local_rank, local_world_size=order.local_world_size)
        header = replace(header, sequence=sequence)
        now.arriving = _Arriving(pair, slot, room, header)
        self._ask(now, now.arriving)

    def _pair(self, order: Fetch, header: Header) -> ArenaPair:
        if header.rank in self._pairs and not order.into_arenas:
            return self._pairs[header.rank]
        owner = Owner(
            header.rank, header.local_rank, header.world_size, header.local_world_size, header.round, header.layout,
            header.run_id,
        )  # fmt: skip
        pair = ArenaPair(self._arenas if order.into_arenas else self._copies, owner, self._spill)
        if not order.into_arenas:
            self._pairs[header.rank] = pair
        return pair

    def _ask(self, now: _Fetching, arriving: _Arriving) -> None:
        end = arriving.header.size_bytes
        while len(arriving.missing) < _DEPTH and arriving.asked_to < end:
            size = min(CHUNK_BYTES, end - arriving.asked_to)
            arriving.missing[arriving.asked_to] = size
            self._say(now, Read(arriving.asked_to, size))
            arriving.asked_to += size
        if not arriving.missing:
            self._arrived(now, arriving)

    def _arrived(self, now: _Fetching, arriving: _Arriving) -> None:
        arriving.room.release()
        arriving.pair.finish(arriving.slot, arriving.header)
        self._done_with(now, arriving)
        now.size_bytes += arriving.header.size_bytes
        now.ranks.popleft()
        self._say(now, Release())
        if now.ranks:
            self._say(now, self._wanted(now))
            return
        order = now.order
        if not order.into_arenas:
            self._drop_all_but(order.ranks)
        self._answers.append(Fetched(order.number, now.size_bytes, round(time.monotonic() - now.began, 4)))
        self._hang_up()
        self._next()

    def _drop_all_but(self, ranks: list[int]) -> None:
        """Whose copies are not kept here any more need no memory."""
        for rank in [rank for rank in self._pairs if rank not in ranks]:
            self._pairs.pop(rank).close()
        arena.remove_slots(self._copies, keep=ranks)

    def _fail(self, error: str) -> None:
        assert self._now is not None
        self._answers.append(FetchFailed(self._now.order.number, error))
        self._hang_up()
        self._next()

    def _next(self) -> None:
        if self._now is not None or not self._waiting:
            return
        order = self._waiting.popleft()
        socket = wire.call(self._context, self._keys, order.endpoint, secrets.token_bytes(8).hex().encode())
        now = time.monotonic()
        self._now = _Fetching(order, socket, deque(order.ranks), now, now, now)
        self._say(self._now, self._wanted(self._now))

    @staticmethod
    def _wanted(now: _Fetching) -> Want:
        return Want(now.ranks[0], now.order.step, now.order.world_size, now.order.life)

    def _hang_up(self) -> None:
        now, self._now = self._now, None
        if now is None:
            return
        if now.arriving is not None:
            now.arriving.room.release()
            with contextlib.suppress(OSError):
                now.arriving.pair.abandon(now.arriving.slot)
            self._done_with(now, now.arriving)
        wire.send(now.socket, [asking.encode(Release())])
        now.socket.close(100)

    def _done_with(self, now: _Fetching, arriving: _Arriving) -> None:
        now.arriving = None
        if now.order.into_arenas:
            arriving.pair.close()  # from here on it is the rank's

    def _say(self, now: _Fetching, message: Want | Read | Release) -> None:
        wire.send(now.socket, [asking.encode(message)])
