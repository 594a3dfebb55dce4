"""The model of benchmarks/reentry_training.py for the peers' scripts, whose environment has no resilio_hpc."""

from pathlib import Path

import torch
from torch import nn

STEP_S = 0.05


class PeerModel(nn.Module):
    """A small trained part, and a large one that is part of the state and is not trained.

    ``megabytes`` is the large part's size. It holds ``mark``, so that a newcomer's state is known to come from a peer.
    """

    def __init__(self, megabytes: float, mark: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(64, 64)
        count = int(megabytes * 1e6 / 4 / 8)
        self.large = nn.ParameterList([nn.Parameter(torch.full((count,), mark), False) for _ in range(8)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.trained(batch)

    def write_checksum(self, file: Path, rank: int) -> None:
        """Append the rank and the mean of the large part, which is the mark of the rank that it came from."""
        mean = sum(float(part.sum(dtype=torch.float64)) / part.numel() for part in self.large) / len(self.large)
        with file.open("a") as sums:
            sums.write(f"{rank} {mean!r}\n")
