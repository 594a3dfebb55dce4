"""What a round can restore from its nodes' memory, where the number of ranks has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.launch.controller.checkpoints.replica_placement import in_memory
from resilio_hpc.launch.protocol import messages as m

LIFE = (1, 4)


def run(*held: tuple[m.Held, ...], ranks: int = 2, known: m.Life = LIFE) -> Any:
    """Nodes n0, n1 … with what each holds; the last one knows of ``known``."""
    members = tuple(m.Member(f"n{number}", number, "", ranks, ranks * number) for number in range(len(held)))
    lives = [LIFE] * (len(held) - 1) + [known]
    agents = {
        member.node: SimpleNamespace(held=one, known=life, copy_port=0)
        for member, one, life in zip(members, held, lives, strict=True)
    }
    return SimpleNamespace(members=members, agents=agents, world_size=ranks * len(held), last_life=LIFE)


def held(world: int, *steps: int, ranks: tuple[int, ...] = (4, 5), **more: bool) -> tuple[m.Held, ...]:
    return tuple(m.Held(rank, step, world, is_shared=True, **more) for rank in ranks for step in steps)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (run(held(6, 3, 7), held(6, 7, 8)), {7}),  # all nodes need it
        (run(held(6, 7)), {7}),
        (run(held(6, 7), ()), set()),
        (run(held(6, 7, ranks=(4,))), set()),  # not enough for its ranks
        (run(held(6, 7, ranks=(4,)) + held(8, 7, ranks=(4,))), set()),  # of two worlds
        (run(held(6, 7), ranks=1), {7}),  # a device is out of use
        (run(held(6, 7, is_copy=True)), set()),
        (run(held(6, 7), held(6, 7), known=(1, 3)), set()),  # it missed a start
        (run(held(4, 7), held(4, 7)), set()),  # the same size: ranks have their own
        (run(tuple(m.Held(rank, 7, 6) for rank in (4, 5))), set()),  # tensors of their own
    ],
)
def test_steps_of_a_world_of_another_size(given: Any, steps: set[int]) -> None:
    assert in_memory(given).shared == steps
