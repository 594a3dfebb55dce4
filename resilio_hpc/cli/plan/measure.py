"""``resilio plan measure``: the few short runs that tell most of a cluster, as a table, as jobs, or submitted."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilio_hpc.autoparallel.measure.calibrate import ChosenRuns, choose_runs
from resilio_hpc.autoparallel.measure.nearby import costed
from resilio_hpc.autoparallel.measure.predict import read
from resilio_hpc.autoparallel.measure.row_of import row_of
from resilio_hpc.autoparallel.measure.unstated import problem
from resilio_hpc.autoparallel.search import trial_runs
from resilio_hpc.autoparallel.search.offers import offers, why_none
from resilio_hpc.autoparallel.search.trial_runs import TrialRun
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.plan import search_options, setting, trial_jobs
from resilio_hpc.cli.plan.calibrate import measured
from resilio_hpc.cli.plan.predict import calibration_of, file_text, table, written
from resilio_hpc.core.errors import UsageError
from resilio_hpc.events.phrases import seconds

NOTHING = 3
_HELP = """Chosen are layouts that the search finds for the cluster, so that the times of those within 25 % of the best
are known as well as possible afterwards: each run is the one that takes most of the doubt away. No measured time is
looked at. With --rows, the lines of a table are the candidates; those with a time (iter_time_s) count as measured.

--jobs DIR writes a batch script for each run, and DIR/runs.csv; --submit submits them, too. Behind -- stands the
training script with its arguments; the words {tp} {pp} {dp} {micro_batch} ... become the run's numbers, {steps} the
iterations. The script runs under resilio-launch; step times are in the run's ledger as soon as it has done some.

examples:
  resilio plan measure llama3-8b --partition gpu --gpus 16-64 --global-batch 256
  resilio plan measure llama3-8b --partition gpu --gpus 16-64 --global-batch 256 --jobs runs -- train.py --steps {steps}
  resilio plan measure --rows layouts.csv --runs 4 --out runs.csv
  resilio plan calibrate --rows runs/runs.csv --out calibration.toml        when the runs are done

exit codes:
  0  the runs were chosen (--submit: and submitted)
  1  Slurm did not answer, or refused a job
  2  a mistake in the command line, or an unknown model or GPU
  3  no shape is offered, or no layout fits
"""


@dataclass(frozen=True)
class TrialRow:
    """A run that may be measured. Seconds of an iteration, and the upper end of its band."""

    row: Mapping[str, str]
    layout: str
    gpus: int
    iteration_s: float
    high_s: float


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the help."""
    at = argv.index("--") if "--" in argv else len(argv)
    options, command = _parser().parse_args(argv[:at]), list(argv[at + 1 :])
    _check(options, command)
    if options.rows is not None:
        return _of_table(options)
    asked = setting.setting(options)
    for note in asked.notes:
        print(f"resilio: {note}", file=sys.stderr)
    offered = offers(asked.cluster.inventory, asked.cluster.request, asked.cluster.now)
    runs = trial_runs.trial_runs(offered, asked.training, asked.machines, options.framework)
    if not runs:
        none = why_none(asked.cluster.inventory, asked.cluster.request)
        why = "no layout fits (resilio plan says why)" if offered else none
        print(f"resilio: {asked.description.name}: {why}", file=sys.stderr)
        return NOTHING
    found = trial_runs.chosen(runs, asked.training, options.runs, options.at_most)
    if not found.places:
        least = min(one.choice.gpus for one in runs)
        raise UsageError(f"--at-most {options.at_most}: the smallest run has {least} GPUs")
    picked = [runs[place] for place in found.places]
    shown = [_candidate(one, options) for one in picked]
    rows = [one.row for one in shown]
    if options.jobs is not None:
        jobs = trial_jobs.write(options.jobs, [one.choice for one in picked], rows, _lasting(shown, options), command,
                                options.set)  # fmt: skip
        _show(shown, found, options)
        return trial_jobs.submit(jobs) if options.submit else trial_jobs.tell(jobs)
    _show(shown, found, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio plan measure",
        usage="resilio plan measure MODEL --global-batch N [--partition P | --gpu TYPE --gpus N | --inventory FILE] …\n"
        "       resilio plan measure --rows IN.csv",
        description="Choose the few short runs after which the planner knows most of a cluster.",
        epilog=_HELP,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a preset, or Hugging Face's config.json")
    parser.add_argument("--rows", type=Path, metavar="IN.csv", help="layouts to choose from, in place of MODEL")
    parser.add_argument("--runs", type=int, default=6, metavar="N", help="how many runs (6); 4 to 8 tell most")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="iterations of each run (20)")
    parser.add_argument("--at-most", type=int, default=0, metavar="GPUS", help="of a run (as many as --gpus allows)")
    parser.add_argument("--out", type=Path, metavar="OUT.csv", help="the runs as rows, for measured times to be added")
    parser.add_argument("--jobs", type=Path, metavar="DIR", help="write a batch script for each run, and runs.csv")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the jobs: account=abc")
    parser.add_argument("--submit", action="store_true", help="submit the jobs; without it they are only written")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
    search_options.add_model(parser)
    search_options.add_cluster(parser)
    parser.set_defaults(tokens=0.0, mtbf=float("inf"), restart_s=0.0, checkpoint_s=0.0)
    return parser


