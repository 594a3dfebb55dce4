"""How long ranks that are started again take to restore from memory: under the real launcher, killed once per life.

    python benchmarks/checkpoint_restart.py [--megabytes 1060] [--lives 16] [--json FILE]

``early``: the Checkpointer is made before the model, so that the arena is mapped while the model is built; ``late``:
right before the restore, which then reads the arena. In turn. ``limit``: one copy of as many bytes, in memory that is
there, with as many threads, in the same process. Every block is verified; every tensor is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import Series, print_table, write_json

TITLE = "Restore from memory after a restart"
TENSORS = 240
TIMEOUT_S = 600.0


def build(size: int, value: float) -> dict[str, Any]:
    """Return a model's tensors, initialised as they would be."""
    import torch

    return {f"layer.{number}": torch.full((size // TENSORS // 4,), value) for number in range(TENSORS)}


def copy_s(source: dict[str, Any], target: dict[str, Any]) -> float:
    from resilio_hpc.ckpt.snapshot.snapshot import copy_threads

    with ThreadPoolExecutor(copy_threads(1)) as pool:
        began = time.perf_counter()
        list(pool.map(lambda name: target[name].copy_(source[name]), source))
        return time.perf_counter() - began


def life(size: int, lives: int, results: Path) -> None:
    """One life of the rank: restore, save, and be killed."""
    import torch

    from resilio_hpc import train
    from resilio_hpc.ckpt import Checkpointer

    torch.set_num_threads(1)
    run = train.attach()
    number, early = run.restart_count, run.restart_count % 2 == 1
    checkpoint = Checkpointer(run.checkpoint_dir) if early else None
    state = build(size, -1.0)
    build(size, 0.0)  # what else a start has to do
    if checkpoint is None:
        checkpoint = Checkpointer(run.checkpoint_dir)
    began = time.perf_counter()
    found = checkpoint.restore(state)
    seconds = time.perf_counter() - began
    if number:
        assert found is not None and all(bool((tensor == float(number)).all()) for tensor in state.values())
        other = build(size, 0.0)
        said = {"early": early, "seconds": seconds, "limit": min(copy_s(state, other) for _ in range(3))}
        with results.open("a") as file:
            file.write(json.dumps(said) + "\n")
    if number == lives:
        run.finish(number)
        return
    for tensor in state.values():
        tensor.fill_(number + 1.0)
    checkpoint.save(number + 1, state).wait("committed", 120)
    run.step_done(number + 1)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def measure(options: argparse.Namespace, directory: Path) -> list[Series]:
    results = directory / "results"
    launch = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", str(directory / "run")]
    launch += ["--nproc-per-node", "1", "--max-restarts", str(options.lives), __file__, "--life", str(results)]
    launch += ["--megabytes", str(options.megabytes), "--lives", str(options.lives)]
    done = subprocess.run(launch, timeout=TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    settings = f"{options.megabytes} MB"
    return [
        Series("limit", settings, [line["limit"] for line in lines]),
        *(
            Series(name, settings, [line["seconds"] for line in lines if line["early"] == early])
            for name, early in (("early", True), ("late", False))
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1060)
    parser.add_argument("--lives", type=int, default=16, metavar="N", help="restores to measure (16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--life", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.life is not None:
        life(options.megabytes * 10**6, options.lives, options.life)
        return
    with tempfile.TemporaryDirectory(prefix="resilio-restart-") as directory:
        found = measure(options, Path(directory))
    print_table(TITLE, found)
    if options.json:
        write_json(options.json, TITLE, found)


if __name__ == "__main__":
    main()
