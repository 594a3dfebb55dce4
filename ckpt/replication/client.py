"""The fetching side of the replicator: copies another node's snapshots into arenas of this one."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.replication.caller import SnapshotCaller, header_of
from resilio_hpc.ckpt.replication.fabric import Fabric
from resilio_hpc.ckpt.replication.messages import (
    SILENT_S,
    Answer,
    Fetch,
    Fetched,
    FetchFailed,
    Have,
    StillFetching,
    Want,
)
from resilio_hpc.ckpt.replication.replica_copies import ReplicaCopies, owned
from resilio_hpc.ckpt.replication.replica_fetch import NoReplica, fetch_replica
from resilio_hpc.ckpt.replication.transport import Lane
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.core import wire
from resilio_hpc.core.errors import CheckpointError, WireError
from resilio_hpc.core.helper_process import step_back

TELL_S = 1.0
"""How often the agent hears of a fetch that takes long."""
_STREAMS = 4  # at once, of ranks that wait; copies during training come one after the other


class SnapshotTaker:
    """Carries out one fetch at a time, in the order of the requests. No call waits."""

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: wire.Keys,
        arenas: Path,
        copies: Path,
        spill: Path,
        replicas: ReplicaCopies,
        silent_s: float = SILENT_S,
        tell_s: float = TELL_S,
        fabric: Fabric | None = None,
    ) -> None:
        """Take the parts; ``arenas``: of this node's own ranks; ``copies``, ``replicas``: of others'.

        ``spill``: see ArenaPair.
        """
        self.replicas = replicas
        self.silent_s, self._tell_s = silent_s, tell_s
        self.wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """For poll: readable when ``tick`` has something to do."""
        self.pairs: dict[int, ArenaPair] = {}  # of copies, by rank; their pages stay mapped
        self.context, self.keys, self.fabric = context, keys, fabric
        self.arenas, self.copies, self.spill = arenas, copies, spill
        self._waiting: deque[Fetch] = deque()
        self._now: _Fetching | None = None
        self._told_at = 0.0
        self._answers: list[Answer] = []

    def answers(self) -> list[Answer]:
        """Return the results of fetches."""
        answers, self._answers = self._answers, []
        return answers

    def begin(self, order: Fetch) -> None:
        """Start the fetch, when it is its turn."""
        self._waiting.append(order)
        self._next()

    def forget_all_but(self, copies: Collection[tuple[int, int]]) -> None:
        """Forget all copies except these, (rank, step), which belong to the present life."""
        for held in arena.scan(self.copies):
            if (held.rank, held.step) not in copies:
                arena.mark_empty(held.path, held.step)
        self.replicas.keep(copies)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel these fetches; half-made copies count as nothing."""
        self._waiting = deque(order for order in self._waiting if order.number not in numbers)
        if self._now is not None and self._now.order.number in numbers:
            self._now.give_up()

    def tick(self) -> None:
        """Take the results of finished fetches, and start the next."""
        if self._now is None:
            return
        if self._now.is_alive():
            if time.monotonic() - self._told_at > self._tell_s and not self._now.is_given_up:
                self._told_at = time.monotonic()
                self._answers.append(StillFetching(self._now.order.number))
            return
        os.eventfd_read(self.wakes)
        now, self._now = self._now, None
        if not now.is_given_up:
            if isinstance(now.answer, Fetched) and not now.order.into_arenas:
                self._drop_all_but(now.order.ranks)
            self._answers.append(now.answer)
        self._next()

    def _drop_all_but(self, ranks: list[int]) -> None:
        """Drop copies of ranks that have another partner by now."""
        for rank in [rank for rank in self.pairs if rank not in ranks]:
            self.pairs.pop(rank).close()
        arena.remove_slots(self.copies, keep=ranks)
        self.replicas.keep_ranks(ranks)

    def _next(self) -> None:
        if self._now is None and self._waiting:
            self._told_at = time.monotonic()
            self._now = _Fetching(self, self._waiting.popleft())
            self._now.start()


