"""The program of the loopback recovery: it counts its steps in an array, and one of its ranks kills itself once.

It imports no torch. Run by ``resilio-launch -m resilio_hpc.doctor.loopback_program``.
"""

from __future__ import annotations

import os
import signal
import time

STEPS, EVERY, DIES_BEFORE, DIES = 6, 3, 4, 1
"""Rank ``DIES`` kills itself before step ``DIES_BEFORE``, in its first life."""
_STEP_S = 0.05


def main() -> None:
    """Count to ``STEPS``, with a save after every ``EVERY``; exit with 1 where a restore brought another number."""
    import numpy

    from resilio_hpc import train
    from resilio_hpc.ckpt import Checkpointer, SaveHandle

    run = train.attach()
    checkpoint = Checkpointer(run.checkpoint_dir)
    counted = numpy.zeros(1 << 16, numpy.int64)
    restored = checkpoint.restore({"counted": counted})
    start = restored[0] if restored else 0
    if not (counted == start).all():
        raise SystemExit(f"step {start} was restored, and the array says {counted[0]}")

    def save(done: int) -> SaveHandle:
        return checkpoint.save(done, {"counted": counted})

    for step in run.steps(start, STEPS, save, every=EVERY):
        if (run.restart_count, run.rank, step) == (0, DIES, DIES_BEFORE):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_STEP_S)
        counted[:] += 1


if __name__ == "__main__":
    main()
