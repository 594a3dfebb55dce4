"""Digests of replicas, collected and compared: which ranks differ, in which tensor, since when. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from msgspec import Struct, field

from resilio_hpc.launch.protocol.correctness_messages import EqualReplicas, ReplicasDigested

MOST_SWEEPS = 8
"""Sweeps that may be under way; the oldest is given up. Ranks of one world are a step or two apart."""

Said = tuple[int, bytes]  # mark and digests
SweepKey = tuple[str, int, int, int]  # group, last step, first part, parts


class ReplicaDifference(Struct, frozen=True):
    """Replicas of ``group`` that differ.

    ``ranks``: those that differ from most of the others; all ranks of the group where there is no majority, and then
    ``certain`` is False. ``step``: the first boundary at which it was seen; ``tensor``: "" where not known.
    """

    group: str
    ranks: tuple[int, ...]
    certain: bool
    replicas: int
    step: int
    part: int
    parts: int
    tensor: str


class SweepResult(Struct, frozen=True):
    """A whole sweep of one group, over the boundaries ``begin`` … ``end``. ``whole``: over all parts."""

    group: str
    begin: int
    end: int
    whole: bool
    difference: ReplicaDifference | None


class _Sweep(Struct):
    replicas: int
    said: dict[Said, list[int]] = field(default_factory=dict)


class ReplicaSweeps:
    """The sweeps of one round."""

    def __init__(self) -> None:
        self._sweeps: dict[SweepKey, _Sweep] = {}
        self._labels: dict[tuple[str, int], tuple[str, ...]] = {}

    def clear(self) -> None:
        """Forget all: another round begins."""
        self._sweeps.clear()

    def take(self, message: ReplicasDigested) -> list[SweepResult]:
        """Take the digests of one node. Return the sweeps for which all replicas are in."""
        results = []
        for found in message.found:
            if found.labels:
                self._labels[found.group, found.mark] = found.labels
            key = found.group, message.step, message.first, message.parts
            result = self._add(key, found)
            if result is not None:
                results.append(result)
        while len(self._sweeps) > MOST_SWEEPS * max(1, len({key[0] for key in self._sweeps})):
            del self._sweeps[min(self._sweeps, key=lambda key: key[1])]
        return results

    def _add(self, key: SweepKey, found: EqualReplicas) -> SweepResult | None:
        sweep = self._sweeps.setdefault(key, _Sweep(found.replicas))
        ranks = sweep.said.setdefault((found.mark, found.digests), [])
        ranks += [rank for rank in found.ranks if not any(rank in known for known in sweep.said.values())]
        if sum(map(len, sweep.said.values())) < sweep.replicas:
            return None
        del self._sweeps[key]
        group, step, first, parts = key
        difference = compare(key, sweep.said, self._labels) if len(sweep.said) > 1 else None
        return SweepResult(group, step - (parts - 1 - first), step, first == 0, difference)


def compare(
    key: SweepKey, said: Mapping[Said, list[int]], labels: Mapping[tuple[str, int], tuple[str, ...]]
) -> ReplicaDifference:
    """Return what differs. More than half of the replicas must agree for the others to be blamed."""
    group, step, first, parts = key
    total = sum(map(len, said.values()))
    most = max(said, key=lambda one: len(said[one]))
    certain = 2 * len(said[most]) > total
    odd = sorted(rank for one, ranks in said.items() if one != most or not certain for rank in ranks)
    part = min((first_difference(most, one) for one in said if one != most), default=0) + first
    names = labels.get((group, most[0]), ())
    same_tensors = len({mark for mark, _ in said}) == 1
    tensor = (names[part] if 0 <= part < len(names) else "") if same_tensors else "(replicas have different tensors)"
    return ReplicaDifference(group, tuple(odd), certain, total, step - (parts - 1 - part), part, parts, tensor)


def first_difference(one: Said, other: Said) -> int:
    """Return the first part in which two replicas differ; 0 where they do not have the same tensors."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return 0
    count = len(one[1]) // 8
    pairs = zip(struct.unpack_from(f"<{count}Q", one[1]), struct.unpack_from(f"<{count}Q", other[1]), strict=True)
    return next((at for at, (mine, its) in enumerate(pairs) if mine != its), 0)
