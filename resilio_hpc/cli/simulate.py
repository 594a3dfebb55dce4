"""``resilio simulate``: the goodput of a run that has not been, with the product's own decisions on drawn faults."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from resilio_hpc.cli.common import output_form
from resilio_hpc.cli.common.number_option import number
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

if TYPE_CHECKING:
    from resilio_hpc.report.chain.run_report import RunReport
    from resilio_hpc.simulate.study import Study

MOST_GPUS, MOST_DAYS, MOST_REPEATS = 200_000, 3650.0, 1000
_EXAMPLES = """examples:
  resilio simulate --fleet llama3                         16,384 GPUs for 54 days, beside the peers' policies
  resilio simulate --gpus 1024 --mtbf-h 20 --compare spares=0,1,2,4
  resilio simulate --from-run 4712 --from-run 4713 --gpus 512 --compare save-every=60,300,900
  resilio simulate --gpus 100000 --days 30 --domain 16:20000 --partner-copies --set program_start_s=45

exit codes: 0 whatever becomes of the run; 1 the page could not be written; 2 a mistake in the command
"""


def _every(value: str) -> float | None:
    return None if value == "auto" else number(0.001, 1e7)(value)


def _switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{printable(value, 60)!r}: on or off is needed")
    return value == "on"


# what --compare may vary: field of the setup, how a value is read, its words
_VARIES: dict[str, tuple[str, Callable[[str], float | bool | None]]] = {
    "spares": ("spares", number(0, MOST_GPUS, whole=True)),
    "min-nodes": ("min_nodes", number(1, MOST_GPUS, whole=True)),
    "save-every": ("save_every_s", _every),
    "job-hours": ("job_s", number(0.01, 1e6)),
    "max-restarts": ("max_restarts", number(0, 1e6, whole=True)),
    "partner-copies": ("partner_copies", _switch),
    "replicated": ("replicated", _switch),
    "evict-devices": ("evict_devices", _switch),
    "local-checkpoints": ("local_disks", _switch),
}  # fmt: skip


def _parser() -> Parser:
    parser = Parser(
        prog="resilio simulate",
        description="Goodput and ETTR of a run before it is submitted: resilio's own decisions, and the published\n"
        "policies of its peers, on the same faults in virtual time. Each number has its source; guesses are named.",
        epilog=_EXAMPLES,
    )
    size = parser.add_argument_group("the run")
    size.add_argument("--gpus", type=number(1, MOST_GPUS, whole=True), metavar="N", help="GPUs that train")
    size.add_argument("--gpus-per-node", type=number(1, 64, whole=True), metavar="N", help="(default: 8)")
    size.add_argument("--days", type=number(0.001, MOST_DAYS), metavar="D", help="(default: the fleet's; else 30)")
    size.add_argument("--job-hours", type=number(0, 1e6), default=24.0, metavar="H",
                      help="time limit of each job of the chain; 0: none (default: 24)")  # fmt: skip
    size.add_argument("--no-chain", action="store_true", help="no next job: what stops is over")
    rates = parser.add_argument_group("how often it fails")
    rates.add_argument("--fleet", metavar="NAME", help="a published one: llama3 (default), rsc1, rsc1-1024, ant")
    rates.add_argument("--mtbf-h", type=number(0.001, 1e9), metavar="H", help="mean hours between faults of the run")
    rates.add_argument("--from-run", action="append", default=[], metavar="RUN",
                       help="rates and times as these runs had them, by their ledgers")  # fmt: skip
    rates.add_argument("--domain", action="append", default=[], metavar="NODES:H",
                       help="nodes side by side that go together (a rack), each group every H hours")  # fmt: skip
    how = parser.add_argument_group("how it is run")
    how.add_argument("--spares", type=number(0, MOST_GPUS, whole=True), metavar="K", help="(default: 1 %% of nodes)")
    how.add_argument("--min-nodes", type=number(1, MOST_GPUS, whole=True), metavar="N", help="(default: all)")
    how.add_argument("--save-every", type=_every, default=math.nan, metavar="S|auto",
                     help="seconds of training between saves; auto: Daly's (default: the runs', else 600)")  # fmt: skip
    how.add_argument("--max-restarts", type=number(0, 1e6, whole=True), default=3, metavar="N", help="(default: 3)")
    how.add_argument("--partner-copies", action="store_true", help="snapshots in another node's memory, too")
    how.add_argument("--local-checkpoints", action="store_true", help="committed steps on the nodes' own disks, too")
    how.add_argument("--replicated", action="store_true", help="all nodes hold the same state (DDP)")
    how.add_argument("--no-last-step", action="store_true", help="ranks that end save no step before (plain programs)")
    how.add_argument("--evict-devices", action="store_true", help="nodes with a broken GPU take no part")
    how.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a number (see --constants)")
    what = parser.add_argument_group("what is shown")
    what.add_argument("--policy", action="append", default=[], metavar="NAME",
                      help="resilio, shared-fs, in-memory, hot-spares, flash-recovery (default: all)")  # fmt: skip
    what.add_argument("--compare", action="append", default=[], metavar="NAME=V,V",
                      help=f"resilio with each of the values; of: {', '.join(_VARIES)}")  # fmt: skip
    what.add_argument(
        "--repeats", type=number(1, MOST_REPEATS, whole=True), default=5, metavar="N", help="(default: 5)"
    )
    what.add_argument("--seed", type=number(0, 2**53, whole=True), default=0, metavar="N", help="(default: 0)")
    what.add_argument("--constants", action="store_true", help="show all numbers with their sources")
    output_form.add(what, "everything, for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    options = _parser().parse_args(argv)
    output_form.check(options)
    given = {name: _given(name, text) for name, text in (_pair("--set", one) for one in options.set)}
    varied = [_varied(one) for one in options.compare]
    found = _study(options, given, varied)
    from resilio_hpc.simulate.study_json import study_json
    from resilio_hpc.simulate.study_page import study_page
    from resilio_hpc.simulate.study_text import study_lines

    output_form.show(
        options, "the simulation", lambda: study_json(found), lambda: study_page(found),
        lambda width: study_lines(found, width, options.constants),
    )  # fmt: skip
    return 0


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageError(f"{option} {printable(text, 60)}: NAME=VALUE is needed")
    return name, value


def _given(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--set {printable(name, 60)}={printable(text, 60)}: a number is needed") from None


def _varied(text: str) -> tuple[str, list[float | bool | None]]:
    name, values = _pair("--compare", text)
    if name not in _VARIES:
        raise UsageError(f"--compare {printable(name, 60)} is not known: {', '.join(_VARIES)}")
    try:
        return name, [_VARIES[name][1](value) for value in values.split(",")]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--compare {name}: {error}") from None


def _domain(text: str) -> tuple[int, float]:
    nodes, colon, hours = text.partition(":")
    try:
        found = int(nodes), float(hours)
    except ValueError:
        found = 0, 0.0
    if not (colon and 1 <= found[0] <= MOST_GPUS and 0.001 <= found[1] <= 1e9):
        raise UsageError(f"--domain {printable(text, 60)}: NODES:HOURS is needed, as 16:20000")
    return found


def _study(
    options: argparse.Namespace, given: dict[str, float], varied: list[tuple[str, list[float | bool | None]]]
) -> Study:
    from resilio_hpc.simulate import plan_study

    asked = plan_study.StudyRequest(
        gpus=options.gpus, gpus_per_node=options.gpus_per_node, days=options.days,
        job_s=options.job_hours * 3600 or None, chained=not options.no_chain, fleet=options.fleet,
        mtbf_h=options.mtbf_h, domains=tuple(map(_domain, options.domain)), spares=options.spares,
        min_nodes=options.min_nodes, save_every_s=options.save_every, max_restarts=options.max_restarts,
        partner_copies=options.partner_copies, replicated=options.replicated,
        last_step=not options.no_last_step, evict_devices=options.evict_devices,
        local_disks=options.local_checkpoints,
        given=given, policies=tuple(options.policy),
        varied=tuple((name, _VARIES[name][0], tuple(values)) for name, values in varied), repeats=options.repeats,
        seed=options.seed,
    )  # fmt: skip
    reports = [_report(name) for name in options.from_run]
    with _progress(options.json) as told:
        return plan_study.run(asked, reports, told)


def _report(name: str) -> RunReport:
    from resilio_hpc.report.chain.run_report import read_report
    from resilio_hpc.slurm.runs import run_names

    return read_report(run_names.run_path(name), time.time())


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """Show how far it is, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _share, _words: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal.console(sys.stderr), transient=True) as progress:
        task = progress.add_task("simulating", total=1.0)
        yield lambda share, words: progress.update(task, completed=share, description=printable(words, 60))
