"""The names of a rank's tensors in its group of a shard file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from resilio_hpc.ckpt.format.manifest import TensorRecord


def dataset_names(records: Sequence[TensorRecord]) -> Iterator[str]:
    """Yield the names of a rank's tensors, below its group.

    They are the paths, numbered where it has several parts of one tensor.
    """
    seen: Counter[str] = Counter()
    for record in records:
        seen[record.path] += 1
        yield record.path if seen[record.path] == 1 else f"{record.path}${seen[record.path]}"
