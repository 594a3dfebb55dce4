"""Is a node ever taken for lost though it only was slow? And how soon does a run go on after a node really fell silent?

.venv/bin/python benchmarks/false_eviction.py --minutes 30 --json false_eviction.json
.venv/bin/python benchmarks/false_eviction.py --minutes 0 --cuts 10     # only the second question

This machine plays five nodes (four train, one is a spare) with a heartbeat limit of 2 s, while twice as many busy
processes as it has cores, a writer that syncs and one that churns memory fight for it. First nothing is done: each
node_lost, each lease that ends and each change of the controller is a false alarm. Then, under the same load, all
processes of a node (every second time the controller's) are stopped at once, which is silence without a closed
connection, as after a power cut. The time to the first step that all ranks have done after that is measured; it
includes the limit. The node is then let go on and has to come back as a spare.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import stamps
from launched import Launched, launched
from launchers import OURS, ROOT, Launcher
from machine_load import loaded
from measure import NEVER, Series, machine, print_table
from resilio_hpc.core.ledger import LedgerReader, read_ledger
from resilio_hpc.core.trusted_files import read_object
from resilio_hpc.launch.process.process_tree import descendants, send

NODES, TRAINING = 5, 4
SCRIPT = ROOT / "examples" / "train_tiny.py"
START_LIMIT_S = 180.0
RECOVERY_LIMIT_S = 60.0
ALLOWED_AFTER_LIMIT_S = 3.0
LOSSES_PER_NODE = 3  # a node that was lost more often is not taken back
ALARMS = ("node_lost", "lease_ended", "controller", "stepped_down", "slow_start", "rank_failed")


@dataclass
class Quiet:
    """What the time without faults came to. ``worst_silence_s``: the longest that the controller saw of any node."""

    minutes: float = 0.0
    alarms: dict[str, int] = field(default_factory=dict)
    worst_silence_s: float = 0.0
    steps: int = 0
    load_averages: list[float] = field(default_factory=list)

    @property
    def false_alarms(self) -> int:
        return sum(self.alarms.values())


def launcher(heartbeat_s: float) -> Launcher:
    options = (
        "--nproc-per-node=1", f"--nnodes={TRAINING}", "--spares=1", f"--heartbeat-timeout={heartbeat_s:g}",
        "--run-dir=run", "--max-restarts=100",
    )  # fmt: skip
    program = OURS / "resilio-launch"
    return Launcher("resilio-launch", "five nodes", program, options, {"RESILIO_LOCAL_NODES": str(NODES)})


@contextmanager
def started(options: argparse.Namespace, name: str) -> Iterator[Launched]:
    """Give a run that would never end by itself."""
    arguments = ("--steps=10000000", "--every=50", f"--step-seconds={options.step_seconds}")
    with launched(launcher(options.heartbeat), TRAINING, SCRIPT, arguments) as run:
        try:
            yield run
        finally:
            if options.evidence:
                target = options.evidence / name
                shutil.copytree(run.directory / "run" / "ledger", target, dirs_exist_ok=True)
                shutil.copy(run.directory / "output", target)


def status(run: Launched) -> dict[str, Any]:
    return read_object(run.directory / "run" / "status.json") or {}


def silences(now: dict[str, Any]) -> list[float]:
    agents = now.get("agents", {})
    return [float(agent["silent_s"]) for agent in agents.values() if "silent_s" in agent]


# -- nothing happens -------------------------------------------------------------------------------------------------


def watch(options: argparse.Namespace, console: Console) -> Quiet:
    """Let it run for so many minutes, and count what should not have happened."""
    seen = Quiet()
    with started(options, "quiet") as run:
        if not run.wait_for_steps(10, START_LIMIT_S):
            raise SystemExit(f"the run did not start:\n{run.last_output()}")
        reader = LedgerReader(run.directory / "run" / "ledger")
        reader.read_new()  # how it came up is no alarm
        counts: Counter[str] = Counter()
        began = told = time.monotonic()
        while (now := time.monotonic()) < began + 60 * options.minutes and run.process.poll() is None:
            seen.worst_silence_s = max([seen.worst_silence_s, *silences(status(run))])
            for event in reader.read_new():
                if event.kind in ALARMS:
                    counts[event.kind] += 1
                    console.print(f"  {(now - began) / 60:.1f} min: {event.kind} {event.fields}", markup=False)
            if now >= told + 60:
                told = now
                seen.load_averages.append(os.getloadavg()[0])
                console.print(
                    f"  {(now - began) / 60:.0f} min, load {os.getloadavg()[0]:.1f}, {dict(counts) or 'quiet'}"
                )
            time.sleep(0.2)
        if run.process.poll() is not None:
            raise SystemExit(f"the run ended by itself:\n{run.last_output()}")
        seen.minutes, seen.alarms = (time.monotonic() - began) / 60, dict(counts)
        seen.steps = min(stamps.steps_done(rank) for rank in run.stamps())
    return seen


# -- nodes fall silent -----------------------------------------------------------------------------------------------


def processes_of(run: Launched, node: str) -> list[int]:
    """Return the node's agent and all that descends from it."""
    agents = [event for event in read_ledger(run.directory / "run" / "ledger") if event.kind == "agent"]
    pid = next(event.fields["pid"] for event in reversed(agents) if event.fields["node"] == node)
    return [pid, *descendants(pid)]