def _check(options: argparse.Namespace, command: Sequence[str]) -> None:
    if options.runs < 1 or options.steps < 5:
        raise UsageError("--runs: 1 or more; --steps: 5 or more, since the first ones are no measurement")
    if (options.jobs is None) != (not command):
        raise UsageError("--jobs DIR and the training script go together: … --jobs runs -- train.py --steps {steps}")
    if options.jobs is not None and options.json:
        raise UsageError("--json tells of the choice only: without --jobs")
    if options.jobs is None and (options.submit or options.set):
        raise UsageError("--submit and --set go with --jobs DIR -- train.py …")
    if options.rows is not None and (options.model or options.jobs):
        raise UsageError("--rows holds the candidates: without MODEL, and without --jobs")


def _of_table(options: argparse.Namespace) -> int:
    """Choose among the rows of a table."""
    columns, rows = table(file_text(options.rows))
    understood = read(rows)
    if not understood.cases:
        why = next(iter(understood.notes.values()), "it has no rows")
        raise UsageError(f"{options.rows}: nothing to choose from: {why}")
    known, nearby = calibration_of(options.calibration)
    have = [measured(rows[number]) is not None for number in understood.index]
    small = [not options.at_most or case.layout.num_gpus <= options.at_most for case in understood.cases]
    found = choose_runs(known, understood.cases, options.runs, allowed=small, measured=have)
    if not found.places:
        raise UsageError(f"{options.rows}: every row that may run has a time already")
    times = costed(problem(understood.cases), known, nearby).iteration
    picked = [
        TrialRow(rows[understood.index[place]], str(understood.cases[place].layout),
                  understood.cases[place].layout.num_gpus, float(times[place]), float(times[place]) * 1.2)
        for place in found.places
    ]  # fmt: skip
    _show(picked, found, options, columns)
    return 0


def _candidate(run: TrialRun, options: argparse.Namespace) -> TrialRow:
    case, choice = run.case, run.choice
    row = row_of(case.model, case.layout, case.machine, options.framework, options.precision)
    row |= {"pred_iter_time_s": f"{choice.iteration_s:.6g}", "iter_time_s": ""}
    return TrialRow(row, str(choice.layout), choice.gpus, choice.iteration_s, choice.high_s)


def _lasting(runs: Sequence[TrialRow], options: argparse.Namespace) -> list[trial_jobs.Duration]:
    return [trial_jobs.Duration(options.steps, one.iteration_s, one.high_s) for one in runs]


def _show(
    runs: Sequence[TrialRow], found: ChosenRuns, options: argparse.Namespace, columns: Sequence[str] = ()
) -> None:
    """Print the runs, and write --out."""
    if options.out is not None:
        names = list(columns) or list(runs[0].row)
        written(options.out, [*names, *(["iter_time_s"] * ("iter_time_s" not in names))], [one.row for one in runs])
    lasting = _lasting(runs, options)
    if options.json:
        print(json.dumps({"runs": [_json(one, time) for one, time in zip(runs, lasting, strict=True)],
                          "doubt": [round(one, 5) for one in found.doubt]}, indent=1))  # fmt: skip
        return
    width = max(len(one.layout) for one in runs)
    print(f"    {'layout':<{width}}  GPUs  iteration  lasts about  doubt left")
    for number, (one, time, doubt) in enumerate(zip(runs, lasting, found.doubt[1:], strict=True), 1):
        print(f"{number:>2}  {one.layout:<{width}}  {one.gpus:>4}  {seconds(one.iteration_s):>9}  "
              f"{seconds(time.expected_s):>11}  {doubt:>9.1%}")  # fmt: skip
    hours = sum(one.gpus * time.expected_s for one, time in zip(runs, lasting, strict=True)) / 3600
    print(f"{options.steps} iterations each: {hours:,.1f} GPU-hours in all; doubt before them {found.doubt[0]:.1%}")


def _json(one: TrialRow, time: trial_jobs.Duration) -> dict[str, Any]:
    return {"layout": one.layout, "gpus": one.gpus, "iteration_s": one.iteration_s, "expected_s": time.expected_s,
            "row": dict(one.row)}  # fmt: skip
