#!/usr/bin/env python3
"""Every fault, several times, on a real Slurm dev cluster: does each run come over it, how soon, with what loss?

    python benchmarks/faults.py --json faults.json --repeats 5
    python benchmarks/faults.py --quick --only "rank SIGKILL"

Needs root and Slurm (see docs/devcluster.md). A run passes when its verdict is right, the ledger proves that no two
rounds had ranks on a node at once, and the number that all ranks computed together is exactly right. Recovery is from
the fault itself to the first step that all ranks completed after it; detection is part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from resilio_hpc.demo.drill import DRILLS, DrillResult, DrillRun
from resilio_hpc.demo.stage import binds
from resilio_hpc.slurm.devcluster import DevCluster


def main() -> int:
    """Exit code 0 when every run passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--quick", action="store_true", help="each fault once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help="only the faults whose names hold this text")
    parser.add_argument("--slurm", default="22.05", choices=("22.05", "24.11", "26.05"))
    options = parser.parse_args()
    console = Console()
    drills = [drill for drill in DRILLS if not options.only or options.only in drill.name]
    results: list[DrillResult] = []
    with DevCluster.start(f"faults{os.getpid()}", nodes=4, slurm=options.slurm, binds=binds()) as cluster:
        version = cluster.slurm_version
        for repeat in range(1 if options.quick else options.repeats):
            for number, drill in enumerate(drills):
                drill_run = DrillRun(cluster, drill, f"drill-{repeat}-{number}")
                result = drill_run.run()
                results.append(result)
                seconds = f"{result.recovery_s:.2f} s" if result.recovery_s is not None else "-"
                console.print(f"{drill.name}: {'passed' if result.passed else 'FAILED: ' + result.why}, {seconds}")
                if drill_run.broken:
                    cluster.boot(drill_run.broken)
                cluster.wait_for_idle(timeout_s=60.0)
    console.print(table(results, version))
    if options.json:
        options.json.write_text(
            json.dumps({"slurm_version": version, "results": [asdict(result) for result in results]}, indent=1)
        )
    return 0 if all(result.passed for result in results) else 1


def table(results: list[DrillResult], version: str) -> Table:
    """One row a fault."""
    made = Table(title=f"Faults on Slurm {version}")
    for column in ("fault", "passed", "recovery, median", "worst", "of which detection", "steps done again, worst"):
        made.add_column(column, justify="left" if column == "fault" else "right")
    for name in dict.fromkeys(result.name for result in results):
        runs = [result for result in results if result.name == name]
        recovery = [result.recovery_s for result in runs if result.recovery_s is not None]
        detection = [result.detection_s for result in runs if result.detection_s is not None]
        lost = [result.lost_steps for result in runs if result.lost_steps is not None]
        made.add_row(
            name,
            f"{sum(result.passed for result in runs)}/{len(runs)}",
            f"{statistics.median(recovery):.2f} s" if recovery else "",
            f"{max(recovery):.2f} s" if recovery else "",
            f"{statistics.median(detection):.2f} s" if detection else "",
            str(max(lost)) if lost else "",
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
