"""SIGKILL of one rank of independent work → its first new piece of work, and for how long the other ranks pause.

.venv/bin/python benchmarks/lone_restarts.py                 # 8 ranks
.venv/bin/python benchmarks/lone_restarts.py --ranks 32

Modes are interleaved. Each run of the launcher gets several faults in a row, 11 s apart: none follows from another.
A pause is the longest time between two pieces of any other rank around the fault; "quiet" is the same before it.
"""

import argparse
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from launched import Launched, launched
from launchers import OURS, Launcher
from measure import NEVER, Series, print_table, shown, write_json

SCRIPT = Path(__file__).resolve().parent / "lone_work.py"
START_LIMIT_S, LIMIT_S, BETWEEN_S, AROUND_S = 180, 60, 11.0, 1.5
MODES = (("the failed rank starts again", "failed"), ("all ranks start again", "all"))


def pieces(run: Launched) -> list[list[tuple[float, int]]]:
    """By rank: Unix time and process of each piece of work."""
    found = []
    for rank in range(run.ranks):
        path = run.directory / f"steps-rank{rank}"
        text = path.read_text() if path.exists() else ""
        rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        found.append([(float(when), int(pid)) for when, pid in rows])
    return found


def returned(run: Launched, killed_at_s: float, all_ranks: bool) -> float | None:
    """When the killed rank, or all ranks, did a piece in a new process; None: not yet."""
    firsts = []
    for rows in pieces(run):
        before = {pid for when, pid in rows if when <= killed_at_s}
        firsts.append(next((when for when, pid in rows if when > killed_at_s and pid not in before), NEVER))
    at = max(firsts) if all_ranks else min(firsts)
    return None if at == NEVER else at


def longest(rows: list[tuple[float, int]], begin: float, end: float) -> float:
    """Return the longest time between two pieces, of which the second one was done from ``begin`` to ``end``."""
    return max((after - before for (before, _), (after, _) in pairwise(rows) if begin <= after <= end), default=NEVER)


def trial(mode: tuple[str, str], options: argparse.Namespace, choice: random.Random, series: Series) -> str:
    """One run of the launcher, with several faults in a row."""
    _, policy = mode
    flags = (f"--restart-policy={policy}", f"--max-restarts={options.faults + 1}")
    launcher = Launcher("resilio-launch", policy, OURS / "resilio-launch", flags)
    with launched(launcher, options.ranks, SCRIPT, ()) as run:
        if not run.wait_for(lambda: all(len(rows) >= 10 for rows in pieces(run)), START_LIMIT_S):
            series.values_s.append(NEVER)
            return f"did not start:\n{run.last_output()}"
        for _ in range(options.faults):
            time.sleep(BETWEEN_S + choice.random())
            killed_at_s = run.kill_a_rank(choice)
            back = run.wait_for(lambda at=killed_at_s: returned(run, at, policy == "all") is not None, LIMIT_S)
            if not back:
                series.values_s.append(NEVER)
                return f"never:\n{run.last_output()}"
            time.sleep(AROUND_S)
            at = returned(run, killed_at_s, policy == "all")
            assert at is not None
            series.values_s.append(at - killed_at_s)
            rows = pieces(run)
            pauses = sorted(longest(row, killed_at_s, at + AROUND_S) for row in rows)
            quiet = max(longest(row, killed_at_s - AROUND_S, killed_at_s) for row in rows)
            series.phases_s.append({"others pause": pauses[-2], "quiet": quiet})  # the longest is the killed rank's
    times = ", ".join(shown(value) for value in series.values_s[-options.faults :])
    pauses = ", ".join(shown(phases["others pause"]) for phases in series.phases_s[-options.faults :])
    return f"back after {times} s; the others pause for {pauses} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--faults", type=int, default=3, help="faults in one run (3)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode (3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    console, choice = Console(highlight=False), random.Random(options.seed)
    series = {name: Series(name, f"{options.ranks} ranks") for name, _ in MODES}
    for _ in range(options.repeats):
        for mode in MODES:
            console.print(f"{mode[0]}: {trial(mode, options, choice, series[mode[0]])}")
    title = "a rank is killed: seconds until it works again (all: until all ranks do)"
    print_table(title, list(series.values()), console)
    if options.json:
        write_json(options.json, title, list(series.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
