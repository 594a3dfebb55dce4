"""What a save and a load of a checkpoint cost: ours beside the peers and the limits of this machine, taken in turn.

    python benchmarks/checkpoint.py [--megabytes 1000] [--rounds 3] [--only METHOD …] [--json FILE]

Each round runs every method once, in a process of its own (see ``checkpoint_methods``), with the same tensors. A method
whose library is not installed here is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from checkpoint_methods import METHODS
from measure import machine, shown

TIMEOUT_S = 600.0
LIMIT = "limit"
COLUMNS = ("first", "blocked", "effective", "durable", "cold", "memory")
Found = dict[str, list[float]]


def run(method: str, size: int, saves: int, parent: Path) -> Found | str:
    """One process; what it measured, or why it could not."""
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=parent))
    argv = [sys.executable, str(Path(__file__).with_name("checkpoint_methods.py")), method, str(size), str(saves)]
    try:
        done = subprocess.run([*argv, str(directory)], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not done within {TIMEOUT_S:g} s"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["no word"])[-1][:120]
    found: Found = json.loads(done.stdout.splitlines()[-1])
    later = {name: found[name][1:] for name in ("blocked", "effective", "durable")}
    return {"first": found["durable"][:1]} | found | later


def table(title: str, results: dict[str, Found]) -> Table:
    """Medians; in brackets how many times the limit."""
    made = Table(title=title, title_justify="left")
    for column in ("", *COLUMNS):
        made.add_column(column, no_wrap=True)
    limit = {name: statistics.median(values) for name, values in results.get(LIMIT, {}).items() if values}
    for method, found in results.items():
        cells = []
        for name in COLUMNS:
            values = found.get(name, [])
            if not values:
                cells.append("–")
                continue
            median = statistics.median(values)
            times = f" ({median / limit[name]:.2f})" if limit.get(name) and name not in ("first", "effective") else ""
            cells.append(shown(median) + times)
        made.add_row(method, *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="size of the state (1000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of each method (3)")
    parser.add_argument("--saves", type=int, default=5, metavar="N", help="saves of each process (5)")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, Found] = {}
    for number in range(options.rounds):
        for method in options.only:
            found = run(method, options.megabytes * 1_000_000, options.saves, options.directory)
            if isinstance(found, str):
                console.print(f"  round {number + 1}: {method} is left out: {found}")
                continue
            for name, values in found.items():
                results.setdefault(method, {}).setdefault(name, []).extend(values)
            console.print(f"  round {number + 1}: {method}: durable in {shown(statistics.median(found['durable']))} s")
    console.print(table(f"{options.megabytes} MB, one process: seconds, median (times the limit)", results))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "megabytes": options.megabytes, "results": results}))


if __name__ == "__main__":
    main()
