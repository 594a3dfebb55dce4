"""The order of samples as a pure function of (seed, position): no sample twice, none lost, however ranks come and go.

A position counts the samples that training has used since its beginning, over all epochs; it is the whole state of the
sampler. Each epoch is a permutation of its own. It is computed, not stored: a Feistel network over the next power of
four, walked until the result is a sample's number (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), so
a data set of 10^10 samples needs no more memory than one of ten.
"""

from __future__ import annotations

from resilio_hpc.core.errors import UsageError

_ROUNDS = 6
_MASK = (1 << 64) - 1


class SampleOrder:
    """The order. ``size``: samples in the data set. ``shuffle=False``: each epoch in the order of the data set."""

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
        if size < 1:
            raise UsageError(f"a data set has at least one sample, not {size}")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)

    def sample(self, position: int) -> int:
        """Return the number of the sample at a position, from 0 to ``size - 1``."""
        if position < 0:
            raise UsageError(f"a position is 0 or more, not {position}")
        epoch, place = divmod(position, self.size)
        if not self.shuffle:
            return place
        keys = [_mix(_mix(self.seed ^ (number << 56)) + epoch) for number in range(_ROUNDS)]
        while True:
            place = self._permuted(place, keys)
            if place < self.size:
                return place

    def samples(self, positions: range) -> list[int]:
        """Return those at several positions, such as one of ``BatchPlan.micro_batches``."""
        return [self.sample(position) for position in positions]

    def epoch(self, position: int) -> int:
        """Return how often the whole data set was used before."""
        return position // self.size

    def _permuted(self, place: int, keys: list[int]) -> int:
        mask = (1 << self._half) - 1
        left, right = place >> self._half, place & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self._half | right


def _mix(value: int) -> int:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
