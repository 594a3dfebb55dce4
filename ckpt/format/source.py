"""Interface of all sources of a checkpoint's bytes, which ``restore`` reads.

Every block is verified as it is read. All raise CorruptCheckpoint for bytes that do not match their checksum, and
OSError for a device that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from resilio_hpc.ckpt.format.files import HasFile
from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.state.slab import Box, Shape
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.core.tiers import Tier
from resilio_hpc.native import populate_missing

_POPULATE_BYTES = 1 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes that were read or written."""

Wanted = tuple[TensorRecord, memoryview]
"""A tensor, and the memory of its size that it goes to."""


class Piece(NamedTuple):
    """``box`` of a saved tensor; it goes to the equally large box that begins at ``start`` of a wanted one."""

    reader: HasFile
    record: TensorRecord
    box: Box
    start: Shape


WantedSlab = tuple[Sequence[Piece], memoryview, Shape]
"""Where the bytes of a tensor are, the memory of its size that they go to, and its shape."""


class CheckpointSource(Protocol):
    """One rank's state, to be read. ``is_foreign``: another number of processes saved it."""

    step: int
    tree: bytes
    tensors: Sequence[TensorRecord]
    is_foreign: bool

    @property
    def tier(self) -> Tier:
        """Return the tier it was read from."""
        ...

    def find(self, record: TensorRecord, box: Box) -> Sequence[Piece]:
        """Return where ``box`` of ``record``'s global tensor lies, whichever ranks saved it.

        Raises LayoutMismatch when the checkpoint does not hold all of it, CorruptCheckpoint when it holds some twice.
        """
        ...

    def elsewhere(self, path: Sequence[Any]) -> Any:
        """Return what other ranks saved at a place where this rank saved nothing, else containers.NOTHING.

        As ``decoded_tree.decode`` returns it; ``tensors`` grows by the tensors that it refers to.
        """
        ...

    def is_the_same_everywhere(self, record: TensorRecord) -> bool:
        """Return whether all processes that saved a plain tensor under this path saved the same."""
        ...

    def fill_slabs(self, wanted: Sequence[WantedSlab], pool: ThreadPoolExecutor) -> None:
        """Do as ``fill``, from pieces."""
        ...

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """Copy every wanted tensor whole into its target, verified. No thread writes to a target after the return."""
        ...


def checksum_at(record: TensorRecord, start: int) -> int:
    """Return the CRC32C of the block that begins at ``start``."""
    return record.checksums[start // record.block_bytes]


def mismatch(step: int, record: TensorRecord, start: int) -> CorruptCheckpoint:
    """Return the error for a block that does not match its checksum."""
    return CorruptCheckpoint(f"step {step}: tensor {record.path} does not match its checksum at byte {start}")


def populate_large(target: memoryview) -> None:
    """Populate fresh pages all at once: faults one by one double the time of the copy."""
    if len(target) >= _POPULATE_BYTES:
        populate_missing(target)
