"""The picture of a run: nodes × time, with its jobs, rounds and faults. Pure.

What all nodes with ranks do at a time is one column of colour. Over it lie the nodes that do something else: those
without ranks, and those that no job holds. So the picture grows with what happens, not with nodes × time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.svg import rect, short, text, title
from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.phrases import seconds
from resilio_hpc.report.accounting.node_time import NodesSpan
from resilio_hpc.report.chain.recoveries import ChainRecovery, RecoveryOutcome
from resilio_hpc.report.chain.report_text import where_text
from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.report.page.axis import LEFT, RIGHT, Axis, columns, runs
from resilio_hpc.report.screen_tables import fault_words

PIXELS = 890
TALL, MOST_ROW = 560.0, 18.0
MOST_RECTS = 8_000
MOST_TIPS = 2_000
MANY_FAULTS = 300  # from here on their marks are smaller
LABELS = 12.0  # units between the names of nodes
_JOBS, _ROUNDS, _TOP = 14.0, 34.0, 52.0
_LONGEST_NAME = 15


def timeline(report: RunReport) -> str:
    """Return the picture as SVG; "" of a run without time."""
    if not report.time.spans:
        return ""
    names = report.nodes.names
    row = min(MOST_ROW, TALL / max(1, len(names)))
    axis = Axis(report.time.spans[0].begin_us, report.time.spans[-1].end_us)
    bottom = _TOP + row * max(1, len(names))
    parts = [
        *_jobs(report, axis),
        *_rounds(report, axis),
        *_columns(report, axis, bottom),
        *_others(report, axis, row),
        *axis.drawn(_TOP, bottom),
        *_names(names, row),
        *_faults(report, axis, row),
    ]
    height = bottom + 24
    label = f"Timeline of {len(names)} nodes, with {len(report.recoveries)} faults. The tables have the same."
    return (
        f'<svg viewBox="0 0 1010 {height:.0f}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )


def _jobs(report: RunReport, axis: Axis) -> Iterator[str]:
    yield text(LEFT - 8, _JOBS, "jobs", "s", "end")
    for part in report.time.parts:
        x, end = axis.x(part.facts.began.us), axis.x(part.facts.ended.us)
        name = printable(part.facts.job or part.facts.key or "?", 24)
        took = seconds((part.facts.ended.us - part.facts.began.us) / 1e6)
        yield rect(x, 3, end - x - 1, 15, tip=f"job {name}, {took}", kind="job", least=1)
        if end - x > 7 * len(name) + 8:
            yield text(x + 4, _JOBS + 0.5, name, "s")


def _rounds(report: RunReport, axis: Axis) -> Iterator[str]:
    yield text(LEFT - 8, _ROUNDS, "rounds", "s", "end")
    places = {round(axis.x(one.began.us), 0) for part in report.time.parts for one in part.facts.rounds}
    marks = "".join(f"M{x:.0f} 24V36" for x in sorted(places))
    if marks:
        yield f'<path class="rd" d="{marks}"/>'


def _columns(report: RunReport, axis: Axis, bottom: float) -> Iterator[str]:
    scale = (RIGHT - LEFT) / PIXELS
    for first, after, cause in runs(columns(report.time.spans, axis, PIXELS)):
        # a little wider than it is, so that no seam shows between it and the next one
        width = (after - first) * scale + (0.3 if after < PIXELS else 0.0)
        yield rect(LEFT + first * scale, _TOP, width, bottom - _TOP, kind=f"c-{cause.value}")
    yield f'<rect class="frame" x="{LEFT}" y="{_TOP}" width="{RIGHT - LEFT}" height="{bottom - _TOP:.1f}"/>'


def _others(report: RunReport, axis: Axis, row: float) -> Iterator[str]:
    """Return the nodes that do something else than those with ranks: held by no job of that time, or without ranks."""
    places = {name: number for number, name in enumerate(report.nodes.names)}
    drawn = [
        (kind, first, after, x, end)
        for kind, span in (*_away(report), *(("c-idle", span) for span in report.nodes.spans if not span.held))
        if (end := axis.x(span.end_us)) - (x := axis.x(span.begin_us)) >= 0.5
        for first, after in _neighbours(sorted(places[node] for node in span.nodes))
    ]
    if len(drawn) > MOST_RECTS:
        drawn = sorted(drawn, key=lambda one: -(one[2] - one[1]) * (one[4] - one[3]))[:MOST_RECTS]
        drawn.sort(key=lambda one: one[0])
    for kind, first, after, x, end in drawn:
        yield rect(x, _TOP + first * row, end - x, max((after - first) * row, 0.8), kind=kind)


def _away(report: RunReport) -> Iterator[tuple[str, NodesSpan]]:
    """Return which nodes a job did not hold while it ran."""
    everything = frozenset(report.nodes.names)
    held = [span for span in report.nodes.spans if span.held]
    for part in report.time.parts:
        begin, end = part.facts.began.us, part.facts.ended.us
        here = [span for span in held if span.begin_us < end and span.end_us > begin]
        edges = sorted({begin, end, *(min(max(edge, begin), end) for span in here
                                      for edge in (span.begin_us, span.end_us))})  # fmt: skip
        for first, after in pairwise(edges):
            present = [span.nodes for span in here if span.begin_us <= first and span.end_us >= after]
            missing = everything.difference(*present)
            if missing:
                yield "back", NodesSpan(tuple(missing), first, after, held=False)


def _neighbours(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return (first, after the last) of rows that follow each other."""
    first = last = None
    for number in rows:
        if last is not None and first is not None and number != last + 1:
            yield first, last + 1
            first = number
        first = number if first is None else first
        last = number
    if first is not None and last is not None:
        yield first, last + 1


