"""``resilio plan calibrate``: the cost model's parameters of one cluster, from a few measured iterations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import NAMES, shipped
from resilio_hpc.autoparallel.measure.calibrate import calibrate
from resilio_hpc.autoparallel.measure.predict import predict, read
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.plan.predict import file_text, table
from resilio_hpc.core.errors import UsageError

FEWEST = 3
_HELP = """The table is that of resilio plan predict, with one more column: iter_time_s, measured. Eight rows
that differ in layout are enough. Rows without a time, and rows whose status is not ok, are left out.

examples:
  resilio plan calibrate --rows measured.csv --out calibration.toml
  resilio plan predict --rows layouts.csv --out predicted.csv --calibration calibration.toml

exit codes:
  0  the calibration was written
  2  the table could not be read, or holds too few measurements
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the help."""
    parser = Parser(
        prog="resilio plan calibrate",
        description="Fit the planner to a cluster. Parameters stay within their physical bounds.",
        epilog=_HELP,
    )
    parser.add_argument("--rows", required=True, type=Path, metavar="IN.csv", help="measured layouts")
    parser.add_argument("--out", type=Path, metavar="FILE.toml", help="the calibration (default: standard output)")
    options = parser.parse_args(argv)
    _, rows = table(file_text(options.rows))
    text = calibration([row for row in rows if measured(row)])
    if options.out is None:
        print(text, end="")
        return 0
    try:
        options.out.write_text(text)
    except OSError as error:
        raise UsageError(f"{options.out}: {error.strerror}") from None
    return 0


def measured(row: Mapping[str, str]) -> float | None:
    """Return the seconds of the row's iteration, if it ran."""
    try:
        time = float(row.get("iter_time_s") or "")
    except ValueError:
        return None
    return time if 0 < time < math.inf and (row.get("status") or "ok") == "ok" else None


def calibration(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the calibration as TOML; UsageError when too few rows can be used."""
    understood = read(rows)
    if len(understood.cases) < FEWEST:
        why = next(iter(understood.notes.values()), "" if rows else "no row has iter_time_s")
        few = f"{len(understood.cases)} usable measurements, at least {FEWEST} are needed"
        raise UsageError(f"{few}: {why}" if why else few)
    times = np.array([measured(rows[number]) or 0.0 for number in understood.index])
    known = shipped()
    found, nearby = calibrate(known, understood.cases, times)
    before, after = (
        float(np.mean(np.abs(one.cost.iteration / times - 1)) * 100)
        for one in (predict(understood.cases, known), predict(understood.cases, found, nearby=nearby))
    )
    lines = [f"# resilio plan calibrate: {len(times)} measurements; mean error on them {before:.1f} % -> {after:.1f} %"]
    changed = [name for name in NAMES if not math.isclose(getattr(found, name), getattr(known, name), rel_tol=1e-3)]
    lines += [f"{name} = {getattr(found, name):.6g}" for name in changed]
    return "\n".join([*lines, "", nearby.text()])
