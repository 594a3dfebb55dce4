"""Step times of a run as measurements: the pace of undisturbed steps, for each size and layout that it had. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import US, TimeCause
from resilio_hpc.report.accounting.run_time import run_time

STEADY = frozenset({TimeCause.TRAIN, TimeCause.SAVE, TimeCause.REPEATED})
"""Steps that are made again later took as long as others. A save blocks one step, which a median leaves out."""
ALLOWED = 0.02  # of a line's time that may be something else: the edges of spans come from other clocks
_PERIODS = {"slow": "slow_over", "test_begun": "tested"}  # steps go on meanwhile, but not at their usual pace


@dataclass(frozen=True)
class SteadyPace:
    """Steps of one size and layout. ``step_s``: their median; half of the lines are within ``spread`` of it, a part.

    ``layout``: the planner's words that the run recorded, by name; ``layouts``: of ``--layout``; ``asked``: of
    ``--layout-options``. ``steps``: that were timed; ``disturbed``: that were left out.
    """

    nodes: int
    ranks: int
    layout: Mapping[str, str]
    layouts: tuple[str, ...]
    asked: tuple[str, ...]
    steps: int
    disturbed: int
    step_s: float
    spread: float


@dataclass
class _Size:
    """Lines of one size and layout: seconds of a step, and the number of steps. ``warm``: the first of each round."""

    nodes: int
    ranks: int
    layout: dict[str, str]
    layouts: tuple[str, ...]
    asked: tuple[str, ...]
    lines: list[tuple[float, int]] = field(default_factory=list)
    warm: list[tuple[float, int]] = field(default_factory=list)
    disturbed: int = 0

    def pace(self) -> SteadyPace:
        lines = self.lines or self.warm
        step_s = weighted_median(lines)
        spread = weighted_median([(abs(one / step_s - 1), steps) for one, steps in lines])
        steps = sum(count for _, count in lines)
        own = (self.nodes, self.ranks, self.layout, self.layouts, self.asked)
        return SteadyPace(*own, steps, self.disturbed, step_s, spread)


def paces(events: Sequence[Event]) -> list[SteadyPace]:
    """Return the pace of each size and layout in which the run made steps, in their order. ``events`` by time.

    The first line of a round is left out where there are others: compilers, allocators and caches are at work. Left out
    is also what was disturbed: by a failure, a stall, a pause, a slow rank, a test of the nodes. ``step_s`` is 0 where
    nothing else is left.
    """
    unsteady = _unsteady(events)
    sizes: dict[tuple[object, ...], _Size] = {}
    asked: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    words, planned = dict[str, str](), dict[str, str]()
    nodes = ranks = 0
    since: float | None = None  # the end of the line before; None before the first step of a round
    warm = True
    for event in events:
        f = Fields(event.fields)
        if event.kind == "launch":
            layouts, words, planned, ranks = f.texts("layouts"), _words(f.inner("layout")), {}, 0
        elif event.kind == "layouts_planned":
            asked = f.texts("asked")
        elif event.kind == "round":
            nodes, ranks, since, warm = len(f.texts("members")), f.whole("world_size") or 0, None, True
        elif event.kind == "layout":
            planned = {**_words(f), **_words(f.inner("planned"))}
        elif event.kind == "first_step":
            since = event.time
        elif event.kind == "pace" and ranks > 0:
            steps, step_s = f.whole("steps") or 0, f.number("step_s") or 0.0
            layout = {**words, **planned}
            key = (nodes, ranks, *sorted(layout.items()), *layouts)
            size = sizes.setdefault(key, _Size(nodes, ranks, layout, layouts, asked))
            began = event.time - steps * step_s if since is None else since
            if steps > 0 and step_s > 0:
                if _overlap(unsteady, began, event.time) > ALLOWED * (event.time - began):
                    size.disturbed += steps
                else:
                    (size.warm if warm else size.lines).append((step_s, steps))
                since, warm = event.time, False
    return [one.pace() for one in sizes.values()]


def _words(f: Fields) -> dict[str, str]:
    """Return a layout's words: numbers and texts alike."""
    found = {name: value for name, value in f.data.items() if isinstance(value, str) or f.whole(name) is not None}
    return {str(name): str(value)[:40] for name, value in found.items() if name not in ("round", "ranks", "why")}


def _unsteady(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the times in which steps do not show what the cluster can do, in Unix seconds."""
    spans = (span for part in run_time(events).parts for span in part.spans)
    found = [(span.begin_us / US, span.end_us / US) for span in spans if span.cause not in STEADY]
    open_since: dict[str, float] = {}
    for event in events:
        if event.kind in _PERIODS:
            since = Fields(event.fields).time("since")
            open_since.setdefault(_PERIODS[event.kind], event.time if since is None else since)
        elif event.kind in open_since:
            found.append((open_since.pop(event.kind), event.time))
    return found + [(since, math.inf) for since in open_since.values()]


def _overlap(spans: Iterable[tuple[float, float]], began: float, ended: float) -> float:
    return sum(max(0.0, min(end, ended) - max(begin, began)) for begin, end in spans)


def weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """Return the value in the middle of (value, weight); 0 without any."""
    half, so_far = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in sorted(values):
        so_far += weight
        if so_far >= half:
            return value
    return 0.0
