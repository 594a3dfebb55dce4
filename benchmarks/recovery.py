"""Recovery time: SIGKILL of one of four ranks → first step that all ranks completed again. Ours beside the peers.

benchmarks/peers_setup.sh && .venv/bin/python benchmarks/recovery.py
.venv/bin/python benchmarks/recovery.py --streak 200      # recoveries in a row in one run of our launcher
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import stamps
from launched import Launched, launched
from launchers import LAUNCHERS, OUR_LAUNCHER, Launcher
from measure import NEVER, Series, print_table, shown, write_json

RANKS = 4
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_tiny.py"
START_LIMIT_S = 120
WARM_STEPS = 20


def recover_once(run: Launched, choice: random.Random, limit_s: float, series: Series) -> bool:
    """Kill a rank and time the recovery into the series; False when it did not come within the limit."""
    killed_at_s = run.kill_a_rank(choice)
    if not run.wait_for(lambda: stamps.recovery(run.stamps(), killed_at_s) is not None, limit_s):
        series.values_s.append(NEVER)
        return False
    phases = stamps.recovery(run.stamps(), killed_at_s)
    assert phases is not None
    series.phases_s.append(phases)
    series.values_s.append(sum(phases.values()))
    return True


def trial(launcher: Launcher, options: argparse.Namespace, choice: random.Random, series: Series) -> str:
    """One launcher run with one kill. What to tell about it, in a line."""
    with launched(launcher, RANKS, SCRIPT, script_arguments(options)) as run:
        if not run.wait_for_steps(WARM_STEPS, START_LIMIT_S):
            series.values_s.append(NEVER)
            return f"did not start:\n{run.last_output()}"
        if recover_once(run, choice, options.limit_s, series):
            return f"{shown(series.values_s[-1])} s"
        return "never" + (f":\n{run.last_output()}" if options.verbose else "")


def script_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    return (f"--state-mb={options.state_mb}", "--steps=1000000")


def compare(options: argparse.Namespace, console: Console) -> list[Series]:
    """Trials of all launchers, interleaved, so that a noisy minute of the machine hits all of them."""
    chosen = [one for one in LAUNCHERS if options.only in f"{one.name} {one.settings}"]
    for name in sorted({one.name for one in chosen if not one.program.exists()}):
        console.print(f"{name} is skipped: not installed here (benchmarks/peers_setup.sh installs the peers)")
    series = {one: Series(one.name, one.settings) for one in chosen if one.program.exists()}
    choice = random.Random(options.seed)
    for repeat in range(options.repeats):
        for launcher, timings in series.items():
            said = trial(launcher, options, choice, timings)
            console.print(f"{repeat + 1}/{options.repeats} {launcher.name} ({launcher.settings}): {said}", markup=False)
    return list(series.values())


def streak(options: argparse.Namespace, console: Console) -> list[Series]:
    """Recoveries in a row in one run of our launcher; a hang ends that run and is counted, and another run goes on."""
    series = Series(OUR_LAUNCHER.name, f"{options.streak} in a row")
    choice = random.Random(options.seed)
    launcher = replace(OUR_LAUNCHER, options=(f"--max-restarts={options.streak}",))
    while len(series.values_s) < options.streak:
        with launched(launcher, RANKS, SCRIPT, script_arguments(options)) as run:
            while len(series.values_s) < options.streak:
                limit_s = START_LIMIT_S if not series.values_s else options.limit_s
                if not run.wait_for_steps(3, limit_s) or not recover_once(run, choice, options.limit_s, series):
                    console.print(f"recovery {len(series.values_s)}: hang\n{run.last_output()}", markup=False)
                    if not series.values_s:
                        return [series]
                    break
                if len(series.values_s) % 20 == 0:
                    console.print(f"{len(series.values_s)}/{options.streak}: median {shown(series.median_s())} s")
    hangs = len(series.values_s) - len(series.finished_s())
    median, late, worst = series.median_s(), series.percentile_s(95), max(series.values_s)
    console.print(f"{hangs} hangs; median {shown(median)} s, 95 % {shown(late)} s, max {shown(worst)} s")
    return [series]


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="trials of each launcher (5)")
    parser.add_argument("--quick", action="store_true", help="one trial of each launcher")
    parser.add_argument("--only", default="", metavar="NAME", help='launchers whose "name settings" hold this text')
    parser.add_argument("--state-mb", type=int, default=0, metavar="MB", help="model and optimizer state; 0 is tiny")
    parser.add_argument("--limit-s", type=float, default=60, metavar="S", help="later than this counts as never (60)")
    parser.add_argument("--streak", type=int, metavar="N", help="N recoveries in a row in one run of our launcher")
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--verbose", action="store_true", help="the last output of a launcher that did not recover")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats = 1
    return options


def main() -> int:
    options = parse_options(sys.argv[1:])
    # A table that is written to a file or a log has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 140)
    results = streak(options, console) if options.streak else compare(options, console)
    model = f"{options.state_mb} MB of state" if options.state_mb else "tiny model"
    title = f"SIGKILL of 1 of {RANKS} ranks (gloo, {model}) → first step of all ranks"
    print_table(title, results, console)
    if options.json:
        write_json(options.json, title, results)
    return 0 if all(one.finished_s() for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
