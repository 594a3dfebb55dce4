"""A state without torch's parameters: nothing is compared, so nothing is called verified, and torch is not imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from resilio_hpc.train.validation.replica_digests import ReplicaSweep
from tests.support.environments import scrubbed

WITHOUT_TORCH = """
import sys
from types import SimpleNamespace
from resilio_hpc.train.compared_replicas import sweep_of
from resilio_hpc.train.validation.replica_groups import ReplicaPlace
place = SimpleNamespace(data_parallel=2, tensor_parallel=1, rank=0)
holder = SimpleNamespace(replicated=True, state=dict)
assert sweep_of(holder, SimpleNamespace(send=print), place, 10) is None
assert "torch" not in sys.modules
"""


def sent(state: Any) -> list[Any]:
    found: list[Any] = []
    sweep = ReplicaSweep(lambda: state, "group", 2, found.append, within=4)
    for completed in range(1, 9):
        sweep.at_boundary(completed)
    return found


def test_a_sweep_over_nothing_is_not_sent() -> None:
    assert sent({"vector": [1.0], "steps": 3}) == []
    assert len(sent({"model": torch.nn.Linear(2, 2)})) == 4


def test_torch_is_not_imported_to_compare_what_has_no_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, env=scrubbed(), timeout=60)
