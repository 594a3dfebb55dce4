"""``resilio check [RUN …]``: alerts on runs, for people and for cron."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.alerts.alert import Severity, rules, worst
from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import bounded, terminal
from resilio_hpc.core.errors import ResilioError, UsageError, os_error_text
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.runs import run_names

if TYPE_CHECKING:
    from resilio_hpc.alerts.check import CheckOptions, RunCheck

OK, WARNING, CRITICAL, UNREAD = 0, 3, 4, 1
SEARCH_S = 20.0
OLD_S = 7 * 24 * 3600.0  # of a run whose files have not changed for so long, --all looks no more
_EXAMPLES = """examples:
  resilio check 4712                         what is wrong with a run now
  resilio check --all /scratch/me/runs --changes     for cron: only what fires or clears, each once
  resilio check 4712 --notify 'mail -s training me@example.org'     the same, as messages
  resilio check 4712 --goodput 0.9 --save 120        with other limits
  resilio check --all /scratch/me/runs --textfile /var/lib/node_exporter/resilio.prom    for Prometheus

exit codes: 0 no alert; 3 warnings; 4 a critical alert; 1 a run could not be checked; 2 a mistake in the command
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see _EXAMPLES."""
    options = _parser().parse_args(argv)
    if options.all and options.runs:
        raise UsageError("name runs, or give --all with directories of runs, not both")
    if options.state is not None and (options.all or len(options.runs) > 1):
        raise UsageError("--state is the file of one run: name that run")
    asked = _asked(options)  # before a run is looked for: a mistake in a target is one whatever runs there are
    paths = _paths(options)
    now = time.time()
    checks, unread = _checked(paths, asked, now, alone=not options.all and len(paths) == 1)
    if options.textfile is not None:
        _write_textfile(options.textfile, checks, asked.window_s)
    _show(options, checks, unread, now)
    codes = {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNING}
    found = worst([alert for check in checks for alert in check.alerts])
    return codes[found] if found is not None else UNREAD if unread else OK


def _parser() -> Parser:
    parser = Parser(
        prog="resilio check",
        description="What is wrong with runs now: each alert with its value, since when, the ledger lines behind it,\n"
        "and the one thing to do. Needs the run directory only, so it works from a login node.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "runs", nargs="*", metavar=run_names.METAVAR, help=run_names.HELP + " (default: the newest here)"
    )
    parser.add_argument(
        "--all", action="append", type=Path, metavar="DIR", help="all runs in a directory that had news in seven days"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--changes",
        action="store_true",
        help="only what fires or clears since the last check with --changes or --notify",
    )
    parser.add_argument(
        "--notify", action="append", default=[], metavar="TARGET",
        help="send what fires or clears: a command, a URL, or @FILE with one of these per line (docs/alerts.md)",
    )  # fmt: skip
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="where it is kept what was reported (default: the run's alerts.json)"
    )
    parser.add_argument("--textfile", type=Path, metavar="FILE", help="write the numbers for node_exporter's collector")
    parser.add_argument(
        "--no-action", action="store_true", help="no diagnosis after low goodput, no look at storage after a slow save"
    )
    parser.add_argument("--action-limit", type=_positive, default=20.0, metavar="S", help="for each of these (20 s)")
    parser.add_argument(
        "--goodput-window", type=_number, default=0.0, metavar="H", help="goodput of the last hours (0: the whole run)"
    )
    limits = parser.add_argument_group("limits")
    for name, rule in rules().items():
        if rule.option:
            side = "above" if rule.above else "within" if rule.unit == "h" else "below"
            limits.add_argument(
                rule.option, type=_number, default=rule.limit, dest=name, metavar=rule.unit.upper(),
                help=f"{name}: {side} this ({rule.limit:g} {rule.unit}): {rule.what}".replace("%", "%%"),
            )  # fmt: skip
    return parser


def _number(text: str) -> float:
    """Return a number that is not negative; ``80%`` is 0.8."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{printable(repr(text), 60)} is no number") from None
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{printable(text, 60)} is out of range: 0 to 1e9")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{printable(text, 60)} must be more than 0")
    return value


