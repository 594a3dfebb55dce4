"""Run scripts one after the other, each in two ranks with torchrun's environment, forked after importing torch: quick.

python forked_ranks.py '[["DIRECTORY", "script.py", "--option"], …]'      prints a line "== DIRECTORY" before each run
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch._dynamo  # which the first optimizer of every rank would import

from resilio_hpc.core.gloo_groups import keep_alive
from tests.support.free_port import free_port

RANKS = 2


def rank_process(rank: int, port: int, directory: str, argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.chdir(directory)
    os.environ["RESILIO_CHECKPOINT_DIR"] = str(Path(directory) / "checkpoints")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def main() -> NoReturn:
    keep_alive()  # the scripts are plain ones
    torch.set_num_threads(1)
    gc.freeze()  # children need not look at it again
    for directory, *argv in json.loads(sys.argv[1]):
        print(f"== {directory}", flush=True)
        port = free_port()
        ranks = [rank_process(rank, port, directory, argv) for rank in range(RANKS)]
        statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
        if any(statuses):
            raise SystemExit(f"a rank of {argv} failed")
    os._exit(0)  # taking torch apart takes seconds


if __name__ == "__main__":
    main()
