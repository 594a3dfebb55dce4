"""The signals that an agent got, and what follows from them: when a joiner leaves, when the agent ends. Pure."""

from __future__ import annotations

from resilio_hpc.launch.protocol import messages as m

STOP_LIMIT_S = 60.0  # to wait for a verdict, after --stop-grace: the controller may be gone, or its message lost
LEAVE_WITHIN_S = 60.0  # a joiner that does not know its job's end leaves so many seconds after the warning


class StopWarnings:
    """Signals are kept, so that each later controller hears of them. Times are monotonic seconds.

    ``joiner``: the node belongs to another job than the run's, and leaves when that job ends.
    """

    def __init__(self, joiner: bool, stop_grace_s: float) -> None:
        self.signals: list[str] = []
        self._joiner = joiner
        self._leaves_at: float | None = None
        self._stop_limit_s = stop_grace_s + STOP_LIMIT_S
        self._stops_by: float | None = None  # from then on the agent ends without a verdict, too

    def take(self, signal: str, now: float, within_s: float | None) -> None:
        """Take a signal. ``within_s``: seconds that a joiner's own job still has, where known."""
        if self._joiner and self._leaves_at is None:
            self._leaves_at = now + (LEAVE_WITHIN_S if within_s is None else within_s)
        if signal != "USR2" and self._stops_by is None:
            self._stops_by = now + self._stop_limit_s
        if signal not in self.signals:
            self.signals.append(signal)

    def overdue(self, now: float) -> bool:
        """Return whether the agent has waited long enough for a verdict, after a signal that ends it."""
        return self._stops_by is not None and now > self._stops_by

    def message(self, node: str, epoch: int, signal: str, now: float) -> m.Leaving | m.Warned:
        """Return what the controller of ``epoch`` hears of a signal."""
        if self._joiner and self._leaves_at is not None:
            return m.Leaving(node, epoch, max(0.0, self._leaves_at - now))
        return m.Warned(node, epoch, signal)
