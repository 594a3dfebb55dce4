"""FSDP, HSDP, tensor parallelism and both together, over real process groups: saved in one, restored in each."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from resilio_hpc.ckpt.state.slab import _check_one_piece, slab_of
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.process import run
from tests.support.environments import SUPPORT


def test_every_layout_restores_what_every_other_saved(tmp_path: Path) -> None:
    done = run([sys.executable, str(SUPPORT / "ckpt" / "dtensor_layouts.py"), str(tmp_path)], 240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("value", [torch.ones(2), 3, None, [torch.ones(2)]])
def test_nothing_else_is_a_slab(value: object) -> None:
    assert slab_of(value) is None


@pytest.mark.parametrize(
    ("length", "mesh", "placements", "good"),
    [
        (8, (2, 2), (_StridedShard(0, split_factor=2), Shard(0)), True),
        (8, (2, 2), (Shard(0), Shard(0)), True),
        (6, (2, 2), (Shard(0), Shard(0)), True),
        (6, (2, 2), (_StridedShard(0, split_factor=2), Shard(0)), False),  # not even
        (8, (2, 2), (_StridedShard(0, split_factor=2), Replicate()), False),  # two pieces each
        (8, (2, 2), (_StridedShard(0, split_factor=2), Shard(1)), False),
    ],
)
def test_parts_that_are_not_one_box_are_refused(length: int, mesh: Any, placements: Any, good: bool) -> None:
    with nullcontext() if good else pytest.raises(UsageError, match="not in one piece"):
        _check_one_piece((length, 8), mesh, placements)