class _Fetching(threading.Thread):
    """One fetch. ``answer`` is set when the thread has ended, unless ``is_given_up``."""

    def __init__(self, taker: SnapshotTaker, order: Fetch) -> None:
        super().__init__(name="resilio-fetch", daemon=True)
        self.order = order
        self.answer: Fetched | FetchFailed = FetchFailed(order.number, "it was not begun")
        self.is_given_up = False
        self._taker = taker
        self._caller = SnapshotCaller(
            taker.context, taker.keys, order.endpoint, taker.silent_s, lambda: self._goes_on, taker.fabric
        )  # fmt: skip
        self._lock = threading.Lock()  # for the next five fields, and for the moment at which a snapshot becomes whole
        self._ranks = deque(order.ranks)
        self._missing = set(order.ranks)
        self._size_bytes = 0
        self._error = ""
        self._no_replicas = False

    def give_up(self) -> None:
        """Give up: after the return, no snapshot becomes whole."""
        with self._lock:
            self.is_given_up = True
            self._end()

    def _end(self) -> None:
        """Stop waiting for anything: the next fetch may be urgent."""
        self._ranks.clear()
        self._caller.end()

    def run(self) -> None:
        """Fetch the snapshots of all ranks, several at once where ranks wait for them."""
        began = time.monotonic()
        if not self.order.into_arenas:
            step_back()
        try:
            count = min(_STREAMS, len(self.order.ranks)) if self.order.into_arenas else 1
            others = [threading.Thread(target=self._work, daemon=True) for _ in range(count - 1)]
            for thread in others:
                thread.start()
            self._work()
            for thread in others:
                thread.join()
            if self._error or self._missing:
                self.answer = FetchFailed(
                    self.order.number, self._error or "it ended half-way", self._no_replicas
                )  # fmt: skip
            else:
                seconds, by = round(time.monotonic() - began, 4), ", ".join(sorted(self._caller.by))
                self.answer = Fetched(self.order.number, self._size_bytes, seconds, by)
        finally:
            os.eventfd_write(self._taker.wakes, 1)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._ranks:
                    return
                rank = self._ranks.popleft()
            try:
                self._fetch_replica(rank) if self.order.as_replicas else self._fetch(rank)
            except (CheckpointError, WireError, OSError, zmq.ZMQError) as error:
                with self._lock:
                    self._error = self._error or _in_words(error, self.order.endpoint, self._taker.silent_s)
                    self._no_replicas = self._no_replicas or isinstance(error, NoReplica)
                    self._end()

    @property
    def _goes_on(self) -> bool:
        return not self.is_given_up and not self._error

    def _fetch(self, rank: int) -> None:
        with self._caller.asked() as asked:
            have = self._caller.ask(asked, self._want(rank))
            if have is not None:
                self._take(have, self._header(have, rank))

    def _fetch_replica(self, rank: int) -> None:
        order, taker = self.order, self._taker
        mine = owned(taker.arenas, order.step, order.world_size)
        copy = fetch_replica(self._caller, self._want(rank), mine)
        with self._lock:
            if copy is not None and self._goes_on:
                taker.replicas.put(copy)
                self._size_bytes += len(copy.kept)
                self._missing.discard(rank)

    def _want(self, rank: int) -> Want:
        return Want(rank, self.order.step, self.order.world_size, self.order.life)

    def _header(self, have: Have, rank: int) -> Header:
        order, header = self.order, header_of(have, self._want(rank))
        if not order.into_arenas:
            return header
        return replace(header, local_rank=rank - order.first_rank, local_world_size=order.local_world_size)

    def _take(self, have: Have, header: Header) -> None:
        with self._caller.connected(have) as lane:
            if lane is None:
                return
            pair = self._pair(header)
            try:
                self._fill(pair, header, lane)
            finally:
                if self.order.into_arenas:
                    pair.close()  # from here on it is the rank's

    def _fill(self, pair: ArenaPair, header: Header, lane: Lane) -> None:
        slot, room, sequence = pair.reserve(header.step, header.size_bytes)
        whole = False
        try:
            if lane.take(room[PAGE : header.size_bytes], lambda: self._goes_on):
                with self._lock:
                    if self._goes_on:
                        pair.finish(slot, replace(header, sequence=sequence))
                        whole = True
                        self._size_bytes += header.size_bytes
                        self._missing.discard(header.rank)
        finally:
            if not whole:
                pair.abandon(slot)

    def _pair(self, header: Header) -> ArenaPair:
        taker, into_arenas = self._taker, self.order.into_arenas
        if header.rank in taker.pairs and not into_arenas:
            return taker.pairs[header.rank]
        owner = Owner(
            header.rank, header.local_rank, header.world_size, header.local_world_size, header.round, header.layout,
            header.run_id,
        )  # fmt: skip
        pair = ArenaPair(taker.arenas if into_arenas else taker.copies, owner, taker.spill)
        if not into_arenas:
            taker.pairs[header.rank] = pair
        return pair


def _in_words(error: Exception, endpoint: str, silent_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"{endpoint} said nothing for {silent_s:g} s"
    if isinstance(error, ConnectionError):
        return f"{endpoint} hung up"
    return str(error)
