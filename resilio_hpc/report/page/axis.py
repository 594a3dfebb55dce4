"""The time axis of the page's pictures, and spans of time as columns of pixels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from resilio_hpc.core.svg import text
from resilio_hpc.core.terminal import local_time
from resilio_hpc.report.accounting.causes import US, TimeCause, TimeSpan

LEFT, RIGHT = 110.0, 1000.0
_STEPS_S = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86_400, 2 * 86_400, 5 * 86_400, 10 * 86_400,
            30 * 86_400, 90 * 86_400)  # fmt: skip
_MOST_TICKS = 8


@dataclass(frozen=True)
class Axis:
    """A time axis over the picture's width. Microseconds."""

    begin_us: int
    end_us: int

    def x(self, us: float) -> float:
        """Return where a moment lies; outside of the axis, its nearer end."""
        share = (us - self.begin_us) / max(1, self.end_us - self.begin_us)
        return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, share))

    def ticks(self) -> list[tuple[float, str]]:
        """Return (place, label) of a few round times of day."""
        length = max(1.0, (self.end_us - self.begin_us) / US)
        step = next((one for one in _STEPS_S if length / one <= _MOST_TICKS), length / _MOST_TICKS)
        form = (
            "%m-%d" if step >= 86_400 else "%m-%d %H:%M" if length > 86_400 else "%H:%M" if step >= 60 else "%H:%M:%S"
        )
        first = self.begin_us / US
        midnight = first - _since_midnight(first)
        at = midnight + (int((first - midnight) / step) + 1) * step
        found: list[tuple[float, str]] = []
        while at < self.end_us / US and len(found) <= _MOST_TICKS:
            found.append((self.x(at * US), local_time(at, form)))
            at += step
        return found

    def drawn(self, top: float, bottom: float) -> Iterator[str]:
        """Return lines and labels, the labels below ``bottom``."""
        for x, label in self.ticks():
            yield f'<path class="ax" d="M{x:.1f} {top:.1f}V{bottom + 4:.1f}"/>'
            anchor = "end" if x > RIGHT - 40 else "start" if x < LEFT + 20 else "middle"
            yield text(x, bottom + 16, label, "s", anchor)


def _since_midnight(unix: float) -> float:
    hours, minutes, seconds = (int(local_time(unix, form) or 0) for form in ("%H", "%M", "%S"))
    return hours * 3600.0 + minutes * 60 + seconds + unix % 1


def columns(spans: Iterable[TimeSpan], axis: Axis, pixels: int) -> list[dict[TimeCause, float]]:
    """Return the share of each cause in each of so many equal pieces of the axis."""
    wide = max(1, axis.end_us - axis.begin_us) / pixels
    found: list[dict[TimeCause, float]] = [{} for _ in range(pixels)]
    for span in spans:
        begin, end = (span.begin_us - axis.begin_us) / wide, (span.end_us - axis.begin_us) / wide
        for number in range(max(0, int(begin)), min(pixels - 1, int(end)) + 1):
            part = min(end, number + 1) - max(begin, number)
            if part > 0:
                found[number][span.cause] = found[number].get(span.cause, 0.0) + part
    return found


def runs(shares: Iterable[dict[TimeCause, float]]) -> Iterator[tuple[int, int, TimeCause]]:
    """Return (first pixel, pixel after the last, cause) of pixels that show the same cause, one after the other.

    Where a pixel has several, they take turns, so that what is shown of each is in proportion to its time.
    """
    owed = dict.fromkeys(TimeCause, 0.0)
    shown: TimeCause | None = None
    first = 0
    for number, share in enumerate([*shares, {}]):
        for cause, part in share.items():
            owed[cause] += part
        now = max(share, key=lambda cause: owed[cause], default=None)
        if now is not None:
            owed[now] -= sum(share.values())
        if now is not shown:
            if shown is not None:
                yield first, number, shown
            shown, first = now, number
