"""A rank that saves as fast as it can, killed at a random instant, again and again: run by test_arena.

argv: arena directory, rounds. Prints ``rounds whole_after_kill`` or exits with what was wrong.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten


def state_of(step: int) -> dict[str, object]:
    """Sizes change with the step, so that arenas grow under the killer's hand too."""
    size = 1000 + (step % 7) * 20_000
    return {"a": np.full(size, step, dtype=np.int64), "b": [np.full(3, -step), step], "c": np.full((200, 50), step)}


def save_for_ever(directory: Path, first: int, told: int) -> None:
    pair = ArenaPair(directory, Owner(0, 0, 1, 1, 0, "own", "run"), directory / "spill")
    with ThreadPoolExecutor(2) as pool:
        for step in range(first, first + 100_000):
            Snapshot(pair, step, flatten(state_of(step)), pool).finish()
            os.write(told, step.to_bytes(8, "little"))


def check(directory: Path, told_step: int) -> int:
    """The newest whole snapshot, which must be right and no older than the last that the rank knew to be whole."""
    held = arena.scan(directory)
    if told_step >= 0 and not held:
        sys.exit(f"step {told_step} was whole and nothing is left")
    for snapshot_held in held:
        with ArenaSource(snapshot_held.path) as source, ThreadPoolExecutor(1) as pool:
            found = restore(source, None, pool)
        expected = state_of(snapshot_held.step)
        for name in ("a", "c"):
            if not np.array_equal(found[name], expected[name]):  # type: ignore[arg-type]
                sys.exit(f"{name} of step {snapshot_held.step} is wrong")
        if found["b"][1] != snapshot_held.step:
            sys.exit("the tree is of another step")
    newest = held[-1].step if held else -1
    if newest < told_step:
        sys.exit(f"step {told_step} was whole, the newest now is {newest}")
    return newest


def main() -> None:
    directory, rounds = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(5)
    step = 0
    for _ in range(rounds):
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(told)
            save_for_ever(directory, step + 1, tell)
            os._exit(0)
        os.close(tell)
        time.sleep(rng.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(told, "rb") as pipe:
            data = pipe.read()
        known = int.from_bytes(data[-8:], "little") if data else step
        step = max(check(directory, known if known else -1), step)
    print(rounds, step)


if __name__ == "__main__":
    main()
