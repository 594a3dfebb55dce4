"""Parameters and optimizer states of a replica that are not those of the others: found tensor by tensor, and copied.

A result that comes again may come from a corrupt parameter, and from no fault of the device. Then the other replicas
have the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from resilio_hpc.train.validation.digest_plan import folded, replicated_tensors
from resilio_hpc.train.validation.peers import ReplicaPeers
from resilio_hpc.train.validation.tensor_digest import digest_of, size_of


@dataclass(frozen=True)
class CorruptTensor:
    """``at``: its number; ``odd``: positions of replicas that have other values; ``source``: of one that is right."""

    at: int
    odd: tuple[int, ...]
    source: int


@dataclass(frozen=True)
class Healed:
    """``name``: of the first tensor; ``odd``: positions of the replicas that were corrupt."""

    name: str
    odd: tuple[int, ...]


def heal(peers: ReplicaPeers, state: Sequence[Any]) -> Healed | None:
    """Copy tensors that differ from a replica that is right; None where none differs, or none is known to be right.

    All replicas call it. ``state``: modules and optimizers.
    """
    named = list(replicated_tensors(list(state)))
    digests = folded([[digest_of(tensor, 0, size_of(tensor))] for _, tensor in named])
    finite = [int(_is_finite(tensor)) for _, tensor in named]
    counts = peers.gather_numbers([len(named)])
    if len({tuple(one) for one in counts}) > 1:
        return None
    tables, is_finite = peers.gather_numbers(digests), peers.gather_numbers(finite)
    found = corrupt_tensors(tables, is_finite)
    for one in found:
        tensor = named[one.at][1].detach()
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        value = local.cpu().contiguous()
        peers.broadcast(value, one.source)
        if peers.at in one.odd:
            local.copy_(value)
    if not found:
        return None
    return Healed(named[found[0].at][0], tuple(sorted({at for one in found for at in one.odd})))


def corrupt_tensors(digests: Sequence[Sequence[int]], finite: Sequence[Sequence[int]]) -> list[CorruptTensor]:
    """Return the tensors that some replicas have otherwise. Pure.

    ``digests``, ``finite``: of each replica, for each tensor. More than half of the replicas are right; else the only
    value that is finite. Where that decides not for each tensor, or most tensors differ, these are no replicas
    (shards, experts), and nothing is corrupt.
    """
    found = []
    for at in range(len(digests[0])):
        values = [table[at] for table in digests]
        (most, number), *others = Counter(values).most_common()
        if not others:
            continue
        if 2 * number <= len(values):
            whole = {value for value, table in zip(values, finite, strict=True) if table[at]}
            if len(whole) != 1:
                return []
            most = whole.pop()
        odd = tuple(place for place, value in enumerate(values) if value != most)
        found.append(CorruptTensor(at, odd, values.index(most)))
    return found if 2 * len(found) <= len(digests[0]) else []


def _is_finite(tensor: torch.Tensor) -> bool:
    own = tensor.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    return not own.is_floating_point() or bool(torch.isfinite(own).all())
