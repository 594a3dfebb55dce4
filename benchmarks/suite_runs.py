"""Runs of the whole quick suite, one after the other, some beside a load: how long each took and how it ended.

python benchmarks/suite_runs.py --runs 10 --loaded 5     # goes on where an interrupted series stopped

Each run is a line in suite_runs.json, written when it ends. ``make test`` runs in the checkout; a loaded run has
``--load`` busy processes beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("suite_runs.json")
BUSY = "while True: pass"


def read() -> list[dict[str, Any]]:
    """Return the runs so far."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return found


def run_once(load: int, log: Path) -> dict[str, Any]:
    """Run ``make test`` beside ``load`` busy processes; its output goes to ``log``."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
    began, started = time.time(), time.monotonic()
    try:
        with log.open("wb") as output:
            done = subprocess.run(["make", "test"], cwd=ROOT, stdout=output, stderr=output, check=False)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    said = log.read_text(errors="replace")
    summary = re.findall(r"^(?:\d+ failed, )?\d+ passed.* in [\d.]+s.*$", said, re.MULTILINE)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(began)),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "load": load,
        "exit": done.returncode,
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
    parser.add_argument("--load", type=int, default=4, help="busy processes")
    parser.add_argument("--anew", action="store_true", help="forget the runs in the file")
    options = parser.parse_args()
    runs = [] if options.anew else read()
    while len(runs) < options.runs:
        loaded = sum(one["load"] > 0 for one in runs)
        quiet = len(runs) - loaded
        take_load = loaded < options.loaded and quiet >= loaded + 1
        take_load = take_load or quiet >= options.runs - options.loaded
        runs.append(run_once(options.load if take_load else 0, Path(f"/tmp/suite-run-{len(runs) + 1}.log")))
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
        print(table(runs[-1:]).splitlines()[-1], flush=True)
    print(table(runs))
    return 0 if all(one["exit"] == 0 for one in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
