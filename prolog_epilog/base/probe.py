"""How a check runs: a source is fetched once, in a child, and each of its checks judges the reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from resilio_hpc.prolog_epilog.base.check import DeviceHistory, Doubt, Fault, Former, Thresholds, Unreadable, Value
from resilio_hpc.prolog_epilog.base.node import NodeView

Judge = Callable[[Any, Thresholds], Iterable[Fault]]
Counters = Callable[[Any], Mapping[str, int | Unreadable]]
Normal = Callable[[Any], Mapping[str, Value]]
Comparing = Callable[[Any, Thresholds, DeviceHistory], Iterable[Fault]]
Remembering = Callable[[Any, Thresholds, Former], tuple[Iterable[Fault], object]]

_WINDOW_S = 3600.0
_SAMPLE_EVERY_S = 300.0


@dataclass(frozen=True)
class Source:
    """A source. ``fetch`` reads. Each of ``targets`` gets its own child, so that one that hangs hides no other."""

    fetch: Callable[[NodeView], Any]
    targets: Callable[[NodeView], list[str]] = lambda _: [""]


@dataclass(frozen=True)
class Probe:
    """How a check judges.

    ``remembers``: judges a reading, also by what it kept from the last; ``normal``: for a baseline.
    """

    remembers: Remembering
    normal: Normal | None = None

    @classmethod
    def of(cls, judge: Judge) -> Probe:
        """Return a check that needs only the reading."""
        return cls(lambda reading, limits, _: (judge(reading, limits), None))

    @classmethod
    def compared(cls, judge: Comparing, normal: Normal) -> Probe:
        """Return a check that compares each device with its own past.

        Keeps the best value of each since the node started.
        """

        def compare(reading: Any, limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
            seen = _values(former.kept)
            best = {name: max(value, seen.get(name, value)) for name, value in normal(reading).items()}
            return judge(reading, limits, DeviceHistory(former.normal or {}, seen)), {**seen, **best}

        return cls(compare, normal)

    @classmethod
    def rising(cls, counters: Counters, words: str, index_of: Callable[[Any, str], int] = lambda *_: -1) -> Probe:
        """Return a check of counters, named by device and counter (``mlx5_0/1 link_downed``): see ``rising``."""

        def judge(reading: Any, limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
            faults, kept = rising(counters(reading), limits.number("per_hour"), former, words)
            return [msgspec.structs.replace(one, index=index_of(reading, one.device)) for one in faults], kept

        return cls(judge)


def rising(
    counters: Mapping[str, int | Unreadable],
    per_hour: float,
    former: Former,
    words: str,
) -> tuple[list[Fault], object]:
    """Return faults for counters that rose by more than ``per_hour`` within the last hour, or since the first look.

    Pure.

    Its value before that is history: neither its time nor its repair is known. A counter that is lower than before was
    reset. Keeps samples for an hour, one every five minutes. A counter that cannot be read is a doubt, and the others
    are judged.
    """
    samples = [one for one in _samples(former.kept) if 0 <= former.now_s - one[0] <= _WINDOW_S] or [
        one for one in _samples(former.kept)[-1:] if one[0] <= former.now_s
    ]
    faults: list[Fault] = [Doubt(str(value)) for value in counters.values() if isinstance(value, Unreadable)]
    read = {name: value for name, value in counters.items() if not isinstance(value, Unreadable)}
    for name, now in read.items():
        rose = _risen([values[name] for _, values in samples if name in values], now)
        if rose > per_hour:
            since = former.now_s - samples[0][0]
            device, _, counter = name.partition(" ")
            text = f"{device}: {rose} {counter or words} in {max(since, 1):.0f} s ({words})"
            faults.append(Fault(text, device))
    if not samples or former.now_s - samples[-1][0] >= _SAMPLE_EVERY_S:
        samples.append((former.now_s, read))
    return faults, [[at, values] for at, values in samples]


def _risen(before: list[int], now: int) -> int:
    """Return the sum of all rises from sample to sample; after a reset a counter begins at 0."""
    total = 0
    for earlier, later in zip(before, [*before[1:], now], strict=True) if before else ():
        total += later - earlier if later >= earlier else later
    return total


def _values(kept: object) -> dict[str, Value]:
    """Return the kept values of devices, as far as they are valid."""
    return (
        {name: value for name, value in kept.items() if isinstance(value, bool | int | float)}
        if isinstance(kept, dict)
        else {}
    )


def _samples(kept: object) -> list[tuple[float, dict[str, int]]]:
    """Return the kept samples, as far as they are valid."""
    found = []
    for one in kept if isinstance(kept, list) else ():
        if isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[0], int | float):
            values = one[1] if isinstance(one[1], dict) else {}
            found.append((float(one[0]), {k: v for k, v in values.items() if isinstance(v, int)}))
    return found
