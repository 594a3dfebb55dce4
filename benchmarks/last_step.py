"""How many steps random faults cost where ranks hold the same tensors, and whether the result is that of no fault.

    python benchmarks/last_step.py --faults 100 --results benchmarks/last_step.jsonl
    python benchmarks/last_step.py --results benchmarks/last_step.jsonl --faults 0     # only the table

Ranks of several nodes, all on this machine, train in steps of some 60 ms and save every 40. A rank, drawn by chance, is
killed or stopped at an instant drawn by chance: in a collective, in an optimizer's step, in a save, in a recovery. So
are all processes of a node (its agent, what forks ranks, and its ranks), or they are frozen until it is lost. Each run
ends after some faults; it is compared, bit for bit, with one that had none. Each fault is a line of --results; the same
command goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from struck_run import LIMIT_S, StruckRun

SCRIPT = Path(__file__).with_name("replicated_training.py")
FREEZER = Path("/sys/fs/cgroup/freezer")  # needs root
PER_RUN = 12  # faults
STEP_S = 0.05
KINDS = {"rank killed": 6, "rank stopped": 1, "rank killed in a recovery": 2, "node killed": 1}  # how often of ten
LOST = {"rank killed": 9, "node silent": 1}
CHOICES = {"all": KINDS, "a tenth nodes": LOST, **{kind: {kind: 1} for kind in (*KINDS, *LOST)}}


class Run(StruckRun):
    """One run of the launcher."""

    def __init__(self, path: Path, options: argparse.Namespace, *more: str) -> None:
        self.stamps, self.result, self.enough = path / "stamps", path / "result.json", path / "enough"
        argv = [
            *("--nproc-per-node", str(options.ranks), "--max-restarts", "100"),
            *("--nnodes", str(options.nodes), "--spares", str(options.spares), str(SCRIPT)),
            *("--step-s", str(STEP_S if options.work_s is None else 0.0), "--work-s", str(options.work_s or 0.0)),
            *("--every", "40" if options.work_s is None else "1"),
            *("--stamps", str(self.stamps), "--result", str(self.result), "--enough", str(self.enough), *more),
            *(("--in-process",) if options.in_process else ()),
        ]
        if options.images:
            argv = ["--spare-ranks", "1", "--process-images", "on", *argv]
        super().__init__(path, argv, options.nodes + options.spares)

    def finished(self, number: int) -> int:
        """Return the most steps that a rank had finished in a round, as the ranks' stamps say."""
        found = [path.read_bytes().split() for path in self.stamps.glob(f"{number}.*")]
        return max((int(steps[-1]) for steps in found if steps), default=-1)

    def begun(self, number: int) -> float:
        """Return when the last rank began its first step of a round, in Unix seconds."""
        return max(float(path.read_text()) for path in self.stamps.glob(f"begun-{number}-*"))

    def end(self) -> dict[str, Any]:
        """Let it end, and return its result."""
        self.enough.touch()
        self.process.wait(LIMIT_S)
        ended: dict[str, Any] = json.loads(self.result.read_text())
        return ended


def strike(run: Run, kind: str, draw: random.Random, work_s: float) -> float:
    """Do one thing to a rank, at an instant by chance; return when, in Unix seconds."""
    time.sleep(0.5 + draw.uniform(0.0, max(2.5, work_s)))
    at = time.time()
    if kind.startswith("node"):
        agent = psutil.Process(draw.choice(run.pids())).parents()[1]
        processes = (agent, *agent.children(recursive=True))
        if kind == "node silent":
            silence(run, at, [process.pid for process in processes])
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return at
    os.kill(draw.choice(run.pids()), signal.SIGSTOP if kind == "rank stopped" else signal.SIGKILL)
    if kind == "rank killed in a recovery":
        time.sleep(draw.uniform(0.0, 0.5))
        for pid in draw.sample(run.pids(), 1):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended meanwhile: then this is one fault
    return at


def silence(run: Run, at: float, pids: list[int]) -> None:
    """Freeze processes until ranks start without them: connections stay open, as those of a node without power."""
    group = FREEZER / f"resilio-silent-{os.getpid()}"
    group.mkdir()
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        run.until(lambda: any(event.time > at for event in run.events("start")), "a start without a node")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # before they go on
    finally:
        (group / "freezer.state").write_text("THAWED")
        run.until(lambda: not (group / "cgroup.procs").read_text(), "the end of a frozen node")
        group.rmdir()


