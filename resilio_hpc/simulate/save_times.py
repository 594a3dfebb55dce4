"""When snapshots of a round are whole, copied, and durable: by formulas, so that a month takes no time. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveTimes:
    """A save after every ``every_us`` of training, which waits ``blocked_us`` for it; all in microseconds.

    A snapshot is copied to another node ``copy_us`` after it is whole, and durable after ``durable_us``. Where the next
    one comes before that, it waits, and then the newest one is taken.
    """

    every_us: int
    blocked_us: int
    copy_us: int
    durable_us: int

    @property
    def cycle_us(self) -> int:
        """Return the time from one snapshot to the next."""
        return self.every_us + self.blocked_us

    def trained(self, us: int) -> int:
        """Return how much of the first ``us`` of a round was training; the rest was waiting."""
        whole, rest = divmod(us, self.cycle_us)
        return whole * self.every_us + min(rest, self.every_us)

    def snapshots(self, us: int) -> int:
        """Return how many snapshots are whole."""
        return us // self.cycle_us

    def copied(self, us: int) -> int:
        """Return the number of the newest snapshot that is copied; 0: none."""
        return self._through(us, self.copy_us)

    def durable(self, us: int) -> int:
        """Return the number of the newest snapshot that is durable; 0: none."""
        return self._through(us, self.durable_us)

    def _through(self, us: int, takes_us: int) -> int:
        cycle = self.cycle_us
        if takes_us <= cycle:
            return max(0, (us - takes_us) // cycle)
        done = (us - cycle) // takes_us
        return (cycle + (done - 1) * takes_us) // cycle if done >= 1 else 0

    def next_durable_us(self, us: int) -> int:
        """Return when the next snapshot after ``us`` is durable."""
        cycle, takes = self.cycle_us, self.durable_us
        if takes <= cycle:
            return (max(0, (us - takes) // cycle) + 1) * cycle + takes
        return cycle + (max(0, (us - cycle) // takes) + 1) * takes
