"""A snapshot of one rank, whole in memory, as it is written to a shard file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from resilio_hpc.ckpt.format.manifest import Layout, TensorRecord


@dataclass(frozen=True)
class Header:
    """An arena's header for the snapshot in it. ``sequence`` grows with each snapshot of a rank."""

    step: int
    sequence: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    round: int
    layout: Layout
    run_id: str
    table_offset: int
    table_size: int
    table_crc32c: int
    size_bytes: int


class WholeSnapshot(Protocol):
    """A whole snapshot. ``tree``: the state without its tensors, in JSON."""

    step: int
    header: Header
    tree: bytes

    @property
    def tensors(self) -> Sequence[TensorRecord]:
        """Return the record of each tensor, with its place in ``view``."""

    @property
    def view(self) -> memoryview:
        """Return all bytes that are in one piece of memory, neither copied nor verified."""

    def slice(self, offset: int, size: int) -> memoryview:
        """Return some bytes, which may lie behind ``view``, too."""
