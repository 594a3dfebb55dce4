"""Many seeds of the simulator, added up in a file over many interrupted runs.

    python benchmarks/simulator_seeds.py --until 1000000      # goes on after the last seed of simulator_seeds.jsonl
    python benchmarks/simulator_seeds.py --until 0            # only what is there

Each ten thousand seeds are a line, with the commit that they ran on. Seeds that break an invariant are in it by number.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests.support is not installed

from resilio_hpc.core.process import run  # noqa: E402
from tests.support.simulator.search import search  # noqa: E402

RESULTS = Path(__file__).with_name("simulator_seeds.jsonl")
FIRST = 1_000_000  # seeds below are those of the tests
CHUNK = 10_000
AT_MOST = 20  # failing seeds of one chunk: then something is broken, and more would not tell more


def read() -> list[dict[str, Any]]:
    """Return the chunks so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", type=int, default=1_000_000, help="as many seeds in all, with those of the file")
    options = parser.parse_args()
    commit = run(["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"], 10.0).stdout.strip()
    rows = read()
    while sum(row["runs"] for row in rows) < options.until:
        first = max((row["first"] + row["runs"] for row in rows), default=FIRST)
        began = time.monotonic()
        found = search(first, CHUNK, AT_MOST, lambda found: None)
        rows.append({
            "first": first, "runs": found.runs, "failed": [outcome.seed for outcome in found.violations],
            "commit": commit, "seconds": round(time.monotonic() - began), "time": round(time.time()),
        })  # fmt: skip
        with RESULTS.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    failed = [seed for row in rows for seed in row["failed"]]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    print(f"{sum(row['runs'] for row in rows)} seeds on {commits}: {len(failed)} broke an invariant {failed[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
