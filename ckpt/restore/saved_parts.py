"""Tensors that were saved in parts, in a restore: a rank's own parts as they are, or what others saved of its box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.format.source import CheckpointSource
from resilio_hpc.ckpt.restore.targets import Path, Targets
from resilio_hpc.ckpt.state import target_checks
from resilio_hpc.ckpt.state.paths import place
from resilio_hpc.ckpt.state.slab import Box, Shape, Slab
from resilio_hpc.core.errors import LayoutMismatch, UsageError


class SavedParts:
    """Orders parts of tensors from ``targets``."""

    def __init__(self, source: CheckpointSource, records: Sequence[TensorRecord], targets: Targets) -> None:
        """Begin with none. ``records``: all that the source has, by number; it may grow."""
        self._source, self._records, self._targets = source, records, targets
        self._mine = len(records)  # the others come from elsewhere

    def add(self, path: Path, live: Any, slab: Slab, index: int, is_new: bool) -> None:
        """Order that ``live``, which is ``slab``, is filled from the tensor that record ``index`` is, or a part of it.

        Raises LayoutMismatch, UsageError.
        """
        record, box = self._records[index], Box(tuple(slab.start), tuple(slab.tensor.shape))
        check_fits(slab.tensor, record, box.shape, path)
        whole = record.shape if record.slab is None else record.slab.global_shape
        if tuple(slab.global_shape) != whole:
            raise LayoutMismatch(
                f"{place(path)}: the checkpoint holds shape {list(whole)}, the state {list(slab.global_shape)}"
            )
        candidates = (index, *self._several.get(record.path, ()))
        same = next((number for number in candidates if self._is_box(number, box)), None)
        if same is not None:
            self._targets.add(path, live, is_new, same)
        elif box.size:
            self._targets.add_pieces(path, live, is_new, record, self._source.find(record, box), box.shape)

    def has_several(self, path: str) -> bool:
        """Return whether this rank saved several parts of one tensor."""
        return path in self._several

    def _is_box(self, number: int, box: Box) -> bool:
        record = self._records[number]
        start = (0,) * len(record.shape) if record.slab is None else record.slab.start
        return record.offset >= 0 and box == Box(start, record.shape)

    @cached_property
    def _several(self) -> dict[str, list[int]]:
        """The numbers of this rank's parts of tensors of which it saved several."""
        found: dict[str, list[int]] = defaultdict(list)
        for number, record in enumerate(self._records[: self._mine]):
            found[record.path].append(number)
        return {path: numbers for path, numbers in found.items() if len(numbers) > 1}


def check_fits(live: Any, record: TensorRecord, shape: Shape, path: Path) -> None:
    """Raise LayoutMismatch or UsageError, with the place, where a saved tensor does not fit into ``live``."""
    try:
        target_checks.check_fits(live, record.kind, record.dtype, shape)
    except (LayoutMismatch, UsageError) as error:
        raise type(error)(f"{place(path)}: {error}") from error
