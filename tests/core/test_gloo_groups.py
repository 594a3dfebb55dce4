"""Ranks that have finished end: without our help torch's gloo backend deadlocked within three of these lives."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from resilio_hpc.core import gloo_groups
from resilio_hpc.core.process import run

LIVES = 25


def test_ranks_of_a_ddp_script_always_end(tmp_path: Path) -> None:
    program = Path(__file__).with_name("gloo_lives.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run([sys.executable, str(program), str(tmp_path), str(LIVES)], timeout_s=120.0, env=environment)
    assert int(done.stdout) == LIVES


def test_groups_that_are_there_already_are_kept_too(tmp_path: Path) -> None:
    """As they are when a script calls ``train.attach`` after ``init_process_group``."""
    program = """
import sys
import torch.distributed as dist
from resilio_hpc import train
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = dist.group.WORLD
before = sys.getrefcount(group)
train.attach()
after_first = sys.getrefcount(group)
train.attach()
print(after_first - before, sys.getrefcount(group) - after_first)
dist.destroy_process_group()
"""
    done = run([sys.executable, "-c", program, str(tmp_path / "store")], timeout_s=60.0)
    assert done.stdout.split() == ["1", "0"], "one reference, never given back"


def test_it_is_put_in_place_once() -> None:
    import torch.distributed.distributed_c10d as c10d

    before = c10d._new_process_group_helper
    try:
        gloo_groups.keep_alive()
        first = c10d._new_process_group_helper
        gloo_groups.keep_alive()
        assert c10d._new_process_group_helper is first
        assert first is not before
    finally:
        c10d._new_process_group_helper = before
