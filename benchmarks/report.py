"""`resilio report`: seconds and bytes of the page of long runs, and its goodput beside raw stamps of a real run.

python benchmarks/report.py [--nodes 1,64,1000] [--days 30] [--faults 1200] [--repeats 3] [--controller-lines]
python benchmarks/report.py --soak 180 [--mtbf 20]

Long runs are drawn (`tests/support/report/long_runs`): jobs of 48 hours, saves every ten minutes, killed and failed
ranks, hangs, lost nodes with spares. Each node writes its lines of each round, as agents do; with --controller-lines
only the controllers and launchers do. Each page is made by the command, in a process of its own.

The soak launches two ranks, kills one again and again, at random times with a mean of --mtbf seconds, and lets every
rank stamp each step. A step counts when it was done for the last time; its time is that since the rank's step before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.report.accounting.causes import US, totals
from resilio_hpc.report.chain.run_report import read_report
from tests.support.report.long_runs import LongRun, write_run

RESILIO = (sys.executable, "-m", "resilio_hpc.cli.main")
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
run = train.attach()
dist.init_process_group("gloo")
state = {"weights": torch.zeros(1000)}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
restored = checkpoint.restore(state)
until = float(sys.argv[1])
with open(f"stamps.{run.rank}", "a", buffering=1) as stamps:
    print("life", file=stamps)
    for step in run.steps(restored[0] if restored else 0, 1_000_000, save=checkpoint.saver(state), every=50):
        time.sleep(0.02)
        dist.all_reduce(state["weights"])
        print(step, time.time(), file=stamps)
        if run.rank == 0 and time.time() > until:
            open("over", "w").close()
"""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,64,1000")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--faults", type=int, default=1200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--controller-lines", action="store_true", help="without the lines of each node")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="a real run instead")
    parser.add_argument("--mtbf", type=float, default=20.0, metavar="SECONDS")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="resilio-report-"))
    try:
        if options.soak:
            return _soak(folder, options.soak, options.mtbf)
        print("| nodes | faults | ledger | page made in, s (least to most) | page |\n|---|---|---|---|---|")
        for nodes in map(int, options.nodes.split(",")):
            run = LongRun(nodes, options.days, options.faults)
            path = write_run(folder / f"run{nodes}", run, node_lines=not options.controller_lines)
            _row(path, nodes, options.repeats)
            shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)
    return 0


def _row(path: Path, nodes: int, repeats: int) -> None:
    page = path / "page.html"
    times = []
    for _ in range(repeats):
        began = time.monotonic()
        subprocess.run([*RESILIO, "report", str(path), "--html", str(page)], check=True, stdout=subprocess.DEVNULL)
        times.append(time.monotonic() - began)
    ledger = sum(file.stat().st_size for file in (path / "ledger").iterdir())
    faults = len(json.loads(subprocess.check_output([*RESILIO, "report", str(path), "--json"]))["recoveries"])
    spread = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
    print(f"| {nodes} | {faults} | {ledger / 1e6:.0f} MB | {spread} | {page.stat().st_size / 1e6:.2f} MB |", flush=True)


# -- a real run --------------------------------------------------------------------------------------------------------


def _soak(folder: Path, length_s: float, mtbf_s: float) -> int:
    (folder / "train.py").write_text(SCRIPT)
    until = time.time() + length_s
    launch = subprocess.Popen(
        [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--nproc-per-node", "2", "--max-restarts", "1000",
         "--run-dir", "run", "train.py", str(until)],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    kills = 0
    random_ = random.Random(1)
    while not (folder / "over").exists() and launch.poll() is None:
        time.sleep(random_.expovariate(1 / mtbf_s))
        ranks = [event for event in read_ledger(folder / "run" / "ledger") if event.kind == "ranks"]
        if ranks and not (folder / "over").exists():
            try:
                os.kill(random_.choice(list(ranks[-1].fields["pids"].values())), signal.SIGKILL)
                kills += 1
            except ProcessLookupError:  # it has just been restarted
                pass
    launch.send_signal(signal.SIGTERM)
    launch.wait(60)
    _compare(folder, kills)
    return 0


def _compare(folder: Path, kills: int) -> None:
    report = read_report(folder / "run", time.time())
    total_s = report.time.jobs_us / US
    stamped = _useful(folder) / total_s
    assert report.time.goodput is not None
    unknown = totals(report.time.spans)
    shares = ", ".join(f"{cause.value} {us / report.time.wall_us:.2%}" for cause, us in unknown.items() if us)
    print(f"{kills} kills in {total_s:.0f} s, {len(report.recoveries)} recoveries on record")
    print(f"goodput: {report.time.goodput:.2%} by the report, {stamped:.2%} by the stamps, "
          f"{abs(report.time.goodput - stamped) * 100:.2f} points apart")  # fmt: skip
    print(f"time by cause: {shares}")


def _useful(folder: Path) -> float:
    """Return the time of the steps that lasted. Ranks wait for each other in every step, so one rank's stamps do."""
    took: dict[int, float] = {}
    before: float | None = None
    for line in (folder / "stamps.0").read_text().splitlines():
        step, _, at = line.partition(" ")
        if at and before is not None:
            took[int(step)] = float(at) - before  # of the last time that it was done
        before = float(at) if at else None
    return sum(took.values())


if __name__ == "__main__":
    sys.exit(main())
