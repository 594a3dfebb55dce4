"""What ``run.steps`` adds to a training step: microseconds per step, median of several loops.

    python benchmarks/step_overhead.py

The loop without a launcher, and with the link to an agent (a real socket, whose other end reads and throws away).
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

STEPS = 200_000
REPEATS = 7


def microseconds(loop: Callable[[], Iterable[int]]) -> float:
    """Median time of one pass through the loop's body, less that of a bare loop."""

    def measured(make: Callable[[], Iterable[int]]) -> float:
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in make():
                pass
            times.append((time.perf_counter() - began) / STEPS * 1e6)
        return statistics.median(times)

    return measured(loop) - measured(lambda: range(STEPS))


def rank() -> None:
    """Measure in this process, whatever its environment says about a launcher."""
    from resilio_hpc import train

    run = train.attach()
    print(f"{microseconds(lambda: run.steps(0, STEPS)):.3f}")


def agent(listener: socket.socket) -> None:
    """Read and throw away."""
    connection, _ = listener.accept()
    with connection:
        while connection.recv(65536):
            pass


def main() -> None:
    if "--rank" in sys.argv:
        return rank()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "agent")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()
            threading.Thread(target=agent, args=(listener,), daemon=True).start()
            for name, extra in (("without a launcher", {}), ("with an agent", {"RESILIO_AGENT_SOCKET": path})):
                environment = {k: v for k, v in os.environ.items() if not k.startswith("RESILIO_")} | extra
                argv = [sys.executable, __file__, "--rank"]
                done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
                print(f"run.steps {name:20} {float(done.stdout):6.3f} µs per step", flush=True)
    return None


if __name__ == "__main__":
    main()
