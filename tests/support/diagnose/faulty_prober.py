"""A prober with a fault: ``faulty_prober.py FAULT PARENT THREADS POLICY``. Nothing in the package knows of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

# Stops and continues its parent: 20 ms of work in 120.
_THROTTLE = """
import os, signal, sys, time
parent = int(sys.argv[1])
print(flush=True)
while os.getppid() == parent:
    os.kill(parent, signal.SIGSTOP); time.sleep(0.1)
    os.kill(parent, signal.SIGCONT); time.sleep(0.02)
"""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    time.sleep(3600)


def plant(fault: str) -> None:
    from resilio_hpc.diagnose import work

    own_join, own_compute = work.join, work.compute
    torch = work.torch

    def in_compute(act: Any) -> Any:
        return lambda policy: act()

    def in_collective(act: Any) -> Any:
        return lambda group, rank, policy: act()

    def flipped(group: Any) -> Any:
        class Flipping:
            def allreduce(self, tensors: list[Any]) -> Any:
                done = group.allreduce(tensors)
                done.wait()
                tensors[0][17] += 1
                return done

        return Flipping()

    if fault == "crash":
        work.compute = in_compute(_die)
    elif fault == "hang":
        work.compute = in_compute(_hang)
    elif fault == "crash-collective":
        work.communicate = in_collective(_die)
    elif fault == "hang-collective":
        work.communicate = in_collective(_hang)
    elif fault == "wrong-sum":
        work.join = lambda store, rank, policy: flipped(own_join(store, rank, policy))
    elif fault == "wrong-product":
        product = torch.Tensor.__matmul__

        def off_by_one(a: Any, b: Any) -> Any:
            found = product(a, b)
            if found.dim() == 2:
                found[3, 5] += 1
            return found

        torch.Tensor.__matmul__ = off_by_one
    elif fault == "slow":

        def throttled(policy: Any) -> Any:
            argv = [sys.executable, "-c", _THROTTLE, str(os.getpid())]
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as throttle:
                assert throttle.stdout
                throttle.stdout.readline()
                try:
                    return own_compute(policy)
                finally:
                    throttle.kill()

        work.compute = throttled


if __name__ == "__main__":
    planted = sys.argv.pop(1)
    if planted == "no-torch":
        sys.exit("ModuleNotFoundError: No module named 'torch'")
    from resilio_hpc.diagnose import prober

    plant(planted)
    prober.main()
