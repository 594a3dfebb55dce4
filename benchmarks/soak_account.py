"""What a soak came to, from what soak.py has written down: counted once by the report, once from raw logs."""

from __future__ import annotations

import calendar
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.drills import judge as drill_judge
from resilio_hpc.drills.script import counting
from resilio_hpc.drills.stamps import Life, read_lives
from resilio_hpc.report.accounting.causes import US, TimeCause
from resilio_hpc.report.chain.run_report import RunReport, read_report
from resilio_hpc.simulate.account import SimulatedResult
from resilio_hpc.simulate.constants import SourceKind, defaults
from resilio_hpc.simulate.fault_trace import SimulatedFault
from resilio_hpc.simulate.fleets import FaultKind
from resilio_hpc.simulate.own_runs import own_interval_s, own_numbers
from resilio_hpc.simulate.recovering_run import RecoveringRun
from resilio_hpc.simulate.virtual_run import SimulatedSetup

STALL_S = 5.0  # a step that takes longer stood still
EQUAL, UNKNOWN_MOST, SIMULATED = 0.005, 0.01, 0.02  # the bars


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at."""

    what: str
    found: str
    good: bool


def judge(place: Path) -> int:
    """Print what was found in a soak's directory.

    Return 1 where anything was lost or leaked, 2 where goodput differs by more than it may, 0 where neither is.
    """
    console = Console(width=120)
    lives = read_lives([(path.name, path) for path in sorted((place / "stamps").iterdir())])
    report = read_report(place / "run", time.time())
    kept = [*_lost(place, lives), *_leaked(rows(place / "samples.jsonl"))]
    counted = _goodput(place, report, lives)
    table = Table("what", "found", "good")
    for one in (*kept, *counted):
        table.add_row(one.what, one.found, "yes" if one.good else "NO")
    console.print(_faults(place, report))
    console.print(table)
    if not all(one.good for one in kept):
        return 1
    return 0 if all(one.good for one in counted) else 2


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _faults(place: Path, report: RunReport) -> Table:
    strikes = [row for row in rows(place / "faults.jsonl") if row["strike"]]
    failed = [row for row in rows(place / "acts.jsonl") if row["why"]]
    title = f"{len(strikes)} faults, {len(failed)} acts not done, {len(report.recoveries)} recoveries on record"
    table = Table("fault", "times", title=title)
    for name in sorted({row["strike"] for row in strikes}):
        table.add_row(name, str(sum(row["strike"] == name for row in strikes)))
    return table


# -- nothing lost ------------------------------------------------------------------------------------------------------


def _lost(place: Path, lives: Sequence[Life]) -> list[Verdict]:
    events = read_ledger(place / "run" / "ledger")
    ended = [event.fields["verdict"] for event in events if event.kind == "launch_ends"]
    wrong = drill_judge.two_at_once(events, lives)
    try:
        result = json.loads((place / "soak.result").read_text())
        right = result["values"] == [counting.expected(result["steps"])]
        said = f"{result['steps']} steps, {'exact' if right else 'wrong'}"
    except (OSError, ValueError):
        right, said = False, "there is none"
    again = sum(len(life.ends) > 0 for life in lives)
    return [
        Verdict("verdicts of the jobs", ", ".join(ended), ended[-1:] == ["completed"]),
        Verdict("result", said, right),
        Verdict("two rounds at once, steps left out, commits repeated", wrong or "none", not wrong),
        Verdict("lives of all ranks", str(again), True),
    ]


# -- nothing leaked ----------------------------------------------------------------------------------------------------


def _leaked(samples: Sequence[dict[str, Any]]) -> list[Verdict]:
    before, after = _whole(samples, "before"), _whole(samples, "after")
    left = sorted(set(after["shm"]) - set(before["shm"]))
    ours = sorted(role for role, count in after["roles"].items() if count > before["roles"].get(role, 0))
    verdicts = [
        Verdict("processes left", ", ".join(ours) or "none", not ours),
        Verdict("files left in /dev/shm and /tmp of nodes", ", ".join(left[:5]) or "none", not left),
    ]
    for role, (kb, descriptors, hours, count) in sorted(_growth(samples).items()):
        text = f"{kb / 1024:+.1f} MB, {descriptors:+.0f} descriptors in {hours * 60:.0f} min (median of {count})"
        verdicts.append(Verdict(f"{role} that lived longest", text, kb / 1024 < 8 and descriptors < 8))
    during = [sample for sample in samples if sample["when"] == "during" and sample["processes"]]
    parts = [during[: len(during) // 3], during[-len(during) // 3 :]]
    memory = [[{n: b for n, b in one["shm"].items() if n.startswith("dev/shm")} for one in part] for part in parts]
    files = [max(map(len, part), default=0) for part in memory]
    size = [max((sum(one.values()) for one in part), default=0) / 1e6 for part in memory]
    text = f"{files[0]} files, {size[0]:.0f} MB in the first third, {files[1]}, {size[1]:.0f} MB in the last"
    verdicts.append(Verdict("most in a node's /dev/shm", text, files[1] <= files[0] + 8 and size[1] <= size[0] + 8))
    logs = max((len(sample["shm"]) for sample in during), default=0)
    verdicts.append(Verdict("files of a node's ended rounds and others in /tmp, at most", str(logs), True))
    return verdicts


def _whole(samples: Sequence[dict[str, Any]], when: str) -> dict[str, Any]:
    mine = [sample for sample in samples if sample["when"] == when]
    roles: dict[str, int] = defaultdict(int)
    for sample in mine:
        for process in sample["processes"]:
            roles[process["role"]] += 1
    return {"roles": roles, "shm": {f"{sample['node']}:{name}" for sample in mine for name in sample["shm"]}}


def _growth(samples: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float, float, int]]:
    """Return by role the growth of processes that lived for long: kB, descriptors, hours, how many processes."""
    seen: dict[tuple[str, int], list[tuple[float, int, int]]] = defaultdict(list)
    for sample in samples:
        for one in sample["processes"]:
            seen[one["role"], one["pid"]].append((sample["at"], one["kb"], one["fds"]))
    by_role: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for (role, _), points in seen.items():
        points = points[2:]  # what is loaded at first is no leak
        if len(points) >= 8 and role in ROLES:
            first, final = points[: len(points) // 4], points[-(len(points) // 4) :]
            kb, fds = (median(p[i] for p in final) - median(p[i] for p in first) for i in (1, 2))
            by_role[role].append(((points[-1][0] - points[0][0]) / 3600, kb, fds))
    return {
        role: (median(k for _, k, _ in grown), median(f for _, _, f in grown), max(h for h, _, _ in grown), len(grown))
        for role, grown in by_role.items()
    }


ROLES = ("agent", "zygote", "saver", "io", "io_worker", "store", "rank", "replicator", "copies", "disk", "local_saver")


# -- goodput -----------------------------------------------------------------------------------------------------------


def _goodput(place: Path, report: RunReport, lives: Sequence[Life]) -> list[Verdict]:
    jobs_s, wall_s = _job_seconds(place)
    stamped = useful_s(lives) / jobs_s
    reported = report.time.goodput or 0.0
    unknown = report.by_cause[TimeCause.UNKNOWN] / report.time.wall_us
    simulated = [replayed(place, report)]
    ettr = report.time.ettr or 0.0
    apart = abs(reported - stamped)
    found = [
        Verdict("goodput: report, stamps and slurmctld",
                f"{reported:.2%}, {stamped:.2%}: {apart * 100:.2f} points apart", apart <= EQUAL),
        Verdict("jobs' time: report, slurmctld", f"{report.time.jobs_us / US:.0f} s, {jobs_s:.0f} s of {wall_s:.0f} s",
                abs(report.time.jobs_us / US / jobs_s - 1) < 0.01),
        Verdict("unknown", f"{unknown:.2%} of the wall clock", unknown <= UNKNOWN_MOST),
    ]  # fmt: skip
    shares = ", ".join(f"{cause.value} {us / report.time.wall_us:.1%}" for cause, us in report.by_cause.items() if us)
    found.append(Verdict("the report's wall clock", shares, True))
    for one in simulated:
        found.append(
            Verdict("ETTR: report, simulator", f"{ettr:.2%}, {one.ettr:.2%}", abs(one.ettr - ettr) <= SIMULATED)
        )
        shares = ", ".join(f"{cause.value} {us / one.wall_us:.1%}" for cause, us in one.by_cause.items() if us)
        found.append(Verdict("the simulator's wall clock", shares, True))
    return found


def _job_seconds(place: Path) -> tuple[float, float]:
    """Return how long jobs ran, and from the first one's begin to the last one's end, by slurmctld.

    While a job is requeued, its times are those of what is to come: its run ended when that was seen.
    """
    begun: dict[tuple[str, int], float] = {}
    ended: dict[tuple[str, int], float] = {}
    for row in rows(place / "jobs.jsonl"):
        run = row["JobId"], int(row["Restarts"])
        if row["JobState"] == "RUNNING":
            begun[run] = _unix(row["StartTime"])
        elif row["JobState"] not in ("PENDING", "CONFIGURING", "COMPLETING") and run in begun:
            ended[run] = _unix(row["EndTime"])
        before = run[0], run[1] - 1
        if before in begun:
            ended.setdefault(before, row["seen"])
    ran = sum(ended[run] - begun[run] for run in ended)
    return ran, max(ended.values()) - min(begun.values())


def _unix(text: str) -> float:
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))  # machines of the cluster run in UTC
    except ValueError:
        return 0.0


def useful_s(lives: Sequence[Life]) -> float:
    """Return the time of the steps that lasted, each since the step before it in the same life. Pure.

    A step counts in the last life that did it, and not where it stood still (``STALL_S``).
    """
    took: dict[int, float] = {}
    for life in lives:
        ends: dict[int, float] = {}
        for at, step in life.ends:
            ends[step] = max(at, ends.get(step, 0.0))
        for step in list(took):
            if ends and step > min(ends):
                del took[step]  # done again, or yet to be
        for step, at in ends.items():
            if step - 1 in ends:
                seconds = at - ends[step - 1]
                took[step] = seconds if seconds < STALL_S else 0.0
    return sum(took.values())


def replayed(place: Path, report: RunReport) -> SimulatedResult:
    """Return the same faults, at their times, in the goodput simulator, with the run's own measured times."""
    began = report.time.spans[0].begin_us
    faults = []
    for row in rows(place / "faults.jsonl"):
        if row.get("kind"):
            at_us = round(row["at"] * 1e6) - began
            kind = FaultKind(row["kind"])
            back_us = at_us + (round(8e6) if kind is FaultKind.NODE else 0)
            faults.append(SimulatedFault(at_us, kind, (len(faults) % 4,), False, back_us))
    constants = defaults().replaced({"step_s": 0.2, "gb_per_gpu": 1e-6}, SourceKind.GIVEN, "the script")
    setup = SimulatedSetup(
        4, 2, report.time.wall_us / US, min_nodes=2, save_every_s=own_interval_s([report]) or 5.0, replicated=True,
        job_s=1800.0, max_restarts=1000,
    )  # fmt: skip
    return RecoveringRun(setup, own_numbers(constants, [report], setup.gpus), faults).result()
