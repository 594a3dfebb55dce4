#!/usr/bin/env python3
"""Every fault, several times, on a real Slurm dev cluster: does each run come over it, how soon, with what loss?

    python benchmarks/faults.py --json faults.json --repeats 10 --parallel 3 --results faults.jsonl
    python benchmarks/faults.py --campaign --repeats 10 --parallel 3 --results campaign.jsonl
    python benchmarks/faults.py --mode batch --only "rank SIGKILL" "cut in halves"
    python benchmarks/faults.py --results faults.jsonl --repeats 0       # only the table of what is there

Needs root and Slurm (see docs/devcluster.md); each drill has a cluster of its own. A run passes when its verdict is
right, the ranks' stamps prove that no two rounds ever trained at once, and the number that all ranks computed together
is exactly right. Recovery is from the last fault to the first step that was done after it by new ranks; where a node
was lost by its silence, the time after the heartbeat limit is told too. Each result is added to --results at once: the
same command, given again, goes on until every drill has passed --repeats times, and failures stay counted as tries.
What a failed or slow drill leaves (run directory, output, stamps) is copied to --evidence. Clusters begin to train one
after another, since importing torch on all nodes is the heaviest part. --campaign: the choice of faults_campaign.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from faults_campaign import campaign
from faults_table import Record, table
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.process import run
from resilio_hpc.devtools.demo.stage import PROJECT
from resilio_hpc.devtools.devcluster import remove
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, SLURM_SERIES
from resilio_hpc.drills.drill import DrillResult, DrillRun, cluster_for
from resilio_hpc.drills.drill_words import slug
from resilio_hpc.drills.evidence import keep_evidence
from resilio_hpc.drills.kind import HEARTBEAT_S, Drill
from resilio_hpc.drills.table import DRILLS

WIDTH = 160  # of what goes to a file
NODE_LOSS_S = 3.0  # after the heartbeat limit: what takes longer is worth a look
END_S = 20.0  # for interrupted drills to end
START_S = 90.0  # at most so long does a drill wait for others to begin


class Campaign:
    """All drills that are wanted and not yet done; several workers take them, each with one cluster at a time."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self._lock = threading.Lock()
        self.records = read_records(options.results)
        self._commit = commit()
        self._ends = False
        self._starting = threading.Lock()
        self._work: queue.SimpleQueue[tuple[Drill, int]] = queue.SimpleQueue()
        passed = {(record["name"], record["repeat"], record["slurm"]) for record in self.records if record["passed"]}
        drills = [drill for drill in chosen(options) if wanted(drill, options)]
        for repeat in range(options.first_repeat, options.first_repeat + options.repeats):
            for drill in drills:
                if (drill.full_name, repeat, options.slurm) not in passed:
                    self._work.put((drill, repeat))

    def run(self) -> None:
        """Do all drills."""
        workers = [
            threading.Thread(target=self._work_off, args=(n,), daemon=True) for n in range(self._options.parallel)
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.5)  # so that Ctrl-C is heard
        finally:
            self._ends = True  # no worker begins another drill, and what an interrupted one says does not count
            until = time.monotonic() + END_S
            while any(worker.is_alive() for worker in workers) and time.monotonic() < until:
                for number in range(self._options.parallel):
                    with contextlib.suppress(ResilioError, OSError):  # one may just be starting, or ending by itself
                        remove(cluster_name(number))
                time.sleep(0.5)

    def _work_off(self, number: int) -> None:
        while not self._ends:
            try:
                drill, repeat = self._work.get_nowait()
            except queue.Empty:
                return
            try:
                self._keep(self._drill(drill, repeat, cluster_name(number)), repeat)
            except (ResilioError, OSError) as error:
                self._console.print(f"{drill.full_name}: not done: {error}", markup=False)

    def _drill(self, drill: Drill, repeat: int, cluster: str) -> DrillResult:
        turn = Turn(self._starting)
        try:
            with cluster_for(drill, cluster, self._options.slurm) as running:
                turn.take()
                result = DrillRun(running, drill, "drill", repeat).run(turn.give)
                kept = not result.passed or slow(drill, result) or self._options.keep_all
                if kept and self._options.evidence:
                    when = time.strftime("%H%M")
                    keep_evidence(running, self._options.evidence / f"{slug(drill.full_name)}.{repeat}.{when}")
        finally:
            turn.give()
        return result

    def _keep(self, result: DrillResult, repeat: int) -> None:
        record = {
            **asdict(result),
            "repeat": repeat,
            "slurm": self._options.slurm,
            "commit": self._commit,
            "time": round(time.time()),
        }
        with self._lock:
            if self._ends:
                return
            self.records.append(record)
            if self._options.results:
                with self._options.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        how = "passed" if result.passed else f"FAILED: {result.why}"
        seconds = f"{result.recovery_s:.2f} s" if result.recovery_s is not None else "-"
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {result.name} #{repeat}: {how}, {seconds}, {result.total_s:.0f} s in all",
            markup=False,
        )


