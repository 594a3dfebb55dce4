"""A commit wants whole tensors: parts that leave gaps, overlap, or are not alike are refused at the save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt import Slab
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.core.errors import CheckpointError
from tests.ckpt.test_slabs import save


def part(first: int, length: int, fill: float, replica: int = 0) -> Slab:
    return Slab(np.full(length, fill), (10,), (first,), replica)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([part(0, 5, 1.0), part(5, 4, 1.0)], "the ranks saved 9 of the 10 elements of x"),
        ([part(0, 5, 1.0), part(5, 5, 1.0, replica=1)], "the ranks saved 5 of the 10 elements of x"),
        ([part(0, 6, 1.0), part(5, 5, 1.0)], "the parts of x that the ranks saved overlap"),
        ([part(0, 10, 1.0), part(0, 10, 2.0)], r"ranks 0 and 1 wrote \[10\] at \[0\] of x differently"),
        ([part(0, 10, 1.0), Slab(np.ones(5), (5,), (0,))], "ranks 0 and 1 give x to different tensors"),
    ],
)
def test_parts_that_do_not_make_up_a_whole_are_not_committed(parts: list[Slab], why: str, tmp_path: Path) -> None:
    whole = [part(0, 5, 1.0), part(5, 5, 2.0)]
    save(tmp_path, [{"x": one} for one in whole], 1)
    with pytest.raises(CheckpointError, match=f"step 2 cannot be committed: {why}"):
        save(tmp_path, [{"x": one} for one in parts], 2)
    save(tmp_path, [{"x": one} for one in whole], 3)
    assert checkpoint_index.committed_steps(tmp_path) == [1, 3]


def test_the_same_part_of_two_ranks_is_compared_at_every_commit(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, [{"x": part(0, 10, step)}, {"x": part(0, 10, step)}], step)
    with pytest.raises(CheckpointError, match=r"wrote .* of x differently"):
        save(tmp_path, [{"x": part(0, 10, 3.0)}, {"x": part(0, 10, 4.0)}], 3)
