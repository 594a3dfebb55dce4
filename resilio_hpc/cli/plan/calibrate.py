"""``resilio plan calibrate``: the cost model's parameters of one cluster, from a few measured iterations or runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import NAMES, shipped
from resilio_hpc.autoparallel.measure.calibrate import calibrate
from resilio_hpc.autoparallel.measure.measured import measured_names
from resilio_hpc.autoparallel.measure.predict import as_measured, predict, read
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.plan import run_rows
from resilio_hpc.cli.plan.predict import file_text, profile_of, table, written
from resilio_hpc.core.errors import UsageError

FEWEST = 3
_HELP = """The table is that of resilio plan predict, with one more column: iter_time_s, measured. Six rows that
resilio plan measure has chosen are enough. A row without a time gets it from the ledger of its run (column run_dir).
Rows without either, and rows whose status is not ok, are left out.

--run RUN makes a row of a run, also of one that goes on: the median of its undisturbed steps, one row for each size and
layout that it had. The ledger has what the planner, resilio-launch --layout and --layout-options said; what it does not
say is given as to resilio plan: MODEL, --global-batch, --gpu, --tp, --micro-batch, ... --rows-out keeps the rows.

examples:
  resilio plan calibrate --rows runs/runs.csv --out calibration.toml
  resilio plan calibrate llama3-8b --global-batch 256 --gpu h100 --run 4712 --rows-out measured.csv
  resilio plan calibrate --rows measured.csv --profile cluster.h5 --out calibration.toml
  resilio plan predict --rows layouts.csv --out predicted.csv --calibration calibration.toml

exit codes:
  0  the calibration, or --rows-out, was written
  2  the table or run could not be read, or there are too few measurements
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the help."""
    parser = Parser(
        prog="resilio plan calibrate",
        usage="resilio plan calibrate [--rows IN.csv] [--run RUN … [MODEL --global-batch N --gpu TYPE …]] [--out …]",
        description="Fit the planner to a cluster. Parameters stay within their physical bounds.",
        epilog=_HELP,
        allow_abbrev=False,
    )
    parser.add_argument("--rows", type=Path, metavar="IN.csv", help="measured layouts")
    parser.add_argument("--run", action="append", default=[], metavar="RUN", help="a run whose steps are measurements")
    parser.add_argument("--out", type=Path, metavar="FILE.toml", help="the calibration (default: standard output)")
    parser.add_argument("--rows-out", type=Path, metavar="OUT.csv", help="the measured rows, those of runs included")
    parser.add_argument("--profile", type=Path, metavar="FILE.h5", help="what it has measured stays as it is")
    options, words = parser.parse_known_args(argv)
    if words and not options.run:
        raise UsageError(f"{words[0]}: it goes with --run RUN (see: resilio plan calibrate --help)")
    if options.rows is None and not options.run:
        raise UsageError("--rows IN.csv or --run RUN: what was measured?")
    rows = _measured_rows(options, words)
    if options.rows_out is not None:
        written(options.rows_out, list(dict.fromkeys(name for row in rows for name in row)), rows)
        if options.out is None:
            return 0
    text = calibration(rows, profile_of(options.profile))
    if options.out is None:
        print(text, end="")
        return 0
    try:
        options.out.write_text(text)
    except OSError as error:
        raise UsageError(f"{options.out}: {error.strerror}") from None
    return 0


def _measured_rows(options: argparse.Namespace, words: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows with a time: of the table, and of runs."""
    rows = list[dict[str, str]]()
    if options.rows is not None:
        _, every = table(file_text(options.rows))
        rows = run_rows.filled_rows(every, [measured(row) is not None for row in every])
    rows += [row for name in options.run for row in run_rows.rows_of_run(name, words)]
    return [row for row in rows if measured(row)]


def measured(row: Mapping[str, str]) -> float | None:
    """Return the seconds of the row's iteration, if it ran."""
    try:
        time = float(row.get("iter_time_s") or "")
    except ValueError:
        return None
    return time if 0 < time < math.inf and (row.get("status") or "ok") == "ok" else None


def calibration(rows: Sequence[Mapping[str, str]], profile: Profile | None = None) -> str:
    """Return the calibration as TOML; UsageError when too few rows can be used.

    ``profile``: what it has measured is not changed, so the calibration goes with it.
    """
    understood = read(rows)
    if len(understood.cases) < FEWEST:
        why = next(iter(understood.notes.values()), "" if rows else "no row has iter_time_s")
        few = f"{len(understood.cases)} usable measurements, at least {FEWEST} are needed"
        raise UsageError(f"{few}: {why}" if why else few)
    times = np.array([measured(rows[number]) or 0.0 for number in understood.index])
    known, cases, fixed = shipped(), understood.cases, frozenset[str]()
    if profile is not None:
        cases, efficiencies = as_measured(cases, known, profile)
        if len(set(efficiencies)) > 1:
            raise UsageError("--profile is of one kind of GPU: calibrate with the rows of that kind")
        known = efficiencies[0]
        fixed = measured_names(known, shipped())
    found, nearby = calibrate(known, cases, times, fixed)
    before, after = (
        float(np.mean(np.abs(one.cost.iteration / times - 1)) * 100)
        for one in (predict(cases, known), predict(cases, found, nearby=nearby))
    )
    lines = [f"# resilio plan calibrate: {len(times)} measurements; mean error on them {before:.1f} % -> {after:.1f} %"]
    changed = [name for name in NAMES if not math.isclose(getattr(found, name), getattr(known, name), rel_tol=1e-3)]
    lines += [f"{name} = {getattr(found, name):.6g}" for name in changed]
    return "\n".join([*lines, "", nearby.text()])
