"""Whether a number of a step is far above what it was before: median and MAD of the last steps. Pure.

The scale is learned, so no threshold depends on the model. Only values above the median are suspect: a loss that falls
is good news. The estimator is the modified z-score of Iglewicz and Hoaglin 1993, "How to Detect and Handle Outliers".
"""

from __future__ import annotations

import math
import struct
from collections import deque
from statistics import median

WINDOW = 128  # steps that are remembered
SOON = 4  # steps
WARM_UP = 20  # steps before which only numbers that are not finite are suspect
FACTOR = 12.0  # standard deviations, as the MAD estimates them
LEAST_SPREAD = 0.05  # of the median: a flat curve has a spread near 0
_MAD_TO_SIGMA = 1.4826


class SpikeJudge:
    """Judges one number, step by step."""

    def __init__(self, warm_up: int = WARM_UP, factor: float = FACTOR) -> None:
        self._warm_up = warm_up
        self._factor = factor
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._explained = 0.0, 0  # a value that was found right, and for how many steps it is a measure
        self._since_right = WINDOW  # steps since a suspect value was found right

    def why_suspect(self, value: float) -> str:
        """Return what is wrong with a value, as text; "" where it is as before."""
        if not math.isfinite(value):
            return "is NaN" if math.isnan(value) else "is infinite"
        if len(self._window) < self._warm_up:
            return ""
        middle = median(self._window)
        sigma = _MAD_TO_SIGMA * median(abs(one - middle) for one in self._window)
        limit = middle + self._factor * max(sigma, LEAST_SPREAD * abs(middle))
        if self._explained[1]:
            limit = max(limit, self._explained[0])
        return f"is {value:.4g}, usually {middle:.4g} and at most {limit:.4g}" if value > limit else ""

    def accept(self, value: float) -> None:
        """Take a value that is right: what comes later is compared with it, too."""
        if math.isfinite(value):
            self._window.append(value)
            self._explained = self._explained[0], max(0, self._explained[1] - 1)
            self._since_right += 1

    def explain(self, value: float) -> None:
        """Take note that a suspect value is right.

        Where that comes again at once, the curve has a new level: no value up to it is suspect, until half of the
        window is of later steps.
        """
        if math.isfinite(value) and self._since_right <= SOON:
            self._explained = value, WINDOW // 2
        self._since_right = 0

    def state(self) -> bytes:
        """Return the remembered values, as doubles."""
        return struct.pack(f"<{len(self._window)}d", *self._window)

    def restore(self, state: bytes) -> None:
        """Take up what ``state`` returned."""
        self._window = deque(struct.unpack(f"<{len(state) // 8}d", state[: len(state) // 8 * 8]), maxlen=WINDOW)
