"""The job that fault drills use: counts in a way that any lost, doubled or torn step would spoil.

Every rank keeps a vector. A step works on a global batch of ``BATCH`` samples, which the ranks share; their weighted
vectors are summed over the world in exact integers and mixed with the step's number. So the final vector is a pure
function of the number of steps (``expected``), however many ranks took part and whenever their number changed, and the
test of a recovery is exact.

With ``--stamps`` every rank also writes down, on its own node, when each step began and ended and that it was alive in
between (``drills.stamps``): the proof that ranks of two rounds never trained at once. With ``--enough`` all end after
the step in which one of them finds that file on its node. Run as a script by resilio-launch; imports torch only then,
and with ``--without-torch`` never.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import threading
import time
from pathlib import Path

MODULUS = 1_000_003
BATCH = 24
ALIVE_EVERY_S = 0.05


def weight(rank: int, world_size: int) -> int:
    """Return what the samples of a rank weigh together: sample i weighs i + 1 and belongs to rank i mod world size."""
    return sum(sample + 1 for sample in range(BATCH) if sample % world_size == rank)


def expected(steps: int) -> int:
    """Return the value that every element must have after ``steps`` steps."""
    value = 1
    for step in range(steps):
        value = (value * weight(0, 1) + step) % MODULUS
    return value


class Digests:
    """What rank 0 holds after each step: lines ``STEP DIGEST``, to be compared with those of another run."""

    def __init__(self, directory: Path | None, rank: int, life: int) -> None:
        self._fd = -1
        if directory is not None and rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(directory / f"{life:016x}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, step: int, data: bytes) -> None:
        """Add a line."""
        if self._fd >= 0:
            os.write(self._fd, f"{step} {hashlib.sha256(data).hexdigest()[:32]}\n".encode())


class Stamps:
    """One rank's stamps of one round: lines ``KIND STEP UNIX_SECONDS``, each written at once; none without a place."""

    def __init__(self, directory: Path | None, rank: int, life: int) -> None:
        self._fd = -1
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        epoch, number = os.environ.get("RESILIO_EPOCH", "0"), os.environ.get("RESILIO_ROUND", "0")
        path = directory / f"{life:016x}.{epoch}.{number}.{rank}.{os.getpid()}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        threading.Thread(target=self._live, daemon=True).start()

    def write(self, kind: str, step: int) -> None:
        """Stamp: ``b`` begins a step, ``e`` has ended it, ``a`` is alive."""
        if self._fd >= 0:
            os.write(self._fd, f"{kind} {step} {time.time():.6f}\n".encode())

    def _live(self) -> None:
        while True:
            self.write("a", -1)
            time.sleep(ALIVE_EVERY_S)


def main() -> None:
    """Train, with the mistakes that the arguments ask for, in the first round only."""
    import numpy as np

    from resilio_hpc import ckpt, train
    from resilio_hpc.drills.script import corrupting, hanging, raising, slowing
    from resilio_hpc.drills.script.worlds import world_of

    options = _options()
    if (os.environ.get("RESILIO_ROUND"), os.environ.get("RANK")) == ("0", "1"):
        hanging.before_start(options.hang_before_start)
    run = train.attach()
    world = world_of(run.rank, run.world_size, not options.without_torch)
    life = world.agree(secrets.randbits(62))
    stamps, digests = Stamps(options.stamps, run.rank, life), Digests(options.digests, run.rank, life)
    state = {"vector": world.ones(options.elements)}
    if options.flip_at >= 0:
        state["table"] = table = corrupting.table()
    checkpointer = ckpt.Checkpointer(layout=ckpt.REPLICATED)
    restored = checkpointer.restore(state)
    vector = np.asarray(state["vector"])
    start = restored[0] if restored else 0
    done = start
    first_life = run.round == 0 and run.rank == 1
    hangs = options.hang if run.round == 0 and (run.rank == 1 or options.hang in hanging.TOGETHER) else ""
    batches = slowing.batches(options.loader) if options.loader else None
    mine = weight(run.rank, run.world_size)
    for step in run.steps(start, options.steps, save=checkpointer.saver(state), every=options.every):
        if first_life and step == options.raise_at:
            raise RuntimeError(f"planted in step {step}")
        if step == options.flip_at and first_life:
            corrupting.flip(table)
        if options.fail and run.rank == 1 and step == options.fail_at and (first_life or options.fail == "bug"):
            raising.fail(options.fail)
        if first_life and step == options.exit_at:
            os._exit(0)
        if hangs and step == options.hang_at:
            hanging.hang(hangs, run.rank)
        if options.reads and run.rank == 1 and run.run_dir is not None:
            hanging.read(run.run_dir / "launch.json")
        if batches is not None:
            next(batches)
        slowing.work(options.work_seconds)
        stamps.write("b", step)
        ends = int(options.enough is not None and options.enough.exists())
        total = world.sum(np.append(vector * mine, ends))
        vector[:] = (total[:-1] + step) % MODULUS
        stamps.write("e", step)
        digests.write(step, vector.tobytes())
        time.sleep(options.step_seconds)
        done = step + 1
        if total[-1]:
            run.step_done(done)
            run.save_last(done, lambda done: checkpointer.save(done, state))
            run.finish(done)
            break
    if run.rank == 0:
        values = sorted(set(vector.tolist()))
        options.result.write_text(json.dumps({"values": values, "world_size": run.world_size, "steps": done}))
    world.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.03)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, help="a directory on the node's own disk")
    parser.add_argument("--digests", type=Path, help="a directory for what rank 0 holds after each step")
    parser.add_argument("--enough", type=Path, help="end when this file is there, on the node's own disk")
    parser.add_argument("--without-torch", action="store_true", help="sum over plain sockets (worlds.py)")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--flip-at", type=int, default=-1, help="a bit of a parameter, on rank 1 (needs torch)")
    parser.add_argument("--exit-at", type=int, default=-1)
    parser.add_argument("--hang", default="", metavar="WAY", help="hang so in the first round (hanging.py)")
    parser.add_argument("--hang-at", type=int, default=60)
    parser.add_argument("--hang-before-start", default="", metavar="WAY", help="rank 1 does, before it says a word")
    parser.add_argument("--fail", default="", metavar="WAY", help="fail so in the first round (raising.py)")
    parser.add_argument("--fail-at", type=int, default=60)
    parser.add_argument("--work-seconds", type=float, default=0.0, help="of processor time in each step")
    parser.add_argument("--elements", type=int, default=1000, help="of the vector that is summed")
    parser.add_argument("--loader", type=Path, help="load each batch with a process; slowly while this file is there")
    parser.add_argument("--reads", action="store_true", help="rank 1 reads a file of the run directory in each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