def _names(names: Sequence[str], row: float) -> Iterator[str]:
    every = max(1, -(-int(LABELS * 100) // int(max(row, 0.01) * 100)))
    for number in range(0, len(names), every):
        name = printable(names[number], 255)
        if len(name) > _LONGEST_NAME:
            name = f"{name[:5]}…{name[-(_LONGEST_NAME - 6) :]}"
        yield text(LEFT - 8, _TOP + number * row + min(row, LABELS) / 2 + 4, name, "s", "end")


def _faults(report: RunReport, axis: Axis, row: float) -> Iterator[str]:
    places = {name: number for number, name in enumerate(report.nodes.names)}
    taken: set[tuple[int, int, RecoveryOutcome]] = set()
    radius = 2.6 if len(report.recoveries) < MANY_FAULTS else 1.9
    for one in report.recoveries:
        x = axis.x(one.fault.time * 1e6)
        y = _TOP + (places[one.fault.node] + 0.5) * row if one.fault.node in places else _TOP - 5
        cell = (round(x / 3), round(y / 3), one.outcome)
        if cell in taken:
            continue
        taken.add(cell)
        yield _mark(one, x, y, radius, title(_tip(one)) if len(taken) <= MOST_TIPS else "")


def _mark(one: ChainRecovery, x: float, y: float, radius: float, tip: str) -> str:
    """Return a mark: a dot for what recovered by itself, a triangle for a recovery by hand, a cross for none."""
    at = f"{x:.1f} {short(y)}"
    if one.outcome in (RecoveryOutcome.AUTOMATIC, RecoveryOutcome.NOT_NEEDED):
        return f'<circle class="f" cx="{x:.1f}" cy="{short(y)}" r="{radius}">{tip}</circle>'
    if one.outcome is RecoveryOutcome.BY_HAND:
        return f'<path class="f" d="M{at}m-4.5 3.5h9l-4.5 -8z">{tip}</path>'
    return f'<path class="fx" d="M{at}m-4 -4l8 8m0 -8l-8 8">{tip}</path>'


def _tip(one: ChainRecovery) -> str:
    when = local_time(one.fault.time, "%m-%d %H:%M:%S")
    took = f", {seconds(one.down_s)}" if one.down_s is not None else ""
    return f"{when} {fault_words(one.fault.kind)}, {where_text(one)}{took}, {one.outcome.value}"
