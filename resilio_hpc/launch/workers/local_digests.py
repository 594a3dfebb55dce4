"""Digests of this node's ranks, put together: equal ones are sent once. Pure."""

from __future__ import annotations

from collections.abc import Collection

from resilio_hpc.core.rank_link import ReplicaDigest
from resilio_hpc.launch.protocol.correctness_messages import EqualReplicas, ReplicasDigested

MOST_SWEEPS = 4
"""Sweeps that may wait for ranks that are late; then those of the others are sent."""


class LocalDigests:
    """The digests of one round. ``place``: node, epoch, and round."""

    def __init__(self, place: tuple[str, int, int]) -> None:
        self._place = place
        self._sweeps: dict[tuple[int, int, int], dict[int, ReplicaDigest]] = {}
        self._labels: dict[tuple[str, int], tuple[str, ...]] = {}

    def take(self, rank: int, said: ReplicaDigest, awaited: Collection[int]) -> list[ReplicasDigested]:
        """Take a rank's digests. ``awaited``: ranks here that may send theirs. Return what goes to the controller."""
        if said.labels:
            self._labels.setdefault((said.group, said.mark), tuple(label[:96] for label in said.labels))
        key = said.step, said.first, said.parts
        self._sweeps.setdefault(key, {})[rank] = said
        whole = [one for one, found in self._sweeps.items() if found.keys() >= set(awaited)]
        late = sorted(self._sweeps)[: max(0, len(self._sweeps) - MOST_SWEEPS)]
        return [self._message(one) for one in sorted({*whole, *late})]

    def _message(self, key: tuple[int, int, int]) -> ReplicasDigested:
        alike: dict[tuple[str, int, int, bytes], list[int]] = {}
        for rank, said in sorted(self._sweeps.pop(key).items()):
            alike.setdefault((said.group[:96], said.replicas, said.mark, said.digests), []).append(rank)
        found = tuple(
            EqualReplicas(group, replicas, mark, digests, tuple(ranks), self._labels.pop((group, mark), ()))
            for (group, replicas, mark, digests), ranks in alike.items()
        )
        return ReplicasDigested(*self._place, *key, found)
