"""Whether parallel training has the same bits when ranks are killed and the others enter again in their processes.

    python benchmarks/exact_reentry.py --results exact.jsonl                    # all layouts, 20 faults each
    python benchmarks/exact_reentry.py --layout hsdp --nodes 2 --spare 1 --results exact.jsonl
    python benchmarks/exact_reentry.py --results exact.jsonl --faults 0         # only the table

A rank is killed at an instant by chance; or two, up to half a second apart; or a second one while ranks make their
process groups again, restore, or save. Each rank writes a digest of its parameters, optimizer and random generator
after each step. All of them, of every round, are compared with those of an undisturbed run. *Done again*: finished
steps that were done again, by the same stamps. The same command goes on where it ended.
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
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from struck_run import StruckRun

SCRIPT = Path(__file__).with_name("parallel_training.py")
RANKS = {"ddp": 4, "fsdp2": 4, "hsdp": 4, "dp-tp-pp": 8}
SETTINGS = ((1, 0), (1, 1), (2, 0), (2, 1))  # nodes, spare ranks of each
PER_RUN = 7  # faults
EVERY = 40  # steps from save to save
PARTS = ("process group", "mesh, model", "restore", "first step")
PLACES = {"in groups": ("groups", 0.3), "in restore": ("restore", 0.05), "in a save": ("save", 0.02)}
KINDS = ("once", "once", "twice", "in groups", "in restore", "in a save", "in the optimizer")

Stamp = tuple[int, str]
"""A step, and the digest after it."""


class Run(StruckRun):
    """One run of the launcher."""

    def __init__(self, path: Path, layout: str, setting: tuple[int, int], step_s: float, steps: int) -> None:
        nodes, spare = setting
        self.ranks = RANKS[layout]
        self.stamp_files, self.enough, self.strike = path / "stamps", path / "enough", path / "strike"
        argv = [
            *("--nproc-per-node", str(RANKS[layout] // nodes), "--max-restarts", "100", "--spare-ranks", str(spare)),
            *("--restart-policy", "in-process", str(SCRIPT), "--layout", layout),
            *("--step-s", str(step_s), "--steps", str(steps), "--every", str(EVERY)),
            *("--stamps", str(self.stamp_files), "--enough", str(self.enough), "--strike", str(self.strike)),
        ]  # fmt: skip
        super().__init__(path, argv, nodes)

    def stamps(self) -> dict[tuple[int, int], list[Stamp]]:
        """Return, by round and rank, the stamps of finished steps; a line that a death has cut off is left out."""
        found = {}
        for path in self.stamp_files.glob("*.*[0-9]"):
            number, _, rank = path.name.partition(".")
            lines = path.read_text().split("\n")[:-1]
            found[int(number), int(rank)] = [(int(step), digest) for step, digest in map(str.split, lines)]
        return found

    def done_again(self) -> int:
        """Return how many finished steps are done again since the last fault."""
        number, restored = (self.events("first_step")[-1].fields[name] for name in ("round", "restored"))
        before = (found[-1][0] for (one, _), found in self.stamps().items() if one < number and found)
        return int(max(before, default=0) - restored)

    def parts(self) -> list[float]:
        """Return how long the parts of the last entry (PARTS) took, each until the rank that came to it last."""
        number = self.events("first_step")[-1].fields["round"]
        entries = [list(map(float, path.read_text().split())) for path in self.stamp_files.glob(f"{number}.*.entry")]
        ends = [max(times) for times in zip(*entries, strict=True)]
        return [round(end - before, 4) for before, end in pairwise(ends)]

    def end(self) -> None:
        self.enough.touch()
        self.until(lambda: self.process.poll() is not None, "the end")


def undisturbed(path: Path, layout: str, nodes: int, steps: int) -> dict[int, dict[int, str]]:
    """Return the digests of a run without faults, by rank and step."""
    calm = Run(path / "calm", layout, (nodes, 0), 0.0, steps)
    calm.until(lambda: calm.process.poll() is not None, "the undisturbed run")
    return {rank: dict(found) for (_, rank), found in calm.stamps().items()}


class Compared(NamedTuple):
    """``compared``: stamps; ``wrong``: the first that differs, as text."""

    compared: int
    wrong: str


def compare(found: dict[tuple[int, int], list[Stamp]], calm: dict[int, dict[int, str]]) -> Compared:
    """Compare all stamps of a run with those of an undisturbed one, by rank and step."""
    count = 0
    for (number, rank), stamps in sorted(found.items()):
        for step, digest in stamps:
            if calm[rank].get(step) != digest:
                return Compared(count, f"round {number}, rank {rank}, step {step}")
            count += 1
    return Compared(count, "")


def kill(run: Run, draw: random.Random) -> list[int]:
    """Kill a rank of the newest round, and return its number; none where it has ended meanwhile."""
    rank, pid = draw.choice(list(run.pids_by_rank().items()))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return [rank]
    return []


def is_replaceable(layout: str, lost: Sequence[int], ranks: int) -> bool:
    """Return whether some rank has the part of each lost one."""
    replicas = {"ddp": 1, "hsdp": ranks // 2, "fsdp2": ranks}.get(layout)  # ranks with the same remainder
    groups: dict[int, set[int]] = defaultdict(set)
    for rank in range(ranks):  # of three dimensions: the data axis is the second of two, two, two
        groups[rank % replicas if replicas is not None else rank & ~2].add(rank)
    return not any(group <= set(lost) for group in groups.values())


def strike(run: Run, kind: str, draw: random.Random, ranks: int) -> list[int]:
    """Do it, and return the ranks that are lost."""
    time.sleep(0.3 + draw.uniform(0.0, 1.5))
    rank = draw.randrange(ranks)
    if kind == "in the optimizer":
        run.strike.write_text(f"optimizer {rank} {draw.uniform(0.0, 0.01):.4f}")
        return [rank]
    if kind in PLACES:
        place, most_s = PLACES[kind]
        run.strike.write_text(f"{place} {rank} {draw.uniform(0.0, most_s):.4f}")
        if kind == "in a save":
            return [rank]
    lost = [rank] if kind in PLACES else []
    lost += kill(run, draw)
    if kind == "twice":
        time.sleep(draw.uniform(0.0, 0.5))
        lost += kill(run, draw)
    return lost


def one_run(
    path: Path, layout: str, setting: tuple[int, int], draw: random.Random, faults: int, kinds: Sequence[str]
) -> list[dict[str, Any]]:
    """Strike some times; return what each cost, and whether the bits are right."""
    nodes, spare = setting
    run = Run(path / "struck", layout, setting, 0.05, 1_000_000)
    rows: list[dict[str, Any]] = []
    try:
        run.until(lambda: run.events("committed"), "the first save")
        for _ in range(faults):
            kind = draw.choice(kinds)
            if spare:
                run.until(lambda: spares_wait(run, nodes), "standby processes")
            before = len(run.events("recovered"))
            lost = strike(run, kind, draw, run.ranks)
            run.until(lambda before=before: len(run.events("recovered")) > before, f"recovery from: {kind}")
            run.strike.unlink(missing_ok=True)
            time.sleep(0.7)  # of two faults the second may still come
            run.until(run.trains, "training again")
            recovered, first = run.events("recovered")[-1].fields, run.events("first_step")[-1].fields
            rows.append({
                "layout": layout, "nodes": nodes, "spare": spare, "kind": kind, "again": run.done_again(),
                "lost": lost, "replaceable": is_replaceable(layout, lost, run.ranks),
                "source": first["source"], "recovery_s": recovered["recovery_s"],
                "standby": len(run.events("standby_used")), "kept": run.events("ranks")[-1].fields["kept"],
                "parts": run.parts(), "time": round(time.time()),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        run.end()
    finally:
        run.stop()
    stamps = run.stamps()
    steps = max(found[-1][0] for found in stamps.values() if found)
    wanted = undisturbed(path, layout, nodes, steps)
    result = compare(stamps, wanted)
    print(f"{result.compared} stamps are the same" if not result.wrong else f"WRONG: {result.wrong}", flush=True)
    last = max(number for number, _ in stamps)
    ends = {rank: found[-1][0] for (number, rank), found in stamps.items() if number == last and found}
    whole = ends.keys() == wanted.keys() and len(set(ends.values())) == 1
    return [{**one, "exact": not result.wrong and whole, "wrong": result.wrong, "steps": steps} for one in rows]


def spares_wait(run: Run, nodes: int) -> bool:
    """Return whether each node has as many standby processes ready as it was asked for."""
    ready, used, lost = (len(run.events(kind)) for kind in ("standby_ready", "standby_used", "standby_lost"))
    return ready - used - lost >= nodes


def of_layout(rows: list[dict[str, Any]], layout: str, settings: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["layout"] == layout and (row["nodes"], row["spare"]) in settings]


def table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print what is in the results. Faults that leave no rank with some part are in a row of their own."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        spare = f", {row['spare']} spare" if row["spare"] else ""
        nodes = f"{row['nodes']} node{'s' if row['nodes'] > 1 else ''}"
        kinds[row["layout"], f"{nodes}{spare}"].append(row)
        kinds[row["layout"], "all" if row["replaceable"] else "all: no replica left"].append(row)
    shown = Table(
        "layout", "on", "faults", "same bits", "steps done again: 0", "1", "more", "recovery, median s", "most"
    )
    for (layout, where), some in sorted(kinds.items()):
        again = [row["again"] for row in some]
        counts = [sum(one <= 0 for one in again), sum(one == 1 for one in again), sum(one > 1 for one in again)]
        seconds = [row["recovery_s"] for row in some]
        exact = sum(row["exact"] for row in some)
        times = f"{median(seconds):.2f}", f"{max(seconds):.1f}"
        shown.add_row(layout, where, str(len(some)), str(exact), *map(str, counts), *times)
    console.print(shown)
    shown = Table("layout", "of an entry: recovery, s", *PARTS)
    for layout in dict.fromkeys(row["layout"] for row in rows):
        some = [row for row in rows if row["layout"] == layout]
        parts = [f"{median(one):.2f}" for one in zip(*(row["parts"] for row in some), strict=True)]
        shown.add_row(layout, f"{median(row['recovery_s'] for row in some):.2f}", *parts)
    console.print(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=tuple(RANKS), action="append", help="default: all")
    parser.add_argument("--faults", type=int, default=20, help="as many of each layout, with those in --results")
    parser.add_argument("--nodes", type=int, choices=(1, 2))
    parser.add_argument("--spare", type=int, choices=(0, 1), help="standby processes of each node")
    parser.add_argument("--kinds", choices=sorted(set(KINDS)), action="append", help="default: all")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results: Path | None = options.results
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []
    settings = [
        one for one in SETTINGS if options.nodes in (None, one[0]) and options.spare in (None, one[1])
    ]  # fmt: skip
    for layout in options.layout or RANKS:
        while len(done := of_layout(rows, layout, settings)) < options.faults:
            draw = random.Random(f"{options.seed} {layout} {len(rows)}")
            setting = min(settings, key=lambda one: sum((row["nodes"], row["spare"]) == one for row in done))
            with tempfile.TemporaryDirectory(prefix="resilio-exact-") as name:
                new = one_run(Path(name), layout, setting, draw, min(PER_RUN, options.faults), options.kinds or KINDS)
            rows += new
            if results is not None:
                with results.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
    table(rows, Console(width=120))
    return 0 if all(row["exact"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
