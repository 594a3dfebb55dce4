"""Own work and waiting of one rank, from its call ring. Each record is read once, so a tick costs what is new.

Time inside of a call is waiting (for others, or for the transfer), the rest is the rank's own work. Calls that overlap,
as gloo's asynchronous ones do, count once.
"""

from __future__ import annotations

import time
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from resilio_hpc.diagnose.hangs.call_ring import CAPACITY, SIZES, RawCall

LARGE_BYTES = 64 * 1024
GIVEN_UP = 512  # calls after one that does not end
NS = 1_000_000_000


class CallRecords(Protocol):
    """What is read of a ring; `CallRing` is one."""

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many calls were begun and completed so far."""

    def since(self, first: int) -> list[RawCall]:
        """Return the records from this number on."""

    def in_queue(self) -> frozenset[int]:
        """Return the communicators whose calls are not seen to complete."""


class TimeSpent(Struct, frozen=True):
    """Of one rank since the last `CallTimes.cut`. ``rate``: bytes per second of its fastest large call, 0 without."""

    own_ns: int = 0
    wait_ns: int = 0
    calls: int = 0
    rate: float = 0.0


class CallTimes:
    """The account of one ring. ``advance`` follows it, ``cut`` ends a window.

    What was a pause is taken out of ``total``.
    """

    def __init__(self, ring: CallRecords) -> None:
        self._ring = ring
        self._next = 0  # the first record that is not accounted for
        self._at = 0  # until when all is accounted for, CLOCK_MONOTONIC; 0: no call was seen yet
        self.total = TimeSpent()  # since the last cut
        self.measured = True  # False: a library's calls are not seen to complete

    def advance(self, now_ns: int | None = None) -> None:
        """Account for all until now. A call that is not completed is waited for from its beginning on."""
        now = time.monotonic_ns() if now_ns is None else now_ns
        begun, _ = self._ring.counts
        if begun - self._next > CAPACITY:  # records were overwritten unseen: that time counts for nothing
            self._next, self._at = begun - CAPACITY // 2, 0
        open_since = self._follow(now)
        if self._at == 0:
            return
        self._to(now if open_since is None else open_since, waits=False)
        self._to(now, waits=True)

    def _follow(self, now: int) -> int | None:
        """Take the records up to the first one that is not completed, and return when that was entered."""
        calls = self._ring.since(self._next)
        if calls and self._next == 0 and self._ring.in_queue():
            self.measured = False
        for number, call in enumerate(calls):
            if call.entered_ns > now:
                return None
            self._at = self._at or call.entered_ns
            if not call.completed_ns:
                if len(calls) - number < GIVEN_UP:
                    return call.entered_ns
                self._next = call.stamp  # it was abandoned, or its end was not seen
                continue
            self._next = call.stamp
            self._to(call.entered_ns, waits=False)
            self._to(min(call.completed_ns, now), waits=True)
            rate = max(self.total.rate, rate_of(call))
            self.total = replace(self.total, calls=self.total.calls + 1, rate=rate)
        return None

    def _to(self, until: int, waits: bool) -> None:
        """Account for the time until then, as far as it is not accounted for."""
        if until <= self._at:
            return
        passed, self._at = until - self._at, until
        self.total = (
            replace(self.total, wait_ns=self.total.wait_ns + passed) if waits
            else replace(self.total, own_ns=self.total.own_ns + passed)
        )  # fmt: skip

    def cut(self) -> TimeSpent:
        """Return what was accounted for since the last time, and begin again."""
        found, self.total = self.total, TimeSpent()
        return found


def rate_of(call: RawCall) -> float:
    """Return the bytes per second of a large call; 0 of another one."""
    size = call.elements * (SIZES[call.dtype] if call.dtype < len(SIZES) else 0)
    lasts = call.completed_ns - call.entered_ns
    return size * NS / lasts if size >= LARGE_BYTES and lasts > 0 else 0.0
