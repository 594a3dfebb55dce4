"""The batch of a step when the number of ranks changes: the same batch, or one that grows with them. Pure.

Both rules are explicit, and neither rounds: a number of ranks that does not fit is an error, which names numbers that
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError


@dataclass(frozen=True)
class BatchPlan:
    """``accumulation``: micro batches that each data-parallel rank adds up before a step of the optimizer.

    ``learning_rate_factor``: the factor for the learning rate of the reference batch; 1.0 for a kept one.
    """

    global_batch: int
    micro_batch: int
    data_parallel: int
    accumulation: int
    learning_rate_factor: float = 1.0

    def micro_batches(self, position: int, data_parallel_rank: int) -> Iterator[range]:
        """Yield the positions of samples for a rank's work in one step, micro batch by micro batch.

        ``position``: samples that all steps before have used. The ranks' shares of a step are disjoint and together are
        ``position`` … ``position + global_batch - 1``, whatever the number of ranks.
        """
        if not 0 <= data_parallel_rank < self.data_parallel:
            raise UsageError(f"there is no data-parallel rank {data_parallel_rank} of {self.data_parallel}")
        for number in range(self.accumulation):
            begin = position + (number * self.data_parallel + data_parallel_rank) * self.micro_batch
            yield range(begin, begin + self.micro_batch)


def accumulation_steps(global_batch: int, micro_batch: int, data_parallel: int) -> int:
    """Return the micro batches per rank and step that make up exactly ``global_batch`` samples.

    Raises UsageError where none do, with the nearest batch and the nearest number of ranks that would fit.
    """
    for name, value in (("global", global_batch), ("micro", micro_batch)):
        if value < 1:
            raise UsageError(f"a {name} batch has at least one sample, not {value}")
    if data_parallel < 1:
        raise UsageError(f"there is at least one data-parallel rank, not {data_parallel}")
    at_once = micro_batch * data_parallel
    if global_batch % at_once == 0:
        return global_batch // at_once
    below = global_batch // at_once * at_once
    ranks = _fitting(global_batch, micro_batch, data_parallel)
    batches = " or ".join(str(batch) for batch in (below, below + at_once) if batch)
    raise UsageError(
        f"a global batch of {global_batch} cannot be made of micro batches of {micro_batch} on {data_parallel} "
        f"data-parallel ranks, which take {at_once} samples at a time: {ranks}the nearest batch is {batches}"
    )


def _fitting(global_batch: int, micro_batch: int, data_parallel: int) -> str:
    """Return ``the nearest number of ranks is 4 or 8, ``; "" where the micro batch itself does not divide the batch."""
    if global_batch % micro_batch:
        return ""
    parts = global_batch // micro_batch
    below = next((ranks for ranks in range(min(data_parallel, parts), 0, -1) if parts % ranks == 0), 0)
    above = next((ranks for ranks in range(data_parallel + 1, parts + 1) if parts % ranks == 0), 0)
    return f"the nearest number of ranks is {' or '.join(str(ranks) for ranks in (below, above) if ranks)}, "


def keep_batch(global_batch: int, micro_batch: int, data_parallel: int) -> BatchPlan:
    """Return the plan with the same global batch for any number of ranks: with more ranks, each adds up fewer.

    Learning rate and number of steps stay, and a step is still position ``step * global_batch``. Raises UsageError.
    """
    accumulation = accumulation_steps(global_batch, micro_batch, data_parallel)
    return BatchPlan(global_batch, micro_batch, data_parallel, accumulation)


def scale_batch(global_batch: int, micro_batch: int, data_parallel: int, reference_data_parallel: int) -> BatchPlan:
    """Return the plan with the reference's batch per rank: the global batch grows and shrinks with the ranks.

    ``global_batch``: with ``reference_data_parallel`` ranks. The learning rate follows linearly (Goyal et al. 2017,
    arXiv 1706.02677, section 2.1), which holds up to some batch size that depends on the problem. The position in the
    data is no function of the step any more: keep it in the checkpoint. Raises UsageError.
    """
    accumulation = accumulation_steps(global_batch, micro_batch, reference_data_parallel)
    if data_parallel < 1:
        raise UsageError(f"there is at least one data-parallel rank, not {data_parallel}")
    scaled = micro_batch * accumulation * data_parallel
    return BatchPlan(scaled, micro_batch, data_parallel, accumulation, data_parallel / reference_data_parallel)
