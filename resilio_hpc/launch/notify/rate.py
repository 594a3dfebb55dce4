"""How often notifications are sent: the first event at once, many events in a few summaries. Pure.

After one message comes a pause of a second, which doubles, up to a minute, as long as there is more to tell after each.
Events during a pause are sent after it in one message. So a storm of an hour is some 65 messages. The verdict is never
put into a summary.
"""

from __future__ import annotations

from collections import Counter

from resilio_hpc.events.phrases import plural
from resilio_hpc.launch.notify.events import Notice

SHORTEST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
TOLD_WHOLE = 5  # a summary of up to so many events has all their texts
NOUNS = {"node_lost": "lost node", "checkpoint_failed": "failed checkpoint", "joined": "new node", "left": "node left",
         "recovered": "recovery", "summary": "earlier event"}  # fmt: skip


class Throttle:
    """One target's events. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._waiting: list[Notice] = []  # the first few
        self._last: Notice | None = None  # of the events after those
        self._verdict: Notice | None = None
        self._counts: Counter[str] = Counter()
        self._quiet_from = 0.0
        self._pause = SHORTEST_PAUSE_S

    def add(self, notice: Notice) -> None:
        """Add an event to send."""
        if notice.event == "verdict":
            self._verdict = notice
            return
        self._counts[notice.event] += notice.count
        if len(self._waiting) < TOLD_WHOLE:
            self._waiting.append(notice)
        else:
            self._last = notice

    @property
    def empty(self) -> bool:
        """Return whether no message waits."""
        return not self._waiting and self._verdict is None

    def take(self, now: float, at_once: bool = False) -> Notice | None:
        """Return what to send now; with ``at_once``, at the end of the run, without regard to the pause."""
        if self.empty or (now < self._quiet_from and not at_once):
            return None
        rested = now - self._quiet_from
        self._pause = SHORTEST_PAUSE_S if rested >= self._pause else min(2 * self._pause, LONGEST_PAUSE_S)
        self._quiet_from = now + self._pause
        if not self._waiting:
            verdict, self._verdict = self._verdict, None
            return verdict
        waiting, last, counts = self._waiting, self._last, self._counts
        self._waiting, self._last, self._counts = [], None, Counter()
        return waiting[0] if counts.total() == 1 else summary(waiting, last, counts)


def summary(first: list[Notice], last: Notice | None, counts: Counter[str]) -> Notice:
    """Return one notification for several events."""
    total = counts.total()
    kinds = ", ".join(_counted(count, event) for event, count in counts.most_common())
    lines = [f"{total} events: {kinds}", *(f"- {notice.text}" for notice in first)]
    newest = last or first[-1]
    left_out = total - len(first) - 1
    if last is not None:
        lines += [*([f"- … and {left_out} more"] if left_out else []), f"- {last.text}"]
    return Notice("summary", newest.time, "\n".join(lines), f"{total} until {newest.time:.3f}", count=total)


def _counted(count: int, event: str) -> str:
    noun = NOUNS.get(event, event)
    return f"{count} recoveries" if noun == "recovery" and count != 1 else plural(count, noun)
