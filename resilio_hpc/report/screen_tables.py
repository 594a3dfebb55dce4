"""The tables of a run's screen, as lines that fit its width: nodes, faults, last events. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.text import Text

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event
from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.event_text import FAULTS, words
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.events.rungs import rung_words
from resilio_hpc.report.faults import RunFault
from resilio_hpc.report.overview import Overview
from resilio_hpc.report.status import NodeStatus

ROLE_STYLE = {"training": "", "spare": "dim", "joining": "yellow", "lost": "red", "failed": "red", "silent": "yellow",
              "stalled": "red", "slow": "yellow"}  # fmt: skip
ROLE_ORDER = {"lost": 0, "failed": 1, "stalled": 1, "silent": 2, "slow": 2, "joining": 3, "training": 4, "spare": 5}
SILENT_S = 2.0  # agents speak several times a second
# frequent events, left out: every round has several of each
QUIET = frozenset({
    "committed", "agent", "agent_joined", "informed", "ranks", "ranks_started", "ranks_stopped", "spawner_ready",
    "start", "agent_ends", "launch_ends", "read_ahead", "voters", "counters", "memory_warning", "metrics_endpoint",
    "metrics_unclear", "step_verified", "noise_measured", "standby_ready", "process_image", "logged", "pace",
    "steps_planned",
})  # fmt: skip
EVENT_STYLE = {
    "rank_failed": "red", "first_failure": "red", "node_lost": "red", "agent_ended": "red", "launch_failed": "red",
    "persist_failed": "yellow", "save_overdue": "yellow", "stalled": "red", "hang": "red", "goes_on": "green",
    "recovered": "green", "rank_restarted": "green", "node_returned": "green", "memory_alert": "yellow",
    "digests_differ": "red", "result_judged": "yellow", "slow": "yellow", "slow_over": "green",
}  # fmt: skip
OF_NODES = frozenset({"node_lost", "spare_lost", "agent_lost", "controller_lost"})
LEAST_NAME = 8  # columns for a name that is cut
SHORT_NAME = 24  # columns below which other columns are left out first
GAP = 2


def domain_of(nodes: Sequence[NodeStatus]) -> str:
    """Return the domain that all nodes' names end with, which tells none from another; "" without one."""
    names = [node.node for node in nodes]
    if len(names) < 2 or not all("." in name for name in names):
        return ""
    shared: list[str] = []
    for same in zip(*(name.split(".")[:0:-1] for name in names), strict=False):  # the first label is the node's own
        if len(set(same)) > 1:
            break
        shared.insert(0, same[0])
    return "".join(f".{label}" for label in shared)


def with_trouble(o: Overview) -> tuple[NodeStatus, ...]:
    """Return the nodes; of one in trouble the role says so: failed, stalled, silent or slow."""
    status = o.status
    if status is None:
        return ()
    failed, stalled = _in_trouble(o.events)
    slow = {name for found in status.slow for name in found.texts("nodes")}
    is_stalled, runs = status.stalled_s is not None, o.state == "running"
    roles = [(is_stalled, stalled, "stalled"), (True, failed, "failed"), (runs, slow, "slow")]
    found = []
    for node in status.nodes:
        role = next((word for holds, named, word in roles if holds and node.node in named), node.role)
        if role == "training" and (node.silent_s or 0.0) + max(0.0, o.now - status.time) > SILENT_S:
            role = "silent"
        found.append(node if node.role == "lost" else replace(node, role=role))
    return tuple(found)


def _in_trouble(events: Sequence[Event]) -> tuple[set[str], set[str]]:
    """Return the nodes with failed ranks, and those that hold up a stall, since the ranks were started last."""
    failed: set[str] = set()
    stalled: set[str] = set()
    for event in reversed(events):
        if event.kind in ("start", "launch", "first_step", "recovered"):
            break
        f = Fields(event.fields)
        if event.kind == "rank_failed" and not f.data.get("echo") and not f.data.get("alone"):
            failed.add(f.text("node"))
        elif event.kind in ("hang", "stalled"):
            stalled.update(f.texts("nodes"))
        elif event.kind == "goes_on":
            break
    return failed, stalled


def node_lines(nodes: Sequence[NodeStatus], lines: int, width: int, domain: str = "") -> list[Text]:
    """Return the nodes in at most ``lines`` lines. Where not all fit, those that need a look come first."""
    shown = list(nodes)
    if len(nodes) > lines - 1:
        shown = sorted(nodes, key=lambda node: (ROLE_ORDER.get(node.role, 6), -(node.step_s or 0.0)))
        shown = shown[: max(lines - 2, 1)]
    rows = [
        [
            Text(printable(node.node.removesuffix(domain), 255)),
            Text(node.role, ROLE_STYLE.get(node.role, "")),
            Text(node.rank_words),
            Text("" if node.step is None else str(node.step)),
            Text("" if not node.step_s else f"{1 / node.step_s:.3g}"),
            Text("" if node.silent_s is None else f"{node.silent_s:.1f} s"),
        ]
        for node in shown
    ]
    made = _table(("node", "role", "ranks>", "step>", "steps/s>", "silent>"), rows, width, 0, ("steps/s>",))
    hidden = len(nodes) - len(shown)
    if hidden:
        roles = Counter(node.role for node in nodes) - Counter(node.role for node in shown)
        each = ", ".join(f"{count} {role}" for role, count in roles.items())
        made.append(_line(Text(f"and {plural(hidden, 'more node')}: {each}", "dim"), width))
    return made


