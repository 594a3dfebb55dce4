"""What an agent reads in a rank's stacks: the program's line, and that it waits for its peers to come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.stack_dump import STACK_SIGNAL, STACK_VARIABLE
from resilio_hpc.launch.protocol.root_cause import place_of
from resilio_hpc.launch.workers.rank_look import RankLook, joins_in, main_thread
from tests.support.environments import scrubbed
from tests.support.waiting import until

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2046 in _new_process_group_helper
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 1764 in init_process_group
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 95 in wrapper
  File "/home/u/train.py", line 9 in setup
  File "/home/u/train.py", line 40 in <module>
"""
SCRIPT = """
from resilio_hpc.core.stack_dump import write_when_asked
import torch.distributed as dist
write_when_asked()
print("ready", flush=True)
dist.init_process_group("gloo", init_method=None)
"""


def test_the_stack_of_the_main_thread_tells() -> None:
    stack = main_thread(DUMP)
    assert (place_of(stack), joins_in(stack)) == ("train.py:9", "init_process_group")


@pytest.mark.parametrize(
    "line",
    [
        'File "/home/u/torch_like/distributed.py", line 3 in init_process_group',
        'File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce',
        'File "/x/torch/distributed/distributed_c10d.py", line 3 in destroy_process_group',
        "",
    ],
)
def test_other_functions_are_no_meeting(line: str) -> None:
    assert joins_in(main_thread(f"Current thread 0x1 (most recent call first):\n  {line}\n")) == ""


def test_a_real_rank_that_waits_for_its_peers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    dump = tmp_path / "stacks"
    environment = scrubbed() | {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", STACK_VARIABLE: str(dump),
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as rank:
        try:
            assert rank.stdout is not None
            rank.stdout.readline()

            def waits() -> bool:
                os.kill(rank.pid, STACK_SIGNAL)
                return joins_in(main_thread(dump.read_text())) == "init_process_group"

            until(waits, "it waits for the other one")
            assert place_of(main_thread(dump.read_text())) == "train.py:6"
        finally:
            rank.kill()


def test_stacks_are_kept_when_the_round_is_over_where_there_are_any(tmp_path: Path) -> None:
    written, empty = tmp_path / "0.stacks", tmp_path / "1.stacks"
    kept = tmp_path / "logs"
    kept.mkdir()
    look = RankLook(tmp_path, {})
    look.begin(0, {0: written, 1: empty}, {0: kept / "4.stacks", 1: kept / "5.stacks"})
    written.write_text("where rank 4 is")
    written.with_suffix(".native").write_text("and in C")
    empty.touch()
    look.begin(1, {0: tmp_path / "none.stacks"}, {0: kept / "6.stacks"})
    look.close()
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "4.stacks": "where rank 4 is", "4.native": "and in C",
    }  # fmt: skip
