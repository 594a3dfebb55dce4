#!/usr/bin/env python3
"""False alarms: half an hour of a noisy run on the dev cluster, in which nothing hangs.

    python benchmarks/hang_noise.py --minutes 30 --load 15 --json noise.json

Steps of very different length with a gloo collective each, saves, evaluations of 5 to 20 s in a section (rank 0 works,
the others wait for it), evaluations outside of one whose collectives go on, a node that joins and leaves again, and as
many processes beside it as the load asks for: busy ones, one that takes memory, one that writes. What counts: hangs
that were acted on (each restarts a healthy run), and times that the run was called stalled. Needs root and Slurm.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from machine_load import loaded
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.devtools.devcluster import DevCluster

NAME = "noise"
JOIN_AT, LEAVE_AT = 0.35, 0.7  # of the run
ENDS_S = 300.0


def train(until: float) -> None:
    """One rank, until then (Unix seconds)."""
    import torch
    import torch.distributed as dist

    from resilio_hpc import ckpt, train

    run = train.attach()
    dist.init_process_group("gloo")
    state = {"x": torch.zeros(100_000)}
    checkpointer = ckpt.Checkpointer(layout=ckpt.REPLICATED)
    restored = checkpointer.restore(state)
    draw = random.Random(run.rank)  # what ranks do alone
    same = random.Random(run.round)  # what they do together
    flag = torch.zeros(1)
    for step in run.steps(restored[0] if restored else 0, 10_000_000,
                          save=checkpointer.saver(state), every=20):  # fmt: skip
        time.sleep(min(0.04 * draw.lognormvariate(0.0, 0.7) * (10 if draw.random() < 0.01 else 1), 1.0))
        state["x"] += 1
        flag[0] = float(time.time() > until)
        dist.all_reduce(flag)
        if flag[0] > 0:
            run.step_done(step + 1)
            run.save_last(step + 1, lambda done: checkpointer.save(done, state))
            run.finish(step + 1)
            break
        if step % 200 == 199:
            with run.section("evaluation"):
                lasts_s = same.uniform(5, 20)
                time.sleep(lasts_s if run.rank == 0 else 0.1)
                dist.barrier()
        elif step % 150 == 149:
            for _ in range(same.randint(5, 10)):
                time.sleep(draw.uniform(0.2, 1.2))
                dist.barrier()
    dist.destroy_process_group()


def script(nodes: int, arguments: str) -> str:
    launcher = Path(sys.executable).with_name("resilio-launch")
    return (
        f"#!/bin/bash\n#SBATCH --nodes={nodes} --no-kill --exclusive --time=120\n"
        f"#SBATCH --output=/shared/{NAME}.txt --open-mode=append\nexec {launcher} {arguments}\n"
    )


def watch(cluster: DevCluster, minutes: float) -> dict[str, object]:
    """Submit the run and a job that joins it, end that one again, and return what the ledger says."""
    lasts_s = minutes * 60
    began = time.time()
    run = cluster.shared / NAME
    cluster.submit(script(2, f"--nnodes=1:3 --nproc-per-node=2 --run-dir=/shared/{NAME} {__file__} --until "
                             f"{began + lasts_s}"))  # fmt: skip
    joiner = 0
    while time.time() < began + lasts_s + ENDS_S and not (run / "verdict.json").exists():
        time.sleep(5)
        share = (time.time() - began) / lasts_s
        if not joiner and share > JOIN_AT:
            joiner = cluster.submit(script(1, f"--join=/shared/{NAME}"))
        elif joiner > 0 and share > LEAVE_AT:
            cluster.run("ctl", ["scancel", str(joiner)])
            joiner = -1
    events = list(read_ledger(run / "ledger"))
    kinds = Counter(event.kind for event in events)
    hangs = [event.fields for event in events if event.kind == "hang"]
    verdict = json.loads((run / "verdict.json").read_text()) if (run / "verdict.json").exists() else {}
    return {
        "minutes": round((time.time() - began) / 60, 1), "verdict": verdict.get("verdict"),
        "acted": sum(bool(hang["acted"]) for hang in hangs), "hangs_told": len(hangs),
        "stalled": [event.fields["silent_s"] for event in events if event.kind == "stalled"],
        "rounds": kinds["round"], "commits": kinds["committed"], "rank_failed": kinds["rank_failed"],
        "world_sizes": [event.fields["world_size"] for event in events if event.kind == "round"],
        "hangs": [{key: hang[key] for key in ("kind", "ranks", "evidence", "acted")} for hang in hangs],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--load",
        type=int,
        default=15,
        help="how many processes beside it (15)",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until is not None:
        return train(options.until)
    name = f"noise-{time.time_ns() % 10**6}"
    with (
        loaded(Path(tempfile.gettempdir()), max(0, options.load - 2)),
        devcluster.start(name, nodes=3, binds=binds(), timeout_s=300.0) as cluster,
    ):
        result = watch(cluster, options.minutes)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
