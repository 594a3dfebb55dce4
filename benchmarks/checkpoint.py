"""What a save and a load of a checkpoint cost: ours beside the peers and the limits of this machine, taken in turn.

    benchmarks/peers_setup.sh     # NVRx, torchsnapshot and DLRover, into an environment of their own
    python benchmarks/checkpoint.py [--megabytes 1000] [--processes 1] [--rounds 3] [--only METHOD …] [--json FILE]

Each round runs every method once, in processes of its own (see ``checkpoint_measure``), with the same tensors. A method
that does not run here is left out, and said with the reason. Durable: files and directories are synced, also for those
that do not do so themselves. With two processes each has its part of the state, all save and load at the same time, and
what counts is the slower one. ``wrong``: tensors that were not loaded as they were saved at that step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from checkpoint_measure import TENSORS
from checkpoint_methods import METHODS
from checkpoint_peers import PEERS
from checkpoint_processes import run, slowest
from launchers import PEERS as PEERS_PROGRAMS
from measure import machine, shown

TIMEOUT_S = 600.0
LIMIT = "limit"
NAMES = (*METHODS, *PEERS)
COLUMNS = ("first", "blocked", "effective", "durable", "cold", "memory")
Found = dict[str, list[float]]


def one_round(method: str, options: argparse.Namespace, peers: Path = PEERS_PROGRAMS) -> Found | str:
    """Return what it measured, or why it could not."""
    script = str(Path(__file__).with_name("checkpoint_measure.py"))
    argv = [script, method, str(options.megabytes * 1_000_000), str(options.saves), "{directory}"]
    argv += ["warm"] if options.warm else []
    results = run(method, argv, options.processes, options.directory, TIMEOUT_S, peers=peers)
    if isinstance(results, str):
        return results
    found = slowest(results)
    later = {name: found[name][1:] for name in ("blocked", "effective", "durable")}
    return {"first": found["durable"][:1]} | found | later


def table(title: str, results: dict[str, Found]) -> Table:
    """Medians; in brackets how many times the limit."""
    made = Table(title=title, title_justify="left")
    for column in ("", *COLUMNS, "wrong"):
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
        made.add_row(method, *cells, f"{max(found['wrong']):g}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="size of the state (1000)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share the state (1)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of each method (3)")
    parser.add_argument("--saves", type=int, default=5, metavar="N", help="saves of each process (5)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="METHOD")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone (to drop it takes root)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, Found] = {}
    for number in range(options.rounds):
        for method in options.only:
            found = one_round(method, options)
            if isinstance(found, str):
                console.print(f"  round {number + 1}: {method} is left out: {found}")
                continue
            for name, values in found.items():
                results.setdefault(method, {}).setdefault(name, []).extend(values)
            console.print(f"  round {number + 1}: {method}: durable in {shown(statistics.median(found['durable']))} s")
    title = f"{options.megabytes} MB, {options.processes} process(es): seconds, median (times the limit)"
    console.print(table(title, results))
    for method, found in results.items():
        if wrong := max(found["wrong"]):
            of = f"{wrong:g} of {TENSORS * options.processes} tensors"
            console.print(f"  {method}: what it loads is not what was saved at that step, in up to {of}")
    if options.json:
        about = {"machine": machine(), "megabytes": options.megabytes, "processes": options.processes}
        options.json.write_text(json.dumps({**about, "results": results}))


if __name__ == "__main__":
    main()
