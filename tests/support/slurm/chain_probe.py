"""A launch reduced to its chain, for tests of what real Slurm makes of it: no agents, no torch.

``python chain_probe.py RUN_DIR``, in a batch script: judges, takes its turn, submits its successor; says what it did in
RUN_DIR/probe.PART; then waits for a verdict in RUN_DIR/end.PART, closes its chain as the supervisor does, and ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.allocation.placements import site_of
from resilio_hpc.launch.chain.chaining import Chain
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.rundir import chain_order, run_directory
from resilio_hpc.slurm.client.allocation import detect


def main(run_path: Path) -> None:
    options = LaunchOptions("true", "command", str(run_path), chain=True, heartbeat_timeout_s=1.0)
    site = site_of(options, detect(os.environ))
    run_directory.open_run(run_path)
    chain = Chain(options, site, run_path, Ledger(run_path / "ledger", f"{site.key}-probe"))
    over = chain.judge_predecessor()
    if over is None:
        chain.begin()
    said = {
        "over": over,
        "successor": chain.successor.job,
        "late": chain.successor.late,
        "argv": sys.argv[2:],
        "nodes": site.nodes,
    }
    write_atomic(run_path / f"probe.{site.key}", json.dumps(said).encode())
    if over is not None:
        return
    end = run_path / f"end.{site.key}"
    while not end.exists() and not chain.heed(chain_order.read(run_path)):
        chain.successor.tick(time.time(), None)
        time.sleep(0.05)
    verdict = {"verdict": "cancelled" if chain.stop_ordered else end.read_text().strip(), "exit_code": 75}
    run_directory.write_verdict(run_path, site.key, verdict)
    chain.close(verdict)
    chain.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
