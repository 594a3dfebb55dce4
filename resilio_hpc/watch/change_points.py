"""Lasting changes in noisy series: of one series, and of many that share their swings. Pure.

A series has changed when five of the last six windows lie above its usual level, by a ratio and by its noise. Single
windows may be anything: an evaluation, a checkpoint, a collection of garbage. The usual level follows slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

LEARN = 8  # windows before anything is reported
RECENT = 6
AGREE = 5  # of the recent windows
SLOW = math.log(1.2)
WELL = math.log(1.1)  # a change is over below this
DEVIATIONS = 3.5  # of a series' noise, and more while that was seen for few windows
UNSURE = 8.0
_SIGMA = 1.4826  # standard deviations in a median absolute deviation, for a normal distribution
_FOLLOWS = 0.02  # of a window's difference, at most its noise
_MASK = (1 << RECENT) - 1
_ONES = tuple(bin(bits).count("1") for bits in range(1 << RECENT))
_LEAST_NOISE = 0.005


class _Series:
    """One series against its usual level. Values are logarithms."""

    __slots__ = ("above", "below", "first", "high", "noise", "recent", "since_start", "usual")

    def __init__(self) -> None:
        self.first: list[float] = []
        self.recent: list[float] = []
        self.usual = self.noise = 0.0
        self.above = self.below = self.high = 0
        self.since_start = False

    def learn(self, value: float) -> None:
        """Take a value of the beginning; the last of them settles the usual level."""
        self.first.append(value)
        if len(self.first) == LEARN:
            self.usual = _middle(self.first)
            self.noise = max(_LEAST_NOISE, _middle([abs(one - self.usual) for one in self.first]))
            self.first = []

    def take(self, difference: float, least: float, counts: bool) -> None:
        """Take how far a window lies above the usual level. ``least``: what noise reaches; ``counts``: it may be told.

        A level that is being left is not followed.
        """
        recent = self.recent
        recent.append(difference)
        if len(recent) > RECENT:
            del recent[0]
        is_above = difference >= SLOW and difference >= least and counts
        self.above = (self.above << 1 | is_above) & _MASK
        self.below = (self.below << 1 | (difference < WELL)) & _MASK
        self.high = self.high + 1 if is_above or (self.high and _ONES[self.above] >= AGREE - 1) else 0
        if not self.above:
            step = min(abs(difference), self.noise)
            self.usual += _FOLLOWS * math.copysign(step, difference)
            grows = abs(difference) > self.noise
            self.noise = max(_LEAST_NOISE, self.noise * (1 + _FOLLOWS if grows else 1 - _FOLLOWS))

    @property
    def is_slow(self) -> bool:
        return _ONES[self.above] >= AGREE

    @property
    def is_well(self) -> bool:
        return _ONES[self.below] >= AGREE

    @property
    def ratio(self) -> float:
        return math.exp(_middle(self.recent))


class Level:
    """One series, such as the time of a step."""

    def __init__(self) -> None:
        self._series = _Series()
        self._windows = 0

    def take(self, value: float, hold: bool = False) -> None:
        """Take a positive value. ``hold``: what makes it larger is known, so it is not learned."""
        self._windows += 1
        series, logarithm = self._series, math.log(value)
        if self._windows <= LEARN:
            series.learn(logarithm)
        elif not hold:
            series.take(logarithm - series.usual, _SIGMA * (DEVIATIONS + UNSURE / self._windows) * series.noise, True)

    @property
    def is_slow(self) -> bool:
        """Return whether it has been above its usual level for some time."""
        return self._series.is_slow

    @property
    def is_well(self) -> bool:
        """Return whether it has been at its usual level for some time."""
        return self._series.is_well

    @property
    def ratio(self) -> float:
        """Return how many times its usual value it has."""
        return self._series.ratio if self._series.recent else 1.0

    @property
    def seen(self) -> int:
        """Return for how many windows it has been above its usual level."""
        return self._series.high

    @property
    def gain(self) -> float:
        """Return by how much it exceeds its usual value."""
        return math.exp(self._series.usual) * (self.ratio - 1) if self._series.recent else 0.0


class Peers:
    """Many series of one kind, compared with each other: what all of them do at once is no change of one."""

    def __init__(self) -> None:
        self.windows = 0
        self._series: dict[int, _Series] = {}
        self._spread: list[float] = []  # between the middle and the low quarter, while learning
        self._usual_spread = self._noise = 0.0

    @property
    def count(self) -> int:
        """Return how many series there are."""
        return len(self._series)

    def take(self, values: Mapping[int, float], counts: Callable[[int, float], bool]) -> None:
        """Take a window's positive values. ``counts``: whether a ratio matters for that series."""
        if not values:
            return
        self.windows += 1
        logarithms = {key: math.log(value) for key, value in values.items()}
        if self.windows <= LEARN:
            middle = _middle(list(logarithms.values()))
            for key, value in logarithms.items():
                self._series.setdefault(key, _Series()).learn(value - middle)
            if self.windows == LEARN:
                self._series = {key: one for key, one in self._series.items() if not one.first}
                noises = [one.noise for one in self._series.values()]
                self._noise = _middle(noises) if noises else _LEAST_NOISE
            return
        above = {key: value - self._series[key].usual for key, value in logarithms.items() if key in self._series}
        if not above:
            return
        ordered = sorted(above.values())
        # The low quarter, since a node's ranks may be half of all; it lies below the middle by what is usual.
        low = ordered[(len(ordered) - 1) // 4]
        spread = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2 - low
        if len(self._spread) < LEARN:
            self._spread.append(spread)
            self._usual_spread = _middle(self._spread)
        elif spread < 2 * self._usual_spread + self._noise:
            self._usual_spread += _FOLLOWS * (spread - self._usual_spread)
        reference = low + min(spread, self._usual_spread)
        deviations = _SIGMA * (DEVIATIONS + UNSURE / self.windows)
        for key, value in above.items():
            one = self._series[key]
            difference = value - reference
            least = deviations * max(one.noise, self._noise)
            one.take(difference, least, difference >= SLOW and counts(key, math.exp(min(difference, 20.0))))

    def outliers(self, keys: Sequence[int], least: Callable[[int], float]) -> None:
        """Mark the series that were above most of these from the start, as far as ``least`` of each. They are few."""
        level = _middle([self._series[key].usual for key in keys if key in self._series])
        spread = _SIGMA * _middle([abs(self._series[key].usual - level) for key in keys if key in self._series])
        found = [
            key
            for key in keys
            if key in self._series and self._series[key].usual - level >= max(least(key), DEVIATIONS * spread)
        ]
        if len(found) * 4 > len(keys):
            return
        for key in found:
            self._series[key].usual, self._series[key].since_start = level, True

    def starts(self, key: int) -> bool:
        """Return whether the series was above its peers from the start."""
        return self._series[key].since_start

    def seen(self, key: int) -> int:
        """Return for how many windows a series has been above its usual level."""
        return self._series[key].high

    @property
    def slow(self) -> dict[int, float]:
        """Return the series that have changed, and their ratio."""
        return {key: one.ratio for key, one in self._series.items() if one.is_slow}

    @property
    def well(self) -> set[int]:
        """Return the series that are as usual."""
        return {key for key, one in self._series.items() if one.is_well}

    @property
    def suspects(self) -> list[int]:
        """Return the series that lay above in half of the recent windows."""
        return [key for key, one in self._series.items() if _ONES[one.above] * 2 >= RECENT]

    @property
    def suspected(self) -> bool:
        """Return whether one lay above in half of the recent windows."""
        return any(_ONES[one.above] * 2 >= RECENT for one in self._series.values())


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
