"""``resilio timeouts RUN``: how long the run may go without a sign of life, from what that was learned, and changes."""

from __future__ import annotations

import getpass
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.terminal import columns, local_time, show
from resilio_hpc.events.phrases import seconds
from resilio_hpc.launch.rundir import limit_files
from resilio_hpc.launch.rundir.limit_files import HANG, HEARTBEAT, MOST_NAMES, START, KeptLimits, LimitOrder
from resilio_hpc.watch.limit_table import CALL, FIRST_STEP, LONGEST_NAME, SECTION, SET, STEP, LimitEntry

_EXAMPLES = """examples:
  resilio timeouts runs/large                              all limits of the run, and where each comes from
  resilio timeouts runs/large --set step=30                30 s for a step, whatever was learned
  resilio timeouts runs/large --set evaluation=900 --set hang=0    a section; hangs are reported only
  resilio timeouts runs/large --set step=auto              learn it again, from the next step on
  resilio timeouts runs/large --set section:export=3600    a section that has not come yet

names:
  first_step  before the first steps     hang   an uncertain hang, until ranks are restarted (0: never)
  step        between two steps          start  from the start of ranks to their first step
  call        between two calls, where a script reports no steps

A running controller takes a change within seconds. Else the run's next job does.
"""
SETTABLE = (FIRST_STEP, STEP, CALL, HANG, START)
LONGEST_S = 1e7
AUTO = "auto"
_WIDE = 78  # columns for the whole table


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0; 2 for a mistake in the command."""
    parser = Parser(
        prog="resilio timeouts",
        description="The limits of a run: for how long it may make no step, and when its hangs are acted on.",
        epilog=_EXAMPLES,
    )
    run_argument.add(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=SECONDS", dest="changes",
        help=f"set a limit; NAME={AUTO} learns it again; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    path = run_argument.directory_of(options)
    kept, order = limit_files.read_kept(path), limit_files.read_order(path)
    if options.changes:
        known = {entry.name.removeprefix(SECTION) for entry in kept.limits if entry.name.startswith(SECTION)}
        order = changed(order, [parse(change, known) for change in options.changes], getpass.getuser(), time.time())
        limit_files.write_order(path, order)
    if options.json:
        print(json.dumps(as_json(path, kept, order)), flush=True)
        return 0
    for line in lines(path, kept, order, columns(_WIDE)):
        show(line) if line[:1] != " " else print(line)
    return 0


def parse(change: str, sections: set[str]) -> tuple[str, float | None]:
    """Return the limit that ``NAME=SECONDS`` names, and its seconds; None for auto. Raises UsageError. Pure."""
    given, equals, text = change.rpartition("=")
    name = given.strip()
    if not equals or not name:
        raise UsageError(f"--set {printable(change)}: write NAME=SECONDS, or NAME={AUTO}")
    if name == HEARTBEAT:
        raise UsageError("--set heartbeat: leases depend on it, so it is fixed when a job starts (--heartbeat-timeout)")
    if name not in SETTABLE:
        section = name.removeprefix(SECTION)
        if name == section and section not in sections:
            known = ", ".join([*SETTABLE, *sorted(sections)])
            raise UsageError(
                f"--set {printable(name)}: no such limit; there are {printable(known, 500)} ({SECTION}NAME for a "
                "section that has not come yet)"
            )
        if not section or not section.isascii() or not section.isprintable() or len(section) > 64:
            raise UsageError(f"--set {printable(name)}: a section's name has 1 to 64 printable ASCII characters")
        name = SECTION + section
    if text.strip() == AUTO:
        return name, None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least = 0.0 if name == HANG else 1.0
    if not least <= value <= LONGEST_S:
        raise UsageError(f"--set {printable(change)}: {AUTO}, or {least:g} to {LONGEST_S:.0f} seconds")
    return name, value


def changed(order: LimitOrder, changes: Sequence[tuple[str, float | None]], by: str, now: float) -> LimitOrder:
    """Return the order with these changes. Raises UsageError for too many. Pure."""
    now = max(now, math.nextafter(order.time, math.inf))  # it is newer, whatever the clock says
    limits, again = dict(order.limits), dict(order.again)
    for name, value in changes:
        if value is None:
            limits.pop(name, None)
            again[name] = now
        else:
            limits[name] = value
    again = dict(sorted(again.items(), key=lambda one: one[1])[-MOST_NAMES:])
    if len(limits) > MOST_NAMES:
        raise UsageError(f"--set: {MOST_NAMES} limits can be set at most; give some back with NAME={AUTO}")
    return LimitOrder(limits, again, by[:LONGEST_NAME], now)


def as_json(path: Path, kept: KeptLimits, order: LimitOrder) -> dict[str, object]:
    """Return what a program reads. Pure."""
    return {
        "run_dir": str(path), "time": kept.time or None, "ranks": kept.ranks,
        "limits": [
            {
                "name": entry.name.removeprefix(SECTION), "section": entry.name.startswith(SECTION),
                "limit_s": entry.limit_s, "source": entry.source, "floor_s": entry.floor_s,
                "waits": entry.waits.number, "steps": entry.waits.steps, "longest_s": entry.waits.longest_s,
            }
            for entry in kept.limits
        ],
        "set": {name.removeprefix(SECTION): value for name, value in order.limits.items()},
        "set_by": order.by, "set_at": order.time or None, "taken": order.time <= kept.ordered,
    }  # fmt: skip


def lines(path: Path, kept: KeptLimits, order: LimitOrder, width: int) -> list[str]:
    """Return the text for a person. Pure, except for the time zone."""
    when = f", as of {local_time(kept.time)} with {kept.ranks} ranks" if kept.time else ": nothing is learned yet"
    told = [f"limits of {printable(str(path), 500)}{when}"]
    rows = [("name", "limit", "from", "waits", "longest", "floor"), *(_row(entry, order.by) for entry in kept.limits)]
    shown = 6 if width >= _WIDE else 4
    if kept.limits:
        widths = [max(len(row[column]) for row in rows) for column in range(shown)]
        told += ["  " + "  ".join(f"{text:<{wide}}" for text, wide in zip(row, widths, strict=False)).rstrip()
                 for row in rows]  # fmt: skip
    if order.time > kept.ordered:
        told.append(
            f"set by {printable(order.by, 40)} at {local_time(order.time)}, not taken yet: {_set(order.limits)}"
        )
    return told


def _set(limits: Mapping[str, float]) -> str:
    shown = sorted((name.removeprefix(SECTION), value) for name, value in limits.items())
    found = [f"{printable(name, 64)} {seconds(value) if value else 'never'}" for name, value in shown]
    return ", ".join(found) or "all are learned"


def _row(entry: LimitEntry, by: str) -> tuple[str, ...]:
    waits = entry.waits
    return (
        printable(entry.name.removeprefix(SECTION), 24), "never" if entry.limit_s is None else seconds(entry.limit_s),
        f"set by {printable(by, 12)}" if entry.source == SET else printable(entry.source, 20),
        str(waits.number or "-"), seconds(waits.longest_s) if waits.number else "-",
        "-" if entry.floor_s is None else seconds(entry.floor_s),
    )  # fmt: skip
