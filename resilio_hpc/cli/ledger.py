"""``resilio ledger [RUN]``: the events of a run, in order, one line each."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Sequence

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.ledger import Event
from resilio_hpc.core.terminal import local_time, raw
from resilio_hpc.events.event_text import KINDS, words
from resilio_hpc.report.as_json import event_json
from resilio_hpc.report.overview import RunReader, is_closed

POLL_S = 0.3
STYLES = {
    "rank_failed": "31", "node_lost": "31", "persist_failed": "31", "slow_start": "33", "decision": "33",
    "stopping": "33", "stalled": "31", "hang": "31", "goes_on": "32", "recovered": "32", "verdict": "1",
    "memory_warning": "33", "memory_alert": "33", "committed": "2", "ranks_started": "2", "ranks_stopped": "2",
    "digests_differ": "31", "result_judged": "33", "rank_restarted": "32", "restarts_all": "33",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0; 2 without a run."""
    parser = Parser(
        prog="resilio ledger", description="The events of a run, of all nodes and jobs, by time (local time)."
    )
    run_argument.add(parser, optional=True)
    parser.add_argument(
        "--json", action="store_true", help="the ledger's own lines, with all fields: an object of JSON on each line"
    )
    parser.add_argument("--follow", action="store_true", help="go on as events come, until the job has a verdict")
    parser.add_argument("--event", action="append", default=[], metavar="KIND", help="only this kind; may be repeated")
    options = parser.parse_args(argv)
    reader = RunReader(run_argument.run_of(options))
    events = reader.new_events()
    _check_kinds(options.event, {event.kind for event in events})
    printer = _Printer(options.json, set(options.event))
    printer.show(events)
    while options.follow:
        over = is_closed(reader.overview(time.time()))
        printer.show(reader.new_events())
        if over:
            break
        time.sleep(POLL_S)
    return 0


def _check_kinds(wanted: Sequence[str], present: set[str]) -> None:
    for kind in wanted:
        if kind not in KINDS | present:
            near = difflib.get_close_matches(kind, sorted(KINDS | present), 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"the kinds are {', '.join(sorted(KINDS | present))}"
            raise UsageError(f"--event: no event is named {printable(kind)!r}: {hint}")


class _Printer:
    def __init__(self, as_json: bool, kinds: set[str]) -> None:
        self._as_json = as_json
        self._kinds = kinds
        self._colours = sys.stdout.isatty()
        self._day = ""

    def show(self, events: list[Event]) -> None:
        for event in events:
            if not self._kinds or event.kind in self._kinds:
                print(event_json(event) if self._as_json else self._line(event), file=raw(sys.stdout))
        sys.stdout.flush()

    def _line(self, event: Event) -> str:
        day, at = moment(event.time)
        head = f"{day}\n" if day != self._day else ""
        self._day = day
        kind = printable(event.kind, 24)
        text = f"{at}  {kind:<16}  {words(event.kind, event.fields)}"
        style = STYLES.get(event.kind) if self._colours else None
        return head + (f"\x1b[{style}m{text}\x1b[0m" if style else text)


def moment(unix: float) -> tuple[str, str]:
    """Return (``2026-01-31``, ``14:03:22.517``) in local time."""
    return local_time(unix, "%Y-%m-%d"), f"{local_time(unix, '%H:%M:%S')}.{int(unix * 1000) % 1000:03d}"
