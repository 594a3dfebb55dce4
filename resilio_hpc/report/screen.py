"""An overview drawn for a terminal, for ``resilio status`` and ``resilio view``. Pure: renderables only."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.event_text import FAULTS, plural, restored, seconds, words
from resilio_hpc.events.failure_text import signal_name
from resilio_hpc.events.rungs import rung_words
from resilio_hpc.report.faults import RunFault
from resilio_hpc.report.overview import Overview
from resilio_hpc.report.status import NodeStatus

STATE_STYLE = {"running": "green", "starting": "yellow", "stale": "bold red", "ended": "bold"}
ROLE_STYLE = {"training": "", "spare": "dim", "joining": "yellow", "lost": "red"}
# frequent events, left out: every round has several of each
QUIET = frozenset({
    "committed", "agent", "agent_joined", "informed", "ranks", "ranks_started", "ranks_stopped", "spawner_ready",
    "start", "agent_ends", "launch_ends",
})  # fmt: skip
FRESH_S = 5.0  # a younger checkpoint's age would only flicker
FIXED_LINES = 19  # all lines except the rows of the two tables
MOST_DEVICES = 4
PHASES = {
    "gathering": "waiting for nodes",
    "preparing": "stopping the old ranks, opening the store",
    "starting": "ranks are starting",
    "running": "running",
    "ended": "ending",
}


def screen(o: Overview, height: int = 40, recent: int = 0) -> RenderableType:
    """Return the whole picture in at most about ``height`` lines, with the ``recent`` last events that matter."""
    room = max(height - FIXED_LINES - (recent + 1 if recent else 0), 5)
    parts: list[RenderableType] = [_head(o), _facts(o)]
    nodes = o.status.nodes if o.status is not None else ()
    fault_rows = min(len(o.faults), max(room - len(nodes), room // 2))
    if nodes and o.state != "ended":
        parts.append(_nodes(nodes, max(room - fault_rows, 3)))
    if o.faults:
        parts.append(_faults(o.faults, fault_rows))
    if recent and o.state != "ended":
        parts += [*([] if len(parts) > 2 else [Text()]), *_recent(o, recent)]
    return Group(*parts)


def _recent(o: Overview, count: int) -> list[Text]:
    events = [event for event in o.events if event.kind not in QUIET and event.time >= o.since][-count:]
    lines = [Text.assemble((clock(event.time), "dim"), "  ", words(event.kind, event.fields)) for event in events]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _head(o: Overview) -> Text:
    return Text.assemble(("resilio ", "dim"), (f"run {o.run_id}", "bold"), ("   " + printable(str(o.path)), "dim"))


def _facts(o: Overview) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(o):
        table.add_row(name, value)
    return table


def _rows(o: Overview) -> Iterator[tuple[str, Text]]:
    s = o.status
    yield "state", Text(state_words(o), STATE_STYLE[o.state] if not _went_wrong(o) else "bold red")
    if o.verdict is not None and (failure := Fields(o.verdict.fields).inner("first_failure")).data:
        yield "failure", Text(failure_words(failure), "red")
    job = f"{o.job or 'unknown'}{f', the {_ordinal(o.jobs)} of this run' if o.jobs > 1 else ''}"
    yield "job", Text(job)
    if s is not None:
        if o.state != "ended":
            yield "round", Text(f"{s.round}: {plural(s.world_size, 'rank')}, controller {printable(s.controller)} "
                                f"(epoch {s.epoch})")  # fmt: skip
        step = max(_known(s.step, o.checkpoint.step if o.checkpoint else None), default=None)
        if step is not None:
            rate = s.steps_per_s if o.state == "running" else None
            yield "step", Text(f"{step}{f', {rate:.3g} steps/s' if rate else ''}")
    yield "checkpoint", Text(checkpoint_words(o))
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
    yield "goodput", Text(goodput_words(o))


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
    parts = (("start", g.startup_s), ("recovery", g.recovery_s), ("steps done again", g.redone_s), ("end", g.closing_s))
    rest = ", ".join(f"{name} {seconds(value)}" for name, value in parts if value >= 0.005)
    bound = "" if g.steps_known else "at most "
    return f"{bound}{g.share:.1%} of {seconds(g.total_s)}{f' ({rest})' if rest else ''}"


def failure_words(failure: Fields) -> str:
    """Return the first failure in one line."""
    number = failure.whole("signal")
    how = f"killed by {signal_name(number)}" if number is not None else f"exit code {failure.whole('exit_code')}"
    message = (failure.text("message").strip().splitlines() or [""])[0]
    return printable(f"rank {failure.whole('rank')} on {failure.text('node', '?')}: {how}: {message}", 300)


def _nodes(nodes: tuple[NodeStatus, ...], rows: int) -> Table:
    table = _table("node", "role", "ranks>", "step>", "steps/s>", "silent>")
    order = {"lost": 0, "joining": 1, "training": 2, "spare": 3}
    shown = sorted(nodes, key=lambda node: order.get(node.role, 4)) if len(nodes) > rows else list(nodes)
    for node in shown[:rows]:
        table.add_row(
            Text(printable(node.node, 40)),
            Text(node.role, ROLE_STYLE.get(node.role, "")),
            node.rank_words,
            "" if node.step is None else str(node.step),
            "" if not node.step_s else f"{1 / node.step_s:.3g}",
            "" if node.silent_s is None else f"{node.silent_s:.1f} s",
        )
    if len(shown) > rows:
        table.add_row(Text(f"and {plural(len(shown) - rows, 'more node')}", "dim"))
    return table


def _faults(faults: tuple[RunFault, ...], rows: int) -> Table:
    table = _table("time", "fault", "where", "recovery>", "again>", "what was done")
    for fault in faults[-rows:]:
        where = f"rank {fault.rank} on {fault.node}" if fault.rank is not None else fault.node
        if fault.recovered:
            outcome = Text(seconds(fault.recovery_s) if fault.recovery_s is not None else "not needed", "green")
        else:
            outcome = Text("not recovered", "red")
        table.add_row(
            clock(fault.time),
            Text(fault_words(fault.kind)),
            Text(printable(where, 60)),
            outcome,
            "" if fault.lost_steps is None else plural(fault.lost_steps, "step"),
            Text(printable(rung_words(fault.plan)), "dim"),
        )
    if len(faults) > rows:
        table.add_row(Text(f"{len(faults) - rows} before", "dim"))
    return table


def fault_words(kind: str) -> str:
    """Return ``killed rank``, ``loss of a node``."""
    said = FAULTS.get(kind, kind.replace("_", " "))
    return printable(said.removeprefix("a ").removeprefix("the "), 60)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="dim")
    for name in names:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", no_wrap=True)
    return table


def clock(unix: float) -> str:
    """Return ``HH:MM:SS`` in local time."""
    return local_time(unix, "%H:%M:%S")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
