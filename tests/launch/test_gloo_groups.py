"""Ranks that have finished end: without our help torch's gloo backend deadlocked within three of these lives."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from resilio_hpc.core.process import run
from resilio_hpc.launch import gloo_groups

LIVES = 25


def test_ranks_of_a_ddp_script_always_end(tmp_path: Path) -> None:
    program = Path(__file__).with_name("gloo_lives.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run([sys.executable, str(program), str(tmp_path), str(LIVES)], timeout_s=120.0, env=environment)
    assert int(done.stdout) == LIVES


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
