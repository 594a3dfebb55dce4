"""What the adapter for Ignite refuses, at once and in one line. It needs no Ignite for that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilio_hpc.core.errors import UsageError
from resilio_hpc.frameworks.ignite import make_resilient

MODEL = torch.nn.Linear(1, 1)


def engine() -> Any:
    nothing = dict.fromkeys(("run", "_fire_event", "terminate", "state", "state_dict_user_keys"))
    return SimpleNamespace(**nothing)


class FullyShardedDataParallel(torch.nn.Module):
    """Known by its name."""


@pytest.mark.parametrize(
    ("trainer", "objects", "why"),
    [
        (MODEL, {"model": MODEL}, "takes an Engine of Ignite: Linear has no run"),
        (engine(), {"model": MODEL}, "needs the optimizer"),
        (engine(), {"model": FullyShardedDataParallel()}, "each rank has a part"),
    ],
)
def test_what_could_not_be_restored_is_refused(tmp_path: Path, trainer: Any, objects: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make_resilient(trainer, objects, directory=tmp_path)
