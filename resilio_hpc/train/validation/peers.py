"""What ranks tell each other of a step's result: gloo groups of their own, beside those of the training."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from resilio_hpc.train.validation.replica_groups import ReplicaRound, replica_groups
from resilio_hpc.train.validation.tensor_digest import signed
from resilio_hpc.train.validation.verdict import StepOutcome

_OUTCOME = struct.Struct("<ddQ")
_WHY_BYTES = 120
FINE, SUSPECT = 0, 1


class ReplicaPeers:
    """All ranks, and those that are replicas of this one: ``replicas``, in the order of their ranks.

    Made by all ranks together. A lone process has no peers.
    """

    def __init__(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Take all ``groups`` of replicas; None: all ranks are replicas of each other."""
        self.is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.replicas: tuple[int, ...] = (self.rank,)
        self._all: Any = None
        self._group: Any = None
        if self.is_alone:
            return
        self._all = dist.new_group(backend="gloo")
        for ranks in [list(range(dist.get_world_size()))] if groups is None else [sorted(group) for group in groups]:
            made = self._all if len(ranks) == dist.get_world_size() else dist.new_group(ranks, backend="gloo")
            if self.rank in ranks:
                self._group, self.replicas = made, tuple(ranks)
        self._flag = torch.zeros(1, dtype=torch.int32)

    @property
    def at(self) -> int:
        """Return this rank's position among its replicas."""
        return self.replicas.index(self.rank)

    def any_suspect(self, is_suspect: bool) -> bool:
        """Return whether any rank has a suspect result. All ranks call it at each step: one number is exchanged."""
        if self.is_alone:
            return is_suspect
        self._flag.fill_(SUSPECT if is_suspect else FINE)
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._all)
        return int(self._flag) == SUSPECT

    def gather(self, own: StepOutcome) -> list[StepOutcome]:
        """Return the outcomes of all replicas, in their order."""
        if len(self.replicas) == 1:
            return [own]
        why = own.why.encode()[:_WHY_BYTES]
        data = _OUTCOME.pack(own.loss, own.norm, own.digest) + why + bytes(_WHY_BYTES - len(why))
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in self.replicas]
        dist.all_gather(found, mine, group=self._group)
        return [_outcome(bytes(one.numpy())) for one in found]

    def gather_texts(self, own: str) -> list[str]:
        """Return one short text of each replica."""
        return [outcome.why for outcome in self.gather(StepOutcome(0.0, 0.0, 0, own))]

    def gather_numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each replica; all have equally many, below 2^64."""
        if len(self.replicas) == 1 or not own:
            return [list(own) for _ in self.replicas]
        mine = torch.tensor([signed(number) for number in own], dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in self.replicas]
        dist.all_gather(found, mine, group=self._group)
        return [one.tolist() for one in found]

    def broadcast(self, value: torch.Tensor, source: int) -> None:
        """Fill a tensor on the CPU with that of the replica at the position ``source``."""
        if len(self.replicas) > 1:
            dist.broadcast(value, self.replicas[source], group=self._group)

    def pass_on(self, data: bytes) -> bytes:
        """Give bytes to the next replica; return those of the one before."""
        count = len(self.replicas)
        after, before = self.replicas[(self.at + 1) % count], self.replicas[self.at - 1]
        size, its = torch.tensor([len(data)]), torch.zeros(1, dtype=torch.int64)
        self._exchange(size, its, after, before)
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = torch.empty(int(its), dtype=torch.uint8)
        self._exchange(mine, theirs, after, before)
        return bytes(theirs.numpy())

    def _exchange(self, mine: torch.Tensor, theirs: torch.Tensor, after: int, before: int) -> None:
        sent = dist.isend(mine, after, group=self._group)
        dist.recv(theirs, before, group=self._group)
        if sent is not None:
            sent.wait()


class PeersOfRound:
    """The peers of a run's present round. Groups end with their round, and a guard may live on (``restartable``)."""

    def __init__(self, run: ReplicaRound) -> None:
        self._run = run
        self._made: tuple[int, ReplicaPeers] | None = None

    def now(self) -> ReplicaPeers:
        """Return them; all ranks make them together, when they are asked for first in a round."""
        if self._made is None or self._made[0] != self._run.round:
            self._made = self._run.round, ReplicaPeers(replica_groups(self._run))
        return self._made[1]


def _outcome(data: bytes) -> StepOutcome:
    loss, norm, digest = _OUTCOME.unpack_from(data)
    why = data[_OUTCOME.size :].rstrip(b"\0").decode(errors="ignore")
    return StepOutcome(loss, norm, digest, why)
