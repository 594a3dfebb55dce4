"""The goodput simulator beside what is known: published figures, real runs of this machine, and the real controller.

    python benchmarks/simulated_goodput.py --published             # seconds
    python benchmarks/simulated_goodput.py --real --run-s 120      # two real runs: the second predicted from the first
    python benchmarks/simulated_goodput.py --speed

A real run is the counting script on two nodes of two ranks on this machine. Ranks, drawn by chance, are killed at times
drawn by chance; ``resilio report`` accounts for it. Each run's faults are then simulated, at their times, with what the
*other* run has measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.drills.script import counting
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.report.chain.run_report import RunReport, read_report
from resilio_hpc.simulate import plan_study
from resilio_hpc.simulate.account import SimulatedResult
from resilio_hpc.simulate.constants import SourceKind, defaults
from resilio_hpc.simulate.fault_trace import SimulatedFault
from resilio_hpc.simulate.fleets import FaultKind
from resilio_hpc.simulate.own_runs import own_interval_s, own_numbers
from resilio_hpc.simulate.plan_study import StudyRequest
from resilio_hpc.simulate.recovering_run import RecoveringRun
from resilio_hpc.simulate.study import Study
from resilio_hpc.simulate.study_text import ettr
from resilio_hpc.simulate.virtual_run import SimulatedSetup

SCRIPT = Path(counting.__file__)
CLOSE = 0.05  # a figure within so much of the published one is reproduced
LIMIT_S = 60.0


# -- published ---------------------------------------------------------------------------------------------------------


def simulated(**asked: object) -> tuple[Study, float]:
    """Return a study of one case, and its median ETTR."""
    found = plan_study.run(StudyRequest(**asked), [])  # type: ignore[arg-type]
    return found, found.rows[0].middle(ettr)


def expected_ettr(nodes: int, per_node_day: float, restart_s: float, every_s: float) -> float:
    """Return Meta's own estimate (arXiv 2410.21680), with nothing for writes: 1 - N r (u0 + dt / 2)."""
    return 1 - nodes * per_node_day / 86_400 * (restart_s + every_s / 2)