def fault_lines(faults: Sequence[RunFault], lines: int, width: int, domain: str = "") -> list[Text]:
    """Return the newest faults in at most ``lines`` lines."""
    fits = len(faults) <= lines - 1
    shown = faults if fits else faults[-max(lines - 2, 1) :]
    rows = []
    for fault in shown:
        node = fault.node.removesuffix(domain)
        # beside the loss of a node or an agent, the rank is that of an echo
        where = f"rank {fault.rank} on {node}" if fault.rank is not None and fault.kind not in OF_NODES else node
        if fault.recovered:
            outcome = Text(seconds(fault.recovery_s) if fault.recovery_s is not None else "not needed", "green")
        else:
            outcome = Text("not recovered", "red")
        rows.append([
            Text(clock(fault.time)),
            Text(f"{fault_words(fault.kind)}{' (drill)' if fault.drill else ''}", "yellow" if fault.drill else "red"),
            Text(printable(where, 255)),
            outcome,
            Text("" if fault.lost_steps is None else plural(fault.lost_steps, "step")),
            Text(printable(rung_words(fault.plan)), "dim"),
        ])  # fmt: skip
    names = ("time", "fault", "where", "recovery>", "again>", "what was done")
    made = _table(names, rows, width, 2, ("what was done", "again>", "time"))
    if not fits:
        made.append(Text(f"{len(faults) - len(shown)} before", "dim"))
    return made


def event_lines(o: Overview, count: int, width: int, domain: str = "", internals: bool = True) -> list[Text]:
    """Return the last events that matter, each cut where the screen ends."""
    quiet = QUIET if internals else QUIET | {"controller", "stepped_down", "round"}
    events = [event for event in o.events if event.kind not in quiet and event.time >= o.since]
    # echoes are counted by an event of their own
    events = [event for event in events if not (event.kind == "rank_failed" and event.fields.get("echo"))]
    return [
        _line(
            Text.assemble(
                (clock(event.time), "dim"), "  ",
                (_without(domain, words(event.kind, event.fields)), EVENT_STYLE.get(event.kind, "")),
            ),
            width,
        )
        for event in events[max(0, len(events) - count) :]
    ]  # fmt: skip


def _without(domain: str, text: str) -> str:
    return text.replace(domain, "") if domain else text


def _table(
    names: Sequence[str], rows: Sequence[Sequence[Text]], width: int, flexible: int, spare: Sequence[str]
) -> list[Text]:
    """Return a head and rows.

    ``>``: to the right; ``flexible``: the column that is cut in the middle; ``spare``: columns that are left out where
    room is short, in this order.
    """
    kept = list(range(len(names)))
    widths = [
        max(len(name.rstrip(">")), *(row[column].cell_len for row in rows), 0) for column, name in enumerate(names)
    ]

    def over() -> int:
        return sum(widths[column] for column in kept) + GAP * (len(kept) - 1) - width

    for name in spare:
        if over() > max(0, widths[flexible] - SHORT_NAME):
            kept.remove(names.index(name))
    if over() > 0:
        widths[flexible] = max(LEAST_NAME, widths[flexible] - over())
    head = [Text(name.rstrip(">"), "dim") for name in names]
    return [
        _line(_joined([(_fitted(row[c], widths[c], names[c].endswith(">"))) for c in kept]), width)
        for row in (head, *rows)
    ]


def _fitted(cell: Text, width: int, right: bool) -> Text:
    """Return the cell at this width. A name that is too long loses its middle: its end tells nodes apart."""
    fitted = cell.copy()
    if fitted.cell_len > width:
        tail = (width - 1) * 2 // 3
        head, end = cell.copy(), cell.plain[-tail:]
        head.truncate(width - 1 - tail)
        fitted = Text.assemble(head, "…", (end, cell.style))
        fitted.truncate(width)
    room = width - fitted.cell_len
    return Text(" " * room).append_text(fitted) if right else fitted.append(" " * room)


def _joined(cells: Sequence[Text]) -> Text:
    return Text(" " * GAP).join(cells)


def _line(text: Text, width: int) -> Text:
    text.rstrip()
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    return text


def fault_words(kind: str) -> str:
    """Return ``killed rank``, ``loss of a node``."""
    said = FAULTS.get(kind, kind.replace("_", " "))
    return printable(said.removeprefix("a ").removeprefix("the "), 60)


def clock(unix: float) -> str:
    """Return ``HH:MM:SS`` in local time."""
    return local_time(unix, "%H:%M:%S")
