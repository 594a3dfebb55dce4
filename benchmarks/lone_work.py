"""Independent work for benchmarks/lone_restarts.py: each rank writes Unix time and pid after each piece of it."""

import os
import time
from pathlib import Path

PIECE_S = 0.002

with Path(os.environ["OUT"], f"steps-rank{os.environ['RANK']}").open("a", buffering=1) as stamps:
    while True:
        time.sleep(PIECE_S)
        stamps.write(f"{time.time():.6f} {os.getpid()}\n")
