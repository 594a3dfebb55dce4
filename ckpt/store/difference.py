"""The differences between two committed steps, by their tables: no tensor is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilio_hpc.ckpt.format.dataset_names import dataset_names
from resilio_hpc.ckpt.format.manifest import Manifest, RankTable
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.core.errors import CorruptCheckpoint

_SHORT = 60


class Difference(NamedTuple):
    """A difference. ``path``: of a tensor or plain value of ``rank``; "" if of the whole step (rank -1) or rank."""

    rank: int
    path: str
    what: str


def differences(one: tuple[Path, Manifest], other: tuple[Path, Manifest]) -> Iterator[Difference]:
    """Yield the differences; ``one`` and ``other``: directory of checkpoints and manifest of a step.

    Tensors are the same when dtype, shape and the CRC32C of every block are. Raises CorruptCheckpoint, OSError.
    """
    mine, theirs = one[1], other[1]
    if mine.layout != theirs.layout:
        yield Difference(-1, "", f"layout {mine.layout} → {theirs.layout}")
    if mine.world_size != theirs.world_size:
        yield Difference(-1, "", f"ranks {mine.world_size} → {theirs.world_size}")
    for rank in range(min(mine.world_size, theirs.world_size)):
        table, tree = _read(*one, rank)
        other_table, other_tree = _read(*other, rank)
        for path, what in (*_tensors(table, other_table), *_values(tree, other_tree, "")):
            yield Difference(rank, path, what)


def _read(directory: Path, manifest: Manifest, rank: int) -> tuple[RankTable, Any]:
    shard, record = manifest.shard_of(rank)
    with ExitStack() as stack:
        reader = stack.enter_context(ShardReader(checkpoint_index.step_directory(directory, manifest.step), shard))
        table = reader.table(record)
        try:
            return table, json.loads(reader.tree(record, table))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"step {manifest.step}: the plain values of rank {rank}: {error}") from error


def _tensors(table: RankTable, other: RankTable) -> Iterator[tuple[str, str]]:
    mine, theirs = (dict(zip(dataset_names(each.tensors), each.tensors, strict=True)) for each in (table, other))
    for path in dict.fromkeys((*mine, *theirs)):
        if path not in theirs:
            yield path, "only in the first"
        elif path not in mine:
            yield path, "only in the second"
        else:
            for name in ("kind", "dtype", "shape", "slab"):
                before, after = getattr(mine[path], name), getattr(theirs[path], name)
                if before != after:
                    yield path, f"{name} {_text(before)} → {_text(after)}"
                    break
            else:
                sizes = mine[path].block_bytes, theirs[path].block_bytes
                if sizes[0] != sizes[1]:
                    yield path, f"checksums of {sizes[0] >> 20} → {sizes[1] >> 20} MiB each, which cannot be compared"
                    continue
                changed = sum(a != b for a, b in zip(mine[path].checksums, theirs[path].checksums, strict=False))
                if changed:
                    yield path, f"content, in {changed} of {len(mine[path].checksums)} block(s)"


def _values(mine: Any, theirs: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the differences of the JSON; the numbers of tensors do not count."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if next(iter(mine), "") == next(iter(theirs), "") == "$tensor":
            return
        for key in dict.fromkeys((*mine, *theirs)):
            below = f"{path}/{key}" if path else str(key)
            if key not in theirs:
                yield below, "only in the first"
            elif key not in mine:
                yield below, "only in the second"
            else:
                yield from _values(mine[key], theirs[key], below)
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for number, (before, after) in enumerate(zip(mine, theirs, strict=True)):
            yield from _values(before, after, f"{path}/{number}" if path else str(number))
    elif mine != theirs or type(mine) is not type(theirs):
        yield path, f"{_text(mine)} → {_text(theirs)}"


def _text(value: Any) -> str:
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"
