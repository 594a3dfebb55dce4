"""SIGKILL of one rank → the first step that all ranks completed again: entered again in the process, or started again.

.venv/bin/python benchmarks/in_process.py                           # 4 ranks, 1 GB of replicated state each
.venv/bin/python benchmarks/in_process.py --ranks 8 --state-mb 250

    …/in_process.py --images --before-s 5 --between-s 20   # spare ranks as images; the script works before its function
    …/in_process.py --stop-s 2 --state-mb 1      # SIGSTOP; seconds beyond this limit on a step (ours only)

Peers that benchmarks/peers_setup.sh installed are in the same run; in_process_peers.py says what each is given.
Modes are interleaved; each run of the launcher gets several faults in a row. Steps lost are those that were done again.
"""

import argparse
import random
import signal
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console

from in_process_peers import PEER_MODES, Mode, is_installed, pauses, states
from launched import Launched, launched
from launchers import OURS, Launcher
from measure import NEVER, Series, print_table, shown, write_json

SCRIPT = Path(__file__).resolve().parent / "reentry_training.py"
START_LIMIT_S, LIMIT_S = 180, 60


def own(name: str, policy: str, where: str, *more: str) -> Mode:
    launcher = Launcher("resilio-launch", policy, OURS / "resilio-launch", (f"--restart-policy={policy}", *more))
    return Mode(name, launcher, SCRIPT, where)


MODES = (
    own("in-process, model kept, a spare rank", "in-process", "outside", "--spare-ranks=1"),
    own("in-process, model kept", "in-process", "outside"),
    own("in-process, model made again", "in-process", "inside"),
    own("all ranks start again", "all", "inside"),
)


IMAGED = ("--spare-ranks=1", "--process-images=on")
IMAGES = own("in-process, model kept, a spare rank restored", "in-process", "outside", *IMAGED)


def steps(run: Launched) -> list[list[tuple[int, float, int]]]:
    """By rank: number, Unix time and round of each step."""
    found = []
    for rank in range(run.ranks):
        path = run.directory / f"steps-rank{rank}"
        text = path.read_text() if path.exists() else ""
        rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        found.append([(int(step), float(when), int(round_number)) for step, when, round_number in rows])
    return found


def recovered(run: Launched, killed_at_s: float) -> tuple[float, int] | None:
    """Seconds until all ranks completed a step of a later round, and how many steps are done again; None: not yet."""
    ends, lost = [], 0
    for rows in steps(run):
        before = [row for row in rows if row[1] <= killed_at_s]
        last_round = before[-1][2] if before else -1
        later = [row for row in rows if row[2] > last_round and row[1] > killed_at_s]
        if not later:
            return None
        ends.append(later[0][1])
        finished = max(row[0] for row in rows if row[2] <= last_round)
        lost = max(lost, finished - later[0][0] + 1)
    return max(ends) - killed_at_s, lost


PHASES = ("until the function is entered", "groups", "model, restore", "DDP", "first step")


def phases(run: Launched, killed_at_s: float) -> list[float]:
    """Return the seconds from one end of PHASES to the next, each end by the rank that came to it last.

    Of the entry that followed a kill; none where ranks do not tell.
    """
    entries = []
    for rank in range(run.ranks):
        path = run.directory / f"phases-rank{rank}"
        rows = [list(map(float, line.split())) for line in path.read_text().splitlines()] if path.exists() else []
        entries += [row[1:] for row in rows if row[1] > killed_at_s][:1]
    if len(entries) < run.ranks:
        return []
    ends = [killed_at_s, *(max(times) for times in zip(*entries, strict=True))]
    return [end - before for before, end in pairwise(ends)]


def trial(mode: Mode, options: argparse.Namespace, choice: random.Random, series: Series) -> str:
    """One run of the launcher, with several faults in a row."""
    faults = min(options.faults, mode.most_faults or options.faults)
    lost, paused, profiles = [], [], []
    launcher, number = mode.launcher, signal.SIGKILL
    if options.stop_s:
        launcher = replace(launcher, options=(*launcher.options, f"--hang-timeout={options.stop_s:g}"))
        number = signal.SIGSTOP
    more = (str(options.before_s),) if mode.script == SCRIPT else ()
    with launched(launcher, options.ranks, mode.script, (str(options.state_mb), mode.setting, *more)) as run:
        if not run.wait_for(lambda: all(len(rows) >= 10 for rows in steps(run)), START_LIMIT_S):
            series.values_s.append(NEVER)
            return f"did not start:\n{run.last_output()}"
        for _ in range(faults):
            time.sleep(options.between_s + choice.random())
            killed_at_s = run.kill_a_rank(choice, number)
            if not run.wait_for(lambda at=killed_at_s: recovered(run, at) is not None, LIMIT_S):
                series.values_s.append(NEVER)
                return f"never:\n{run.last_output()}"
            found = recovered(run, killed_at_s)
            assert found is not None
            series.values_s.append(found[0] - options.stop_s)
            lost.append(max(0, found[1]))
            profiles += [profile] if (profile := phases(run, killed_at_s)) else []
            if (pause := pauses(run, killed_at_s)) is not None:
                paused.append(shown(pause))
        told = f"; {states(run, faults)}" if mode in PEER_MODES else ""
    told += f"; healthy ranks paused {', '.join(paused)} s" if paused else ""
    if profiles:
        parts = zip(PHASES, map(median, zip(*profiles, strict=True)), strict=True)
        told += f"; {', '.join(f'{name} {shown(seconds)}' for name, seconds in parts)} s"
    times = ", ".join(shown(value) for value in series.values_s[-faults:])
    return f"{times} s; steps done again: {lost}{told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--state-mb", type=float, default=1000, metavar="MB", help="replicated state of each rank")
    parser.add_argument("--faults", type=int, default=4, help="faults in one run (4)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode (3)")
    parser.add_argument("--between-s", type=float, default=2.0, metavar="S", help="from fault to fault, at least (2)")
    parser.add_argument("--before-s", type=float, default=0.0, metavar="S", help="of work before the function")
    parser.add_argument("--images", action="store_true", help="with spare ranks as images (CRIU), without peers")
    parser.add_argument("--only", default="", metavar="TEXT", help="modes whose name holds this text")
    parser.add_argument("--stop-s", type=float, default=0.0, metavar="S", help="stop ranks; a step may take S seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    console, choice = Console(highlight=False), random.Random(options.seed)
    settings = f"{options.ranks} ranks, {options.state_mb:g} MB each, {options.before_s:g} s before the function"
    every = (IMAGES, *MODES) if options.images else MODES if options.stop_s else (*MODES, *PEER_MODES)
    wanted = [mode for mode in every if options.only in mode.name]
    chosen = [mode for mode in wanted if mode not in PEER_MODES or is_installed(mode)]
    for mode in wanted:
        if mode not in chosen:
            console.print(f"{mode.name} is skipped: not installed here (benchmarks/peers_setup.sh installs the peers)")
    series = {mode.name: Series(mode.name, settings) for mode in chosen}
    for _ in range(options.repeats):
        for mode in chosen:
            console.print(f"{mode.name}: {trial(mode, options, choice, series[mode.name])}")
    title = "a rank is killed: seconds until all ranks have done a step"
    if options.stop_s:
        title = f"a rank is stopped: seconds beyond {options.stop_s:g} until all ranks have done a step"
    print_table(title, list(series.values()), console)
    if options.json:
        write_json(options.json, title, list(series.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
