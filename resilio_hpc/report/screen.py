"""An overview drawn for a terminal, for ``resilio status`` and ``resilio view``. Pure: renderables only."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.failure_text import signal_name
from resilio_hpc.events.phrases import amount, plural, restored, seconds
from resilio_hpc.events.slow_text import slow_words
from resilio_hpc.report.overview import Overview
from resilio_hpc.report.screen_tables import domain_of, event_lines, fault_lines, node_lines, with_trouble

STATE_STYLE = {"running": "green", "starting": "yellow", "stale": "bold red", "ended": "bold"}
FRESH_S = 5.0  # a younger checkpoint's age would only flicker
MOST_DEVICES = 4
TALL = 34  # lines: from here on there is room for empty ones
NARROW = 70  # columns
LEAST_EVENTS = 2
LABEL = 12  # columns of the facts' names
PHASES = {
    "gathering": "waiting for nodes",
    "preparing": "stopping the old ranks, opening the store",
    "starting": "ranks are starting",
    "running": "running",
    "ended": "ending",
}


def screen(
    o: Overview, height: int = 40, recent: int = 0, width: int = 120, internals: bool = True, foot: str = ""
) -> RenderableType:
    """Return the whole picture in at most ``height`` lines, if that is possible, none longer than ``width``.

    ``recent``: last events that matter, as far as there is room; ``internals``: with round, controller, epoch;
    ``foot``: the last line.
    """
    lines = [_head(o, width), *_facts(o, width, internals)]
    height -= bool(foot)
    nodes = with_trouble(o) if o.status is not None and o.state != "ended" else ()
    domain = domain_of(o.status.nodes) if o.status is not None else ""
    recent = recent if o.state != "ended" else 0
    empty = [Text()] if height >= TALL else []
    room = height - len(lines) - len(empty) * (bool(nodes) + bool(o.faults) + bool(recent))
    for_nodes, for_faults, for_events = _shares(room, len(nodes), len(o.faults), recent)
    if for_nodes:
        lines += [*empty, *node_lines(nodes, for_nodes, width, domain)]
    if for_faults:
        lines += [*empty, *fault_lines(o.faults, for_faults, width, domain)]
    events = event_lines(o, for_events, width, domain, internals)
    if events:
        lines += [*(empty or [Text()] * (room > for_nodes + for_faults + len(events))), *events]
    if foot:
        lines.append(Text(foot[:width], "dim"))
    return Group(*lines)


def _shares(room: int, nodes: int, faults: int, recent: int) -> tuple[int, int, int]:
    """Return the lines for nodes, faults and events. A table takes a head, a row, and a word on what is left out."""
    wanted_nodes, wanted_faults = nodes + 1 if nodes else 0, faults + 1 if faults else 0
    for_events = min(recent, LEAST_EVENTS) if room >= 8 else 0
    for_faults = min(wanted_faults, 3)
    for_nodes = min(wanted_nodes, max(room - for_faults - for_events, 3))
    left = room - for_nodes - for_faults - for_events
    if left > 0:
        more = min(left, recent - for_events)
        for_events += more
        for_faults = min(wanted_faults, for_faults + left - more)
    elif wanted_nodes > 6 and wanted_faults + recent:  # nodes took all: events and faults get a part of it
        give = min(for_nodes - 6, wanted_faults - for_faults + recent - for_events)
        if give > 0:
            for_nodes -= give
            more = min(give, recent - for_events)
            for_events += more
            for_faults += min(wanted_faults - for_faults, give - more)
    return for_nodes, for_faults, for_events


def _head(o: Overview, width: int) -> Text:
    path, name = printable(str(o.path)), f"run {o.run_id}"
    room = max(width - len(name) - 11, 8)
    if len(path) > room:
        path = f"…{path[1 - room :]}"
    head = Text.assemble(("resilio ", "dim"), (name, "bold"), ("   " + path, "dim"))
    head.truncate(width, overflow="ellipsis")
    return head


def _facts(o: Overview, width: int, internals: bool) -> list[Text]:
    """Return the facts, each beside its name; a long one goes over several lines."""
    room = max(width - LABEL, 10)
    lines = []
    for name, value in _rows(o, width < NARROW, internals):
        for number, part in enumerate(value.wrap(_CONSOLE, room, overflow="fold")):
            part.rstrip()
            lines.append(Text.assemble((f"{name if number == 0 else '':<{LABEL}}", "dim"), part))
    return lines


_BARS = "▁▂▃▄▅▆▇█"
_CONSOLE = Console(file=io.StringIO(), width=80)  # rich asks one for the size of a tab


def _rows(o: Overview, narrow: bool, internals: bool) -> Iterator[tuple[str, Text]]:
    s = o.status
    yield "state", Text(state_words(o), STATE_STYLE[o.state] if not _went_wrong(o) else "bold red")
    if o.verdict is not None and (failure := Fields(o.verdict.fields).inner("first_failure")).data:
        yield "failure", Text(failure_words(failure), "red")
    job = f"{o.job or 'unknown'}{f', the {_ordinal(o.jobs)} of this run' if o.jobs > 1 else ''}"
    yield "job", Text(job)
    if s is not None:
        if o.state != "ended" and internals:
            yield "round", Text(f"{s.round}: {plural(s.world_size, 'rank')}, controller "
                                f"{printable(s.controller.removesuffix(domain_of(s.nodes)))} "
                                f"(epoch {s.epoch})")  # fmt: skip
        done = o.progress.total if o.verdict is not None and o.verdict.verdict == "completed" else None
        step = max(_known(s.step, o.checkpoint.step if o.checkpoint else None, done), default=None)
        if step is not None:
            rate = s.steps_per_s if o.state == "running" and s.stalled_s is None else None
            yield "step", Text(f"{step}{_of_total(o, step)}{f', {rate:.3g} steps/s' if rate else ''}{_to_come(o)}")
    if o.progress.points and (logged := logged_words(o)):
        yield "logged", Text(logged)
    if o.progress.job_left_s is not None:
        then = f"; job {o.progress.next_job} goes on then" if o.progress.next_job else ""
        yield "time left", Text(f"{seconds(o.progress.job_left_s)} in this job{then}")
    if s is not None and o.state == "running":
        for found in s.slow:
            yield "slow", Text(printable(slow_words(found), 300), "yellow")
    yield "checkpoint", Text(checkpoint_words(o).removesuffix(" for it" if narrow else ""))
    if o.restore is not None:
        took = f" in {seconds(o.restore.seconds)}" if o.restore.seconds is not None else ""
        yield "restored", Text(f"{restored(o.restore.source, o.restore.step)}{took}")
    if s is not None and s.restarts:
        since = f", {s.without_progress} since the last checkpoint" if s.without_progress else ""
        yield "restarts", Text(f"{s.restarts}{since}")
    if o.out_of_use:
        shown = "; ".join(map(str, o.out_of_use[:MOST_DEVICES]))
        more = len(o.out_of_use) - MOST_DEVICES
        yield "out of use", Text(f"{shown}{f' and {more} more' if more > 0 else ''}", "yellow")
    full = [f"{printable(node.node, 40)}: {node.memory}" for node in s.nodes if node.memory] if s is not None else []
    if full and o.state != "ended":
        others = f"; and {plural(len(full) - MOST_DEVICES, 'more node')}" if len(full) > MOST_DEVICES else ""
        yield "memory", Text("; ".join(full[:MOST_DEVICES]) + others, "yellow")
    yield "goodput", Text(goodput_words(o))


def _of_total(o: Overview, step: int) -> str:
    total = o.progress.total
    return f" of {total:,} ({step / total:.0%})" if total is not None and total >= step > 0 else ""


def _to_come(o: Overview) -> str:
    left_s = o.progress.left_s
    if left_s is None or o.state != "running":
        return ""
    day = "%H:%M" if left_s < 43_200 else "%Y-%m-%d %H:%M"
    return f", done in {seconds(left_s)} (at {local_time(o.now + left_s, day)})" if left_s > 0 else ""


def logged_words(o: Overview) -> str:
    """Return the newest logged values, with a small picture of how the first of them went."""
    last = o.progress.points[-1]
    said = [f"{name} {value:.4g}" for name, value in last.values.items()]
    said += [f"{name} is not finite" for name in last.not_finite]
    said += [f"{amount(rate)} {name}/s" for name, rate in last.rates.items()]
    name = next(iter(last.values), "")
    drawn = sparkline([point.values[name] for point in o.progress.points if name in point.values]) if name else ""
    return printable(f"{', '.join(said)}{f' at step {last.step}' if said else ''}{f'  {drawn}' if drawn else ''}", 400)


def sparkline(values: Sequence[float], wide: int = 24) -> str:
    """Return values as bars of text, the newest last; "" of fewer than two."""
    if len(values) < 2:
        return ""
    every = -(-len(values) // wide)
    some = list(values[::-1][::every][::-1])
    low, high = min(some), max(some)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] for value in some)


def _known(*steps: int | None) -> list[int]:
    return [step for step in steps if step is not None]


def _went_wrong(o: Overview) -> bool:
    return o.verdict is not None and o.verdict.exit_code not in (0, 75, None)


def state_words(o: Overview) -> str:
    """Return the state of the run, in one line."""
    if o.verdict is not None:
        when = f", {seconds(max(0.0, o.now - o.verdict.time))} ago" if o.verdict.time else ""
        return f"ended: {o.verdict.verdict.replace('_', ' ')} ({o.verdict.reason}){when}"
    phase = PHASES.get(o.status.phase, printable(o.status.phase)) if o.status is not None else "starting"
    if o.state == "stale":
        silent = seconds(o.silent_s)
        return f"stale: nothing was heard for {silent} (then: {phase}); look whether job {o.job or '?'} still runs"
    if o.status is not None and o.status.stalled_s is not None:
        return f"stalled {seconds(o.status.stalled_s + max(0.0, o.now - o.status.time))}: no step for so long"
    return phase


def checkpoint_words(o: Overview) -> str:
    """Return the text for the newest committed checkpoint."""
    if o.checkpoint is None:
        return "none committed"
    age_s = o.now - o.checkpoint.time if o.checkpoint.time else 0.0
    age = f", {seconds(age_s)} ago" if age_s > FRESH_S else ""
    waited_s = o.checkpoint.blocked_s
    waited = f"; training waited {seconds(waited_s)} for it" if waited_s is not None else ""
    return f"step {o.checkpoint.step} committed{age}{waited}"


def goodput_words(o: Overview) -> str:
    """Return the share, and the causes of the rest."""
    g = o.goodput
    if g.share is None:
        return "unknown"
    parts = (("start", g.startup_s), ("recovery", g.recovery_s), ("steps done again", g.redone_s),
             ("stalled", g.stalled_s), ("end", g.closing_s))  # fmt: skip
    rest = ", ".join(f"{name} {seconds(value)}" for name, value in parts if value >= 0.005)
    bound = "" if g.steps_known else "at most "
    return f"{bound}{g.share:.1%} of {seconds(g.total_s)}{f' ({rest})' if rest else ''}"


def failure_words(failure: Fields) -> str:
    """Return the first failure in one line."""
    number = failure.whole("signal")
    how = f"killed by {signal_name(number)}" if number is not None else f"exit code {failure.whole('exit_code')}"
    message = (failure.text("message").strip().splitlines() or [""])[0]
    return printable(f"rank {failure.whole('rank')} on {failure.text('node', '?')}: {how}: {message}", 300)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
