"""The metadata that ``torch.distributed.checkpoint`` needs of a committed step, from its tables and trees alone.

It is not stored as such, so steps of ``Checkpointer`` can be loaded as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from resilio_hpc.ckpt.dcp import names as dcp_names
from resilio_hpc.ckpt.format.manifest import Manifest, RankTable, TensorRecord
from resilio_hpc.ckpt.replication.replicas import is_batch_statistic
from resilio_hpc.ckpt.state import decoded_tree, tensors
from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.ckpt.state.slab import Box
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch

_READERS = 8


class SavedTensor(NamedTuple):
    """A tensor, or a part of one, in the file of a rank."""

    rank: int
    record: TensorRecord

    @property
    def box(self) -> Box:
        """Return which part of the whole it is."""
        slab = self.record.slab
        return Box(slab.start if slab else (0,) * len(self.record.shape), self.record.shape)

    @property
    def whole(self) -> tuple[str, str, tuple[int, ...]]:
        """Return kind, dtype and shape of the whole: equal in all parts of one tensor."""
        slab = self.record.slab
        return self.record.kind, self.record.dtype, slab.global_shape if slab else self.record.shape


class SavedValue(NamedTuple):
    """A plain value as ``decoded_tree.decode`` returns it, and the numbers of the tensors inside of it."""

    value: Any
    tensors: dict[int, SavedTensor]


class Refused(NamedTuple):
    """The reason why a tensor of the step cannot be loaded."""

    why: str


@dataclass
class _Step:
    """All tables of a step, and the one rank (``own``) whose values and tensors are preferred where ranks differ."""

    manifest: Manifest
    own: int
    alike: bool
    tables: list[RankTable]
    held: dict[str, list[SavedTensor]] = field(default_factory=dict)
    found: Metadata = field(default_factory=lambda: Metadata({}, planner_data={}, storage_data={}))


def read(directory: Path, manifest: Manifest, rank: int, world_size: int) -> Metadata:
    """Return the metadata; ``directory``: of the step.

    ``storage_data``: MetadataIndex → SavedTensor, SavedValue or Refused.

    ``rank`` R has the plain values of rank R modulo the number of ranks that saved, as with ``Checkpointer``. Raises
    CorruptCheckpoint, LayoutMismatch for two places of one name, OSError.
    """
    ranks = range(manifest.world_size)
    with ThreadPoolExecutor(_READERS, "resilio-tables") as pool:
        tables = list(pool.map(lambda number: _table(directory, manifest, number), ranks))
    step = _Step(manifest, rank % manifest.world_size, manifest.world_size == world_size, tables)
    for number, table in enumerate(tables):
        for record in table.tensors:
            if record.offset >= 0:
                step.held.setdefault(record.path, []).append(SavedTensor(number, record))
    _name_everything(directory, step)
    step.found.storage_meta = StorageMeta(checkpoint_id=str(directory))
    return step.found


def _table(directory: Path, manifest: Manifest, rank: int) -> RankTable:
    shard, record = manifest.shard_of(rank)
    with ShardReader(directory, shard) as reader:
        table = reader.table(record)
    for described in table.tensors:
        tensors.check_description(described.kind, described.dtype, described.shape, described.size_bytes)
    return table


def _name_everything(directory: Path, step: _Step) -> None:
    """Name every place of the step; of trees that are the same in several ranks, only the first is read."""
    seen: set[Any] = set()
    paths: dict[str, dict[str, SavedTensor]] = {}
    for rank in (step.own, *range(len(step.tables))):
        table = step.tables[rank]
        content = (table.tree, tuple((record.path, record.kind) for record in table.tensors))
        if content in seen:
            continue
        seen.add(content)
        shard, record = step.manifest.shard_of(rank)
        with ShardReader(directory, shard) as reader:
            text = reader.tree(record, table)
        try:
            found = list(_places(step, text, table))
        except RecursionError as error:
            raise CorruptCheckpoint(f"step {step.manifest.step}: the tree of rank {rank} is nested too deep") from error
        for name, path, node in found:
            step.found.planner_data.setdefault(name, path)
            if isinstance(node, TensorRef):
                first = SavedTensor(rank, table.tensors[node.index])
                paths.setdefault(name, {}).setdefault(first.record.path, first)
            elif name not in step.found.state_dict_metadata:
                step.found.state_dict_metadata[name] = BytesStorageMetadata()
                step.found.storage_data[MetadataIndex(name)] = _value(step, rank, node)
    for name, firsts in paths.items():
        if name not in step.found.state_dict_metadata:
            _add_tensor(step, name, firsts)


def _places(step: _Step, text: bytes, table: RankTable) -> Iterator[tuple[str, dcp_names.Path, Any]]:
    """Yield name, path and content of each place; a TensorRef only where torch.distributed.checkpoint has a tensor."""

    def is_torch(ref: TensorRef) -> bool:
        return table.tensors[ref.index].kind == "torch"

    values, decoded = dcp_names.marked(text), decoded_tree.decode(text)
    if any(ref.index >= len(table.tensors) for ref in decoded_tree.refs(decoded)):
        raise CorruptCheckpoint(f"step {step.manifest.step}: a tree names a tensor that is not there")
    names: set[str] = set()
    for path, node in dcp_names.places(decoded, is_torch, values):
        name = dcp_names.name_of(path)
        if name in names:
            raise LayoutMismatch(
                f"step {step.manifest.step}: two places of the state are {name} for torch.distributed.checkpoint; "
                "restore it with Checkpointer"
            )
        names.add(name)
        one = isinstance(node, TensorRef) and name not in values and is_torch(node)
        yield name, path, node if one else _Value(node)


class _Value(NamedTuple):
    node: Any


def _value(step: _Step, rank: int, value: _Value) -> SavedValue | Refused:
    inside: dict[int, SavedTensor] = {}
    for ref in decoded_tree.refs(value.node):
        mine = SavedTensor(rank, step.tables[rank].tensors[ref.index])
        there = [mine] if mine.record.offset >= 0 else step.held.get(mine.record.path, [])
        whole = [saved for saved in there if saved.whole == mine.whole and saved.box.shape == mine.whole[2]]
        if not whole:
            return Refused("it holds a tensor that was saved in parts; restore it with Checkpointer")
        inside[ref.index] = whole[0]
    return SavedValue(value.node, inside)


def _add_tensor(step: _Step, name: str, firsts: dict[str, SavedTensor]) -> None:
    _, dtype, shape = whole = next(iter(firsts.values())).whole
    parts, why = _parts(step, [saved for path in firsts for saved in step.held.get(path, [])], whole)
    chunks = [ChunkStorageMetadata(torch.Size(part.box.start), torch.Size(part.box.shape)) for part in parts]
    properties = TensorProperties(dtype=tensors.torch_dtype(dtype))
    step.found.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for number, part in enumerate(parts):
        step.found.storage_data[MetadataIndex(name, part.box.start, number)] = Refused(why) if why else part


def _parts(step: _Step, held: Sequence[SavedTensor], whole: Any) -> tuple[list[SavedTensor], str]:
    """Return the parts that make up a tensor, each once; or a placeholder and why they are missing."""
    mine = next((saved for saved in held if saved.rank == step.own), None)
    if all(saved.record.slab is None for saved in held):
        is_replicated = step.manifest.layout == "replicated"
        if step.alike and (mine is not None or is_replicated):
            return [mine or held[0]], ""
        if is_replicated and is_batch_statistic(held[0].record.path):
            return [held[0]], ""
        same = {(saved.whole, saved.record.checksums) for saved in held}
        return list(held[:1]), "" if len(same) < 2 else "the processes that saved it had others each"
    if any(saved.record.slab is None for saved in held):
        return list(held[:1]), "it was saved in parts, and as a whole"
    parts: dict[Any, SavedTensor] = {}
    is_empty = not any(saved.box.size for saved in held)
    for saved in held:
        if saved.whole != whole:
            return [saved], "the parts that the processes saved are of different tensors"
        if not saved.box.size and not is_empty:
            continue
        first = parts.setdefault(saved.box, saved)
        if first.record.checksums != saved.record.checksums:
            return [saved], "two processes saved the same part of it differently"
    return list(parts.values()), ""