class Turn:
    """Holds a lock from ``take`` to the first ``give``."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._held = False

    def take(self) -> None:
        """Wait for the lock; one who has held it for START_S holds up no other any longer."""
        self._held = self._lock.acquire(timeout=START_S)

    def give(self) -> None:
        """Let the next one begin."""
        if self._held:
            self._held = False
            self._lock.release()


def slow(drill: Drill, result: DrillResult) -> bool:
    """Whether the run took longer to go on than the loss of a node should cost it."""
    return drill.node_level and (result.recovery_s or 0.0) > HEARTBEAT_S + NODE_LOSS_S


def commit() -> str:
    """Return the commit that is tried, with a ``+`` where files differ from it."""
    try:
        return run(["git", "-C", str(PROJECT), "describe", "--always", "--dirty=+"], 10.0).stdout.strip()
    except ResilioError:
        return ""


def chosen(options: argparse.Namespace) -> list[Drill]:
    """Return the drills that the command line chooses from."""
    return campaign() if options.campaign else list(DRILLS)


def cluster_name(worker: int) -> str:
    """Return the name of a worker's cluster."""
    return f"faults-{os.getpid()}-{worker}"


def wanted(drill: Drill, options: argparse.Namespace) -> bool:
    """Whether the command line asks for a drill."""
    if options.mode and drill.srun != (options.mode == "srun"):
        return False
    if any(text in drill.full_name for text in options.skip):
        return False
    return not options.only or any(text in drill.full_name for text in options.only)


def read_records(path: Path | None) -> list[Record]:
    """Results of an earlier, perhaps killed, campaign."""
    records = []
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # killed in the middle of this line
    return records


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write all results here")
    made.add_argument("--results", type=Path, help="add each result to this JSONL file at once, and skip what it holds")
    made.add_argument("--evidence", type=Path, help="copy what failed drills leave to this directory")
    made.add_argument("--keep-all", action="store_true", help="evidence of the passed ones, too")
    made.add_argument("--quick", action="store_true", help="each fault once")
    made.add_argument("--repeats", type=int, default=5, help="so often must each pass (default 5)")
    made.add_argument("--first-repeat", type=int, default=0, help="number of the first repeat (it chooses the jitter)")
    made.add_argument("--only", nargs="+", metavar="NAME", help="only the faults whose names hold one of these texts")
    made.add_argument(
        "--skip", nargs="+", metavar="NAME", default=[], help="all but those whose names hold such a text"
    )
    made.add_argument("--mode", choices=("batch", "srun"), help="only one way in (default: both)")
    made.add_argument("--parallel", type=int, default=1, metavar="N", help="clusters at once (default 1)")
    made.add_argument("--slurm", default=HOST_SERIES, choices=tuple(SLURM_SERIES))
    made.add_argument("--campaign", action="store_true", help="only the choice of faults_campaign.py")
    made.add_argument("--list", action="store_true", help="print the faults' names")
    return made


def main() -> int:
    """Exit code 0 when every run passed."""
    options = parser().parse_args()
    if options.quick:
        options.repeats = 1
    if options.list:
        print("\n".join(drill.full_name for drill in chosen(options) if wanted(drill, options)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    campaign = Campaign(options, console)
    campaign.run()
    records = [record for record in campaign.records if record["slurm"] == options.slurm]
    drills = [drill for drill in chosen(options) if wanted(drill, options)]
    console.print(table(drills, records, f"Faults on Slurm {options.slurm}"))
    if options.json:
        options.json.write_text(json.dumps({"slurm": options.slurm, "results": records}, indent=1))
    return 0 if all(record["passed"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