def victim(run: Launched, number: int, losses: Counter[str]) -> str | None:
    """Every second time the controller's node, else another one that trains; None when all were lost too often."""
    now = status(run)
    training = {event.fields["node"] for event in read_ledger(run.directory / "run" / "ledger") if event.kind == "ranks"
                and event.fields["round"] == now["round"]}  # fmt: skip
    left = [node for node in sorted(training) if losses[node] < LOSSES_PER_NODE]
    wanted = [node for node in left if (node == now["controller"]) == (number % 2 == 1)]
    return next(iter(wanted or left), None)


def cut(run: Launched, node: str) -> float:
    """Silence a node until the others train again. How long that took; NEVER."""
    stopped = processes_of(run, node)
    at = time.time()
    send(stopped, signal.SIGSTOP)
    try:
        if not run.wait_for(lambda: stamps.recovery(run.stamps(), at) is not None, RECOVERY_LIMIT_S):
            return NEVER
        phases = stamps.recovery(run.stamps(), at)
        assert phases is not None
        return sum(phases.values())
    finally:
        send(stopped, signal.SIGCONT)


def is_back(run: Launched, node: str) -> bool:
    now = status(run)
    return node in now.get("agents", {}) and node not in now.get("lost", ())


def silence_nodes(options: argparse.Namespace, console: Console) -> Series:
    """So many cuts, one after the other, in one run."""
    series = Series("a node falls silent", f"heartbeat limit {options.heartbeat:g} s")
    losses: Counter[str] = Counter()
    with started(options, "cuts") as run:
        for number in range(options.cuts):
            if not run.wait_for_steps(20, START_LIMIT_S):
                raise SystemExit(f"the run does not step:\n{run.last_output()}")
            node = victim(run, number, losses)
            if node is None:
                break
            leads = node == status(run).get("controller")
            losses[node] += 1
            series.values_s.append(cut(run, node))
            took = series.values_s[-1]
            said = "never" if took == NEVER else f"{took:.2f} s, {took - options.heartbeat:.2f} s after the limit"
            console.print(f"  {node}{' (controller)' if leads else ''}: {said}", markup=False)
            if took == NEVER:
                break
            came = run.wait_for(lambda name=node: is_back(run, name), RECOVERY_LIMIT_S)  # type: ignore[misc]
            if not came:
                raise SystemExit(f"{node} did not come back:\n{run.last_output()}")
    return series


# -- the report ------------------------------------------------------------------------------------------------------


def report(quiet: Quiet, cuts: Series, options: argparse.Namespace, console: Console) -> bool:
    """Print what was seen; whether it is good enough."""
    good = quiet.false_alarms == 0
    if quiet.minutes:
        load = statistics.mean(quiet.load_averages) if quiet.load_averages else os.getloadavg()[0]
        console.print(
            f"{quiet.minutes:.0f} minutes, load average {load:.1f} on {os.cpu_count()} cores: {quiet.false_alarms} "
            f"false alarms {quiet.alarms or ''}; longest silence of a node {quiet.worst_silence_s:.2f} s of "
            f"{options.heartbeat:g} s; {quiet.steps} steps"
        )
    if cuts.values_s:
        print_table(f"{NODES} nodes on a loaded machine: silence → first step of all ranks", [cuts], console)
        good = good and max(cuts.values_s) <= options.heartbeat + ALLOWED_AFTER_LIMIT_S
    return good


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, metavar="M", help="how long nothing is done (30)")
    parser.add_argument("--cuts", type=int, default=8, metavar="N", help="how often a node falls silent (8)")
    parser.add_argument("--heartbeat", type=float, default=2.0, metavar="S", help="--heartbeat-timeout (2)")
    parser.add_argument("--step-seconds", type=float, default=0.05, metavar="S", help="a step's least duration (0.05)")
    parser.add_argument("--no-load", action="store_true", help="leave the machine as it is")
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="copy the runs' ledgers and output there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else 140)
    with loaded(Path.cwd()) if not options.no_load else nullcontext():
        quiet = watch(options, console) if options.minutes else Quiet()
        cuts = silence_nodes(options, console)
    good = report(quiet, cuts, options, console)
    if options.json:
        result = {"machine": machine(), "quiet": vars(quiet), "cuts": cuts.summary(), "good": good}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
