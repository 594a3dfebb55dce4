"""Calls of torch's own gloo backend, noted by the library before it: from Python, from DDP's C++, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.diagnose.hangs.call_ring import CallRing
from resilio_hpc.native import intercept
from tests.support.free_port import free_port
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import os
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
first, second = dist.new_group(), dist.new_group([0, 1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
used = (second, first) if rank == 1 else (first, second)  # each rank uses another one first
for group in used:
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait() if group is used[1] else None
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
dist.monitored_barrier()
os._exit(3) if rank == 1 else None
for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.recv(torch.ones(1), 1), dist.monitored_barrier):
    try:
        call()
    except RuntimeError as error:
        print("caught", type(error).__name__)
"""


def begin(tmp_path: Path, program: str) -> tuple[list[int], list[str]]:
    """Run two ranks to their end, each with its ring in a file of its number."""
    library = intercept.library("gloo")
    if library is None:
        pytest.skip("needs the C extensions")
    port, ranks = free_port(), []
    for rank in (0, 1):
        ring = str(tmp_path / str(rank))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        environment = {**os.environ, **meeting, "LD_PRELOAD": library, "RESILIO_CALLS": ring}
        argv = [sys.executable, "-c", program]
        ranks.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said


THREADS = """
import os, threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
peer = 1 - dist.get_rank()
control = dist.new_group([0, 1])
dist.isend(torch.ones(1), peer)  # whose end nothing asks for
threading.Thread(target=dist.recv, args=(torch.ones(1), peer, control), daemon=True).start()
def leave():
    time.sleep(2.0)
    os._exit(0)
threading.Thread(target=leave).start()
dist.recv(torch.ones(2), peer, control, tag=7)
"""


@pytest.mark.slow
def test_which_thread_waits_for_a_receive_is_noted(tmp_path: Path) -> None:
    begin(tmp_path, THREADS)
    for rank in (0, 1):
        _, calls = CallRing(tmp_path / str(rank)).look()
        found = {(call.op, call.blocks, call.awaited) for call in calls if not call.sequence and not call.completed}
        assert found == {("send", False, False), ("recv", False, True), ("recv", True, True)}


@pytest.mark.slow
def test_what_two_ranks_call_is_noted_alike_and_errors_pass_through(tmp_path: Path) -> None:
    codes, said = begin(tmp_path, PROGRAM)
    assert codes == [0, 3]
    assert said[0].count("caught") == 3
    looks = [CallRing(tmp_path / str(rank)).look() for rank in (0, 1)]
    groups = [{group.id: group for group in look[0]} for look in looks]
    assert groups[0].keys() == groups[1].keys()  # the order of their first use does not matter
    assert [len(found) for found in groups] == [3, 3]
    assert {(group.family, group.size) for found in groups for group in found.values()} == {("gloo", 2)}
    assert [{group.rank for group in found.values()} for found in groups] == [{0}, {1}]
    worlds = [max(found.values(), key=lambda group: group.entered) for found in groups]
    assert worlds[0].id == worlds[1].id
    assert worlds[0].entered - worlds[1].entered == 2  # rank 0's last two collectives; DDP's are among the others
    assert worlds[1].entered >= 5
