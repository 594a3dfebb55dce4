"""The page's other pictures: time by cause along the run, and steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from resilio_hpc.core.svg import rect, text
from resilio_hpc.events.phrases import amount
from resilio_hpc.report.accounting.causes import US, TimeCause
from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.report.page.axis import LEFT, RIGHT, Axis, columns
from resilio_hpc.report.progress import LoggedPoint

PIECES = 178
HIGH = 150.0
MOST_POINTS = 1_000
MOST_VALUES = 8
_TOP = 10.0


def shares_chart(report: RunReport) -> str:
    """Return how the time was shared between the causes, along the run; "" without time."""
    if not report.time.spans:
        return ""
    axis = Axis(report.time.spans[0].begin_us, report.time.spans[-1].end_us)
    bottom = _TOP + HIGH
    parts = [*_stacks(report, axis, bottom), *_levels(bottom), *axis.drawn(bottom, bottom)]
    return _picture(parts, bottom, "Shares of the causes of time along the run, stacked. The table has the sums.")


def _stacks(report: RunReport, axis: Axis, bottom: float) -> Iterator[str]:
    wide = (RIGHT - LEFT) / PIECES
    for number, share in enumerate(columns(report.time.spans, axis, PIECES)):
        whole = sum(share.values())
        y = bottom
        for cause in TimeCause:
            high = HIGH * share.get(cause, 0.0) / whole if whole else 0.0
            if high >= 0.2:
                y -= high
                yield rect(LEFT + number * wide, y, wide + 0.2, high, kind=f"c-{cause.value}")


def _levels(bottom: float) -> Iterator[str]:
    for level in (0, 50, 100):
        yield text(LEFT - 8, bottom - HIGH * level / 100 + 4, f"{level} %", "s", "end")


def steps_chart(report: RunReport) -> str:
    """Return the steps along the run, as first steps, commits and logs tell them; "" where fewer than two are known."""
    logged = [(point.time, point.step) for point in report.progress.points]
    points = _points(sorted([*report.checkpoints.steps, *logged], key=lambda point: point[0]))
    if len(points) < 2 or not report.time.spans:
        return ""
    axis = Axis(report.time.spans[0].begin_us, report.time.spans[-1].end_us)
    most = max(1, max(step for _, step in points))
    bottom = _TOP + HIGH
    line = " ".join(f"{axis.x(at * US):.1f},{bottom - HIGH * step / most:.1f}" for at, step in points)
    parts = [
        f'<polyline class="st" points="{line}"/>',
        text(LEFT - 8, bottom + 4, "0", "s", "end"),
        text(LEFT - 8, _TOP + 4, f"{most:,}", "s", "end"),
        *axis.drawn(bottom, bottom),
    ]
    return _picture(parts, bottom, f"Steps along the run, up to {most:,}.")


def value_charts(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield (name, picture) of what the script has logged: its values, then amounts per second."""
    points = report.progress.points
    if not points or not report.time.spans:
        return
    for unit in ("", "/s"):
        named = [one.rates if unit else one.values for one in points]
        wrong = [() if unit else one.not_finite for one in points]
        for name in list(dict.fromkeys(name for some in (*named, *wrong) for name in some))[:MOST_VALUES]:
            known = [(one, some[name]) for one, some in zip(points, named, strict=True) if name in some]
            lost = [one.time for one, some in zip(points, wrong, strict=True) if name in some]
            if len(known) + len(lost) > 1:
                yield f"{escape(name)}{unit}", _value_chart(report, f"{name}{unit}", known, lost, bool(unit))


def _value_chart(
    report: RunReport, name: str, known: Sequence[tuple[LoggedPoint, float]], lost: Sequence[float], of_zero: bool
) -> str:
    axis = Axis(report.time.spans[0].begin_us, report.time.spans[-1].end_us)
    bottom = _TOP + HIGH
    low, high = (0.0 if of_zero else min((v for _, v in known), default=0.0)), max((v for _, v in known), default=0.0)
    scale = HIGH / (high - low) if 0 < high - low < float("inf") else 0.0
    line, before = [], -1
    for point, value in known:
        goes_on = before >= 0 and point.step > before  # else ranks were restored: another line begins, with a dot
        line.append(f"{'L' if goes_on else 'M'}{axis.x(point.time * US):.1f} {bottom - (value - low) * scale:.1f}")
        line.append("" if goes_on else "h.1")
        before = point.step
    crosses = "".join(f"M{axis.x(at * US) - 3:.1f} {_TOP - 3:.0f}l6 6m0 -6l-6 6" for at in lost)
    parts = [
        f'<path class="st" d="{"".join(line)}"/>' if known else "",
        f'<path class="fx" d="{crosses}"/>' if crosses else "",
        text(LEFT - 8, bottom + 4, amount(low), "s", "end") if known else "",
        text(LEFT - 8, _TOP + 4, amount(high), "s", "end") if scale else "",
        *axis.drawn(bottom, bottom),
    ]
    cross = " A cross is a value that is NaN or infinite." if lost else ""
    return _picture(parts, bottom, f"{escape(name)} along the run, from {amount(low)} to {amount(high)}.{cross}")


def _points(steps: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the points, at most about a thousand, without commits of steps that the ranks had passed."""
    found: list[tuple[float, int]] = []
    for number, (at, step) in enumerate(steps):
        falls = found and step < found[-1][1]
        restored = number + 1 < len(steps) and steps[number + 1][0] == at
        if not falls or restored:
            found.append((at, max(0, step)))
    every = -(-len(found) // MOST_POINTS)
    return [point for number, point in enumerate(found) if number % max(1, every) == 0 or number == len(found) - 1]


def _picture(parts: Sequence[str], bottom: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 1010 {bottom + 24:.0f}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )
