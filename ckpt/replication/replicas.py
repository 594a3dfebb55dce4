"""Layout REPLICATED: a rank's tensors that differ from those of rank 0 are saved as its own.

Rank 0's checksums, which exist before anything is written, show which differ. The savers of other nodes read them from
the staging directory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from resilio_hpc.ckpt.devices.interface import LOGGED
from resilio_hpc.ckpt.format.manifest import TensorRecord, sha256
from resilio_hpc.ckpt.format.whole_snapshot import WholeSnapshot
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core.errors import CheckpointError

_NAME = ".rank-0.json"
_FIRST_POLL_S, _LONGEST_POLL_S = 0.005, 1.0
_BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's batch and instance norms. Each rank computes its own; DDP gives rank 0's to all before a forward
pass."""
_encode = msgspec.json.Encoder().encode


class _Row(NamedTuple):
    """One tensor of rank 0."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    checksums: tuple[int, ...]


_decode = msgspec.json.Decoder(list[_Row]).decode


@dataclass(frozen=True)
class Differences:
    """The result. ``numbers``: of each rank, those of its tensors that it saves itself.

    ``first``: place and rank of the first one that a user should know of; ``base``: a hash of what they were compared
    with.
    """

    numbers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    first: str = ""
    base: str = ""


def is_batch_statistic(path: str) -> bool:
    """Return whether it is a buffer that, in plain data parallel training, each rank has for itself."""
    return path.rpartition("/")[2].rpartition(".")[2] in _BATCH_STATISTICS


def compare(
    arenas: Sequence[WholeSnapshot],
    world_size: int,
    staging: Callable[[], Path],
    timeout_s: float,
    why_never: Callable[[], str] = lambda: "",
) -> Differences:
    """Return which tensors of these ranks differ from rank 0's, whose checksums are read, or waited for.

    ``why_never``: returns why they will not come, as soon as that is known. Raises CheckpointError when they do not
    come within ``timeout_s`` seconds, OSError.
    """
    if world_size == 1 or arenas[0].header.layout != "replicated":
        return Differences()
    first = next((arena for arena in arenas if arena.header.rank == 0), None)
    if first is None:
        data = _await(staging() / _NAME, timeout_s, why_never)
    else:
        data = _encode([_row(record) for record in first.tensors if record.slab is None])
        if len(arenas) < world_size:
            where = staging()
            store_of(where).write(where / _NAME, data, durable=False)
    return _differences([arena for arena in arenas if arena is not first], data)


def _differences(arenas: Sequence[WholeSnapshot], data: bytes) -> Differences:
    try:
        base = {row.path: row for row in _decode(data)}
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the checksums of rank 0 cannot be read: {error}") from error
    numbers: dict[int, frozenset[int]] = {}
    told = ""
    for arena in arenas:
        others = [
            number
            for number, record in enumerate(arena.tensors)
            if record.slab is None and base.get(record.path) != _row(record)
        ]
        numbers[arena.header.rank] = frozenset(others)
        surprising = [arena.tensors[number].path for number in others]
        surprising = [path for path in surprising if not (is_batch_statistic(path) or LOGGED in path.split("/"))]
        if surprising and not told:
            more = f" and {len(surprising) - 1} more" if len(surprising) > 1 else ""
            told = f"{surprising[0]}{more} of rank {arena.header.rank}"
    return Differences(numbers, told, sha256(data)[:16])


def _row(record: TensorRecord) -> _Row:
    return _Row(record.path, record.kind, record.dtype, record.shape, record.checksums)


def _await(path: Path, timeout_s: float, why_never: Callable[[], str]) -> bytes:
    started, poll_s = time.monotonic(), _FIRST_POLL_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            return store_of(path).read(path, follow=False)
        if why := why_never():
            raise CheckpointError(why)
        if time.monotonic() - started > timeout_s:
            raise CheckpointError(f"rank 0 has not given its checksums within {timeout_s:g} s")
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        if poll_s == _LONGEST_POLL_S:
            store_of(path).refresh(path.parent)