def published() -> Table:
    """Return what was published beside what the simulator says of it."""
    table = Table("what", "published", "simulated", "within 5 points", "with what that was not published")
    no_jobs = {"job_s": None, "repeats": 5, "spares": 0}
    for gpus in (2048, 4096, 8192, 16384):
        found, one = simulated(
            fleet="rsc1", gpus=gpus, days=30.0, policies=("shared-fs",), given={"program_start_s": 0.0,
            "communicators_s_per_gpu": 0.0, "store_gb_s": 1e6, "gb_per_gpu": 0.0}, **no_jobs
        )  # fmt: skip
        said = expected_ettr(gpus // 8, 6.5e-3, 300.0, 3600.0)
        table.add_row(f"RSC-1, {gpus:,} GPUs, an hour between saves, 5 min to restart: its estimate", f"{said:.1%}",
                      f"{one:.1%}", _near(said, one), "nothing")  # fmt: skip
    both = [simulated(fleet="rsc1", gpus=gpus, days=30.0, policies=("shared-fs",), **no_jobs)[1]
            for gpus in (2048, 4096)]  # fmt: skip
    table.add_row("RSC-1, runs of 2,048 to 4,096 GPUs, about", "90 %", f"{median(both):.1%}", _near(0.9, median(both)),
                  "queue times; kinds of faults")  # fmt: skip
    for gpus, hours in ((1024, 7.9), (16384, 1.8), (131072, 0.23)):
        fleet = "rsc1-1024" if gpus == 1024 else "rsc1"
        found, _ = simulated(fleet=fleet, gpus=gpus, days=3.0, policies=("flash-recovery",), **no_jobs)
        ran = sum(one.wall_us - one.by_cause[TimeCause.QUEUE] for one in found.rows[0].results) / 3.6e9
        mttf = ran / max(1.0, sum(one.counts.get("faults", 0) for one in found.rows[0].results))
        table.add_row(f"RSC-1, mean time to failure at {gpus:,} GPUs", f"{hours} h", f"{mttf:.2g} h",
                      "yes" if abs(mttf / hours - 1) < 0.15 else "no", "its rate is an input")  # fmt: skip
    for every_s in (3600.0, 600.0):
        policy = "shared-fs" if every_s == 3600 else "in-memory"
        _, one = simulated(fleet="llama3", policies=(policy,), save_every_s=every_s, job_s=None, repeats=5, spares=64)
        table.add_row(f"Llama 3, 16,384 GPUs, 54 days; {policy}, a save every {every_s / 60:.0f} min", "> 90 %",
                      f"{one:.1%}", "yes" if one > 0.9 else "no", "its interval and restart time")  # fmt: skip
    _, one = simulated(fleet="rsc1", gpus=9600, days=90.0, policies=("hot-spares",), job_s=None, repeats=3, spares=24)
    table.add_row("ByteRobust, 9,600 GPUs, 90 days; hot-spares", "97 %", f"{one:.1%}", _near(0.97, one),
                  "its fault rate (RSC-1's), restart time")  # fmt: skip
    found, one = simulated(fleet="ant", policies=("shared-fs",), days=7.0, job_s=None, repeats=5, spares=0,
                           gpus=1000, save_every_s=3600.0)  # fmt: skip
    table.add_row("DLRover's users, 1,000 GPUs, before: looked at every 10 min", "32.9 %", f"{one:.1%}",
                  _near(0.329, one), "who waits how long; all faults but GPUs'")  # fmt: skip
    _, one = simulated(fleet="ant", policies=("in-memory",), days=7.0, job_s=None, repeats=5, spares=8, gpus=1000)
    table.add_row("DLRover's users, 1,000 GPUs, after", "58.9 %", f"{one:.1%}", _near(0.589, one), "the same")
    table.add_row(
        "DLRover, GLM-65B, after", "95 %", f"{one:.1%}", _near(0.95, one), "its fault rate (the same fleet's)"
    )
    return table


def _near(said: float, found: float) -> str:
    return "yes" if abs(said - found) <= CLOSE else "no"


# -- real runs ---------------------------------------------------------------------------------------------------------


def real_run(folder: Path, run_s: float, every_s: float, seed: int) -> RunReport:
    """Let a run be struck for so long; return its report."""
    if folder.exists():
        return read_report(folder / "run", time.time())
    folder.mkdir(parents=True)
    enough, draw = folder / "enough", Random(seed)
    argv = [
        sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-environment-check",
        "--no-torch", "--nproc-per-node", "2", "--max-restarts", "1000", str(SCRIPT), "--without-torch",
        "--steps", "1000000", "--enough", str(enough), "--step-seconds", "0.1", "--every", "50",
        "--result", str(folder / "result.json"),
    ]  # fmt: skip
    environment = {**os.environ, "RESILIO_LOCAL_NODES": "2", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen(argv, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _until(lambda: bool(_events(folder, "first_step")), folder)
        end = time.monotonic() + run_s
        while time.monotonic() < end:
            time.sleep(draw.expovariate(1 / every_s))
            pids = _ranks(folder)
            if pids:
                _kill(draw.choice(pids))
        enough.touch()
        run.wait(LIMIT_S)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(LIMIT_S)
    return read_report(folder / "run", time.time())


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended meanwhile: then this is no fault


def _events(folder: Path, kind: str) -> list[Event]:
    ledger = folder / "run" / "ledger"
    return [event for event in read_ledger(ledger) if event.kind == kind] if ledger.is_dir() else []


def _ranks(folder: Path) -> list[int]:
    found = _events(folder, "ranks")
    newest = max((event.fields["round"] for event in found), default=-1)
    return [int(pid) for one in found if one.fields["round"] == newest for pid in one.fields["pids"].values()]


def _until(reached: object, folder: Path) -> None:
    assert callable(reached)
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        if time.monotonic() > deadline:
            raise RuntimeError((folder / "log").read_text()[-2000:])
        time.sleep(0.05)


def replayed(known: RunReport, struck: RunReport) -> SimulatedResult:
    """Return one run's faults, at their times, simulated with the times that another run has measured."""
    began = struck.time.spans[0].begin_us
    faults = [
        SimulatedFault(round(one.fault.time * 1e6) - began, FaultKind.PROCESS, (number % 2,), False, 0)
        for number, one in enumerate(struck.recoveries)
    ]  # fmt: skip
    constants = defaults().replaced({"step_s": 0.1, "gb_per_gpu": 1e-6}, SourceKind.GIVEN, "the script")
    setup = SimulatedSetup(
        2, 2, struck.time.wall_us / 1e6, save_every_s=own_interval_s([known]) or 5.0, replicated=True,
        max_restarts=1000,
    )  # fmt: skip
    return RecoveringRun(setup, own_numbers(constants, [known], setup.gpus), faults).result()


def real(run_s: float, every_s: float, kept: Path | None) -> Table:
    """Return a real run beside its prediction from another one."""
    with tempfile.TemporaryDirectory() as place:
        reports = [real_run((kept or Path(place)) / str(seed), run_s, every_s, seed) for seed in (1, 2)]
    table = Table("run", "faults", "ETTR", "again", "detect", "recover", "load", "start")
    for number, one in enumerate(reports, 1):
        shares = [one.by_cause[cause] / one.time.wall_us for cause in _SHOWN]
        table.add_row(f"real run {number}", str(len(one.recoveries)), f"{one.time.ettr or 0:.1%}",
                      *(f"{share:.2%}" for share in shares))  # fmt: skip
    for known, predicted in ((0, 1), (1, 0)):
        one = replayed(reports[known], reports[predicted])
        shares = [one.by_cause[cause] / one.wall_us for cause in _SHOWN]
        table.add_row(f"run {predicted + 1}, times of run {known + 1}", str(one.counts.get("faults", 0)),
                      f"{one.ettr:.1%}", *(f"{share:.2%}" for share in shares))  # fmt: skip
    return table


_SHOWN = (TimeCause.REPEATED, TimeCause.DETECT, TimeCause.RECOVER, TimeCause.LOAD, TimeCause.START)


# -- speed -------------------------------------------------------------------------------------------------------------


def speed() -> Table:
    """Return how long simulations take."""
    table = Table("GPUs", "days", "faults", "seconds a run", "ETTR")
    for gpus, days in ((16, 54.0), (1024, 54.0), (16384, 54.0), (100_000, 30.0)):
        found, one = simulated(gpus=gpus, days=days, policies=("resilio",), repeats=3, max_restarts=30,
                               save_every_s=60.0, partner_copies=True, evict_devices=True)  # fmt: skip
        row = found.rows[0]
        table.add_row(f"{gpus:,}", f"{days:g}", f"{row.count('faults'):,.0f}", f"{row.took_s / 3:.2f}", f"{one:.1%}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true", help="beside published figures")
    parser.add_argument("--real", action="store_true", help="beside real runs")
    parser.add_argument("--run-s", type=float, default=90.0, help="seconds of a real run (90)")
    parser.add_argument("--every-s", type=float, default=5.0, help="mean seconds between its faults (5)")
    parser.add_argument("--speed", action="store_true", help="how long it takes")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where real runs stay; those that are there are read")
    options = parser.parse_args()
    beside = (options.real, lambda: real(options.run_s, options.every_s, options.keep))
    for wanted, make in ((options.published, published), beside, (options.speed, speed)):
        if wanted:
            Console(width=140).print(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
