"""Runs of the whole quick suite, one after the other, some beside a load: how long each took and how it ended.

python benchmarks/suite_runs.py --runs 10 --loaded 5     # goes on where an interrupted series stopped

Each run is a line in suite_runs.json, written when it ends. ``make test`` runs in the checkout; a loaded run has
``machine_load`` beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine_load

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("suite_runs.json")
LOAD = 4  # processes
LIMIT_S = 5400.0  # what takes longer hangs


def read() -> list[dict[str, Any]]:
    """Return the runs so far."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return found


def run_once(loaded: bool, log: Path) -> dict[str, Any]:
    """Run ``make test``; its output goes to ``log``."""
    began, started = time.time(), time.monotonic()
    code: int | None = None  # it did not end
    with tempfile.TemporaryDirectory() as directory, log.open("wb") as output:
        beside = machine_load.loaded(Path(directory), busy=LOAD - 2) if loaded else contextlib.nullcontext(0)
        with beside as load, contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(["make", "test"], cwd=ROOT, stdout=output, stderr=output, timeout=LIMIT_S).returncode
    said = log.read_text(errors="replace")
    summary = re.findall(r"^(?:\d+ failed, )?\d+ passed.* in [\d.]+s.*$", said, re.MULTILINE)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    return {
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(began)),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "load": load,
        "exit": code,
        "summary": summary[-1] if summary else "no summary",
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE),
        "commit": commit.stdout.strip(),
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Return the runs as a table in Markdown."""
    rows = ["| began (UTC) | minutes | load | result | commit |", "|---|---|---|---|---|"]
    for one in runs:
        failed = "; " + ", ".join(one["failed"]) if one["failed"] else ""
        rows.append(
            f"| {one['began']} | {one['minutes']} | {one['load']} | {one['summary']}{failed} | {one['commit']} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Return 0 when every run of the series passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of the series, those in the file included")
    parser.add_argument("--loaded", type=int, default=5, help="how many of them beside a load")
    parser.add_argument("--restart", action="store_true", help="forget the runs in the file")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="where the output of runs goes")
    options = parser.parse_args()
    runs = [] if options.restart else read()
    while len(runs) < options.runs:
        loaded = sum(one["load"] > 0 for one in runs)
        quiet = len(runs) - loaded
        due = loaded < options.loaded and (quiet > loaded or quiet >= options.runs - options.loaded)
        runs.append(run_once(due, options.logs / f"suite-run-{len(runs) + 1}.log"))
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
        print(table(runs[-1:]).splitlines()[-1], flush=True)
    print(table(runs))
    return 0 if all(one["exit"] == 0 for one in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
