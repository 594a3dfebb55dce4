"""In a batch script: a pair check of the job's nodes, one with a planted fault. ``check_in_job.py FAULT@NODE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from resilio_hpc.diagnose import CheckRequest, check
from resilio_hpc.diagnose.policy import pair_policy
from resilio_hpc.diagnose.starters import SrunStarter
from resilio_hpc.slurm.client.allocation import detect

CHECKER = str(Path(__file__).with_name("faulty_checker.py"))


def main() -> None:
    allocation = detect(os.environ)
    assert allocation is not None
    policy = msgspec.structs.replace(
        pair_policy(), cpu_matrix=256, cpu_message_bytes=65536, block_s=0.2, start_s=240.0, compute_s=20.0,
        collective_s=20.0, budget_s=500.0,
    )  # fmt: skip
    request = CheckRequest(
        nodes=allocation.nodes, place="step", policy=policy, address=allocation.node, job=allocation.job
    )
    command = (sys.executable, CHECKER, sys.argv[1])
    result = check(request, starter=lambda asked: SrunStarter(asked, lambda _: command))
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