def _asked(options: argparse.Namespace) -> CheckOptions:
    from resilio_hpc.alerts.check import CheckOptions
    from resilio_hpc.launch.rundir import notify_targets

    targets = notify_targets.read_targets(options.notify, Path.cwd())
    notify_targets.check_targets(targets, Path.cwd())
    limits = {name: float(getattr(options, name)) for name, rule in rules().items() if rule.option}
    if options.textfile is not None:
        import importlib.util

        if importlib.util.find_spec("prometheus_client") is None:
            raise UsageError("--textfile needs prometheus-client: pip install 'resilio_hpc[metrics]'")
        if not options.textfile.parent.is_dir():
            raise UsageError(f"--textfile {printable(str(options.textfile), 300)}: its directory does not exist")
    return CheckOptions(
        limits, options.goodput_window * 3600, 0.0 if options.no_action else options.action_limit,
        bool(options.changes or targets or options.state), options.state, targets,
    )  # fmt: skip


def _paths(options: argparse.Namespace) -> list[Path]:
    if options.all:
        try:
            return bounded.in_time(partial(_in_places, options.all), SEARCH_S)
        except TimeoutError as error:
            raise UsageError(f"--all: runs cannot be looked for: {error.strerror}") from None
    return [run_names.run_path(word) for word in options.runs] or [run_argument.newest_run()]


def _in_places(places: Sequence[Path]) -> list[Path]:
    from resilio_hpc.slurm.runs.places import run_paths

    for place in places:
        if not place.is_dir():
            raise UsageError(f"--all {printable(str(place), 300)} is not a directory")
    return [path for path in run_paths(places) if _is_recent(path)]


def _is_recent(path: Path) -> bool:
    """Return whether a run's files changed of late; one that cannot be looked at is checked, and says why."""
    try:
        newest = max((path / name).stat().st_mtime for name in ("ledger", "status.json", "verdict.json", "links")
                     if (path / name).exists())  # fmt: skip
    except (OSError, ValueError):
        return True
    return time.time() - newest < OLD_S


def _checked(
    paths: Sequence[Path], asked: CheckOptions, now: float, alone: bool
) -> tuple[list[RunCheck], list[tuple[str, str]]]:
    from resilio_hpc.alerts.check import check_run

    checks: list[RunCheck] = []
    unread: list[tuple[str, str]] = []
    for path in paths:
        try:
            checks.append(check_run(path, asked, now))
        except ResilioError as error:
            if alone and isinstance(error, UsageError):
                raise
            unread.append((str(path), printable(str(error), 300)))
        except OSError as error:
            unread.append((str(path), printable(os_error_text(error, str(path)), 300)))
    return checks, unread


def _write_textfile(path: Path, checks: Sequence[RunCheck], window_s: float) -> None:
    from resilio_hpc.alerts.series import sheet
    from resilio_hpc.metrics import textfile
    from resilio_hpc.metrics.exposition import exposition_of

    sheets = {(check.facts.run_id, ""): sheet(check.facts, check.alerts, window_s) for check in checks}
    textfile.write(path, exposition_of(sheets))


def _show(
    options: argparse.Namespace, checks: Sequence[RunCheck], unread: Sequence[tuple[str, str]], now: float
) -> None:
    from resilio_hpc.alerts import check_text

    if options.json:
        print(check_text.checks_json(checks, unread, now), flush=True)
        return
    quiet = options.changes or options.notify
    for check in checks:
        for line in check_text.change_lines(check) if quiet else check_text.check_lines(check):
            terminal.show(line)
    for check in checks:
        for error in check.errors:
            print(f"resilio: {printable(error, 400)}", file=sys.stderr)
    for path, why in unread:
        print(f"resilio: {printable(path, 200)} was not checked: {why}", file=sys.stderr)