def one_run(path: Path, options: argparse.Namespace, draw: random.Random, faults: int) -> list[dict[str, Any]]:
    """Strike some times; return what each cost, and whether the result is right."""
    run = Run(path / "struck", options)
    found: list[dict[str, Any]] = []
    kinds = CHOICES[options.kinds]
    try:
        run.until(lambda: run.events("committed"), "the first save")  # the nodes know each other's replicators by then
        run.until(lambda: len(run.events("spawner_ready")) >= options.nodes + options.spares, "all nodes")
        for _ in range(faults):
            kind = draw.choices(list(kinds), list(kinds.values()))[0]
            if options.images:  # each lost rank's place is to be taken by one of them
                images = options.nodes + len(run.events("standby_used"))
                run.until(lambda images=images: len(run.events("process_image")) >= images, "an image on each node")
            before, ready = len(run.events("recovered")), len(run.events("spawner_ready"))
            if options.work_s is not None:  # at 100 faults a day many steps are committed between two of them
                commits = len(run.events("committed"))
                run.until(lambda commits=commits: len(run.events("committed")) > commits + 1, "a step of this round")
            struck_at = strike(run, kind, draw, options.work_s or 0.0)
            run.until(lambda before=before: len(run.events("recovered")) > before, f"recovery from: {kind}")
            time.sleep(0.7)  # of two faults the second may still come
            recovered = run.events("recovered")[-1].fields
            run.until(run.trains, "training again")
            if kind.startswith("node") and options.spares:  # a real node has hours between two faults
                run.until(lambda ready=ready: len(run.events("spawner_ready")) > ready, "the lost node, a spare now")
            number = run.events("start")[-1].fields["round"]
            first = run.events("first_step")[-1].fields
            lost = max(run.finished(one) for one in range(number)) - first["restored"]
            found.append({
                "kind": kind, "lost": lost, "source": first["source"], "recovery_s": recovered["recovery_s"],
                "ranks": place_of(options), "time": round(time.time()), "choice": options.kinds,
                "idle_s": round(run.begun(number) - struck_at, 3),
                "restored_s": [one.fields.get("restored_s") for one in run.events("standby_used")][-1:],
            })  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
        ended = run.end()
    finally:
        run.stop()
    calm = Run(path / "calm", options, "--steps", str(ended["steps"]), "--step-s", "0", "--work-s", "0")
    calm.process.wait(600)
    right = json.loads(calm.result.read_text()) == ended
    return [{**one, "right": right} for one in found]


def place_of(options: argparse.Namespace) -> str:
    spares = f" and {options.spares} spare" if options.spares else ""
    slow = f", work of {options.work_s:g} s" if options.work_s is not None else ""
    how = (" in-process" if options.in_process else "") + (", images" if options.images else "")
    return f"{options.nodes}x{options.ranks}{spares}{how}{slow}"


def _done(rows: list[dict[str, Any]], place: str, kinds: str) -> int:
    """Return how many faults are in the results."""
    return sum((row["ranks"], row.get("choice", "all")) == (place, kinds) for row in rows)


def table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print what is in the results."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    choices: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        kinds[f"{row['ranks']}: {row['kind']}"].append(row)
        if "idle_s" in row:
            choices[f"{row['ranks']}: {row['choice']}"].append(row["idle_s"])
    shown = Table("nodes x ranks: fault", "faults", "result right", "steps lost: 0", "1", "more", "recovery, median s")
    for kind, some in sorted(kinds.items()):
        lost = [row["lost"] for row in some]
        counts = [sum(one == 0 for one in lost), sum(one == 1 for one in lost), sum(one > 1 for one in lost)]
        right, seconds = sum(row["right"] for row in some), median(row["recovery_s"] for row in some)
        shown.add_row(kind, str(len(some)), str(right), *map(str, counts), f"{seconds:.2f}")
    console.print(shown)
    shown = Table(
        "nodes x ranks: faults", "faults", "until all ranks are in a step: mean", "median", "most", "100 a day"
    )
    for choice, idle in sorted(choices.items()):
        mean = sum(idle) / len(idle)
        seconds = [f"{value:.2f} s" for value in (mean, median(idle), max(idle))]
        shown.add_row(choice, str(len(idle)), *seconds, f"{100 * mean / 86_400:.3%}")
    console.print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=24, help="as many in all, with those in --results")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--spares", type=int, default=0, help="nodes that wait for another to be lost")
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    parser.add_argument("--kinds", choices=CHOICES, default="all", help="which faults")
    parser.add_argument("--work-s", type=float, help="steps of so much work, before gradients are summed")
    parser.add_argument("--in-process", action="store_true", help="ranks that live enter again in their processes")
    parser.add_argument("--images", action="store_true", help="one restored from an image takes a lost rank's place")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results: Path | None = options.results
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []
    place = place_of(options)
    while _done(rows, place, options.kinds) < options.faults:
        draw = random.Random(f"{options.seed} {place} {len(rows)}")
        with tempfile.TemporaryDirectory(prefix="resilio-last-step-") as name:
            new = one_run(Path(name), options, draw, min(PER_RUN, options.faults))
        rows += new
        if results is not None:
            with results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    table(rows, Console(width=120))


if __name__ == "__main__":
    main()
