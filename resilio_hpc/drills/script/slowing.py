"""How a training script becomes slow: work that can be throttled, and a data loader that takes longer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUICK_S, SLOW_S = 0.002, 0.8
ITEMS = 1_000_000


def work(seconds: float) -> None:
    """Use so much processor time."""
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


class Items:
    """A data set. Each item takes longer while ``slow`` exists."""

    def __init__(self, slow: Path) -> None:
        self._slow = slow

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        time.sleep(SLOW_S if self._slow.exists() else QUICK_S)
        return index


def batches(slow: Path) -> Iterator[Any]:
    """Return the batches of torch's data loader, which a process of its own loads."""
    from torch.utils.data import DataLoader

    return iter(DataLoader(Items(slow), batch_size=1, num_workers=1))  # type: ignore[arg-type]
