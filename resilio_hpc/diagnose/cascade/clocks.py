"""How far another node's clock is ahead, from messages that go to and fro anyway.

An agent says its clock's time when it sends. It cannot have sent before it got the answer that it names, nor after its
message arrived here. So each message bounds the offset from both sides, however unequal the two ways are. Messages with
short round trips bound it tightest, and bounds are intersected. Between messages clocks drift, so bounds widen.
"""

from __future__ import annotations

import msgspec

DRIFT = 500e-6  # seconds per second: the fastest at which Linux slews a clock (adjtimex(2)); free ones drift by 50e-6
JUMP_S = 120.0  # after a clock was set, times before that are read on the new one for so long
UNKNOWN_S = 1.0  # clocks of nodes that keep time agree better; said where none was compared
_SLACK_S = 1e-4  # clocks are read one after the other


class ClockBounds(msgspec.Struct):
    """The offset of one node's Unix clock to this process's monotonic clock, with bounds. Cost: five numbers a node."""

    low: float = 0.0
    high: float = 0.0
    at: float = -1.0  # when the bounds were right, -1: never
    jumped_at: float = -1e12
    jump_s: float = 0.0

    def heard(self, unix: float, not_before: float, now: float) -> None:
        """Take a message: ``unix`` is its sender's clock; it was sent after ``not_before``, and before ``now``."""
        low, high = unix - now - _SLACK_S, unix - not_before + _SLACK_S
        if low > high:
            return  # no round trip: its stamp is of another process
        if self.at >= 0:
            wider = DRIFT * max(0.0, now - self.at)
            old_low, old_high = self.low - wider, self.high + wider
            if low > old_high or high < old_low:  # the clock was set: what was known of it is void
                self.jumped_at, self.jump_s = now, max(low - old_high, old_low - high)
            else:
                low, high = max(low, old_low), min(high, old_high)
        self.low, self.high, self.at = low, high, now

    def to_local(self, unix: float, now: float) -> tuple[float, float] | None:
        """Return a time of that clock on this monotonic clock, and its uncertainty in seconds; None: not known."""
        if self.at < 0:
            return None
        drift_s = DRIFT * max(0.0, now - self.at)
        uncertain_s = (self.high - self.low) / 2 + drift_s
        if now - self.jumped_at < JUMP_S:
            uncertain_s += self.jump_s  # it may have been read before
        return unix - (self.low + self.high) / 2, uncertain_s
