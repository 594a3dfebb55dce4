"""Plain launcher for the peers of benchmarks/in_process.py.

For NVRx it leaves the other ranks alone; for torchft it starts a replica again.

peer_supervisor.py nvrx|torchft PROCESSES HEARTBEAT_MS SCRIPT ARGUMENT…
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

POLL_S = 0.01
KIND, PROCESSES, HEARTBEAT_MS, COMMAND = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]


def start(rank: int, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    return subprocess.Popen([sys.executable, "-u", *COMMAND], env={**os.environ, **environment, **own})


def lighthouse() -> "tuple[subprocess.Popen[bytes], dict[str, str]]":
    """Start torchft's lighthouse on a port that is free."""
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    program = Path(sys.executable).parent / "torchft_lighthouse"
    options = ["--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", f"--bind=[::]:{port}"]
    process = subprocess.Popen([str(program), *options, f"--heartbeat_timeout_ms={HEARTBEAT_MS}"])
    return process, {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    processes: dict[int, subprocess.Popen[bytes]] = {}
    helper = None
    try:
        if KIND == "torchft":
            helper, environment = lighthouse()
        else:  # the store is here, so that each of the ranks may be killed
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        processes |= {rank: start(rank, environment) for rank in range(PROCESSES)}
        while processes:
            for rank, process in list(processes.items()):
                if process.poll() is None:
                    continue
                print(f"rank {rank} ended with {process.returncode}", flush=True)
                if KIND == "torchft":
                    processes[rank] = start(rank, environment)
                else:
                    del processes[rank]
            time.sleep(POLL_S)
    finally:
        for process in [*processes.values(), *([helper] if helper else [])]:
            process.kill()


if __name__ == "__main__":
    main()
