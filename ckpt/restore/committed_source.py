"""Reads one rank's state from the shard files of a committed step, in the layout of the save or another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from typing_extensions import Self

from resilio_hpc.ckpt.format.manifest import Layout, Manifest, RankTable, ShardRecord, TensorRecord
from resilio_hpc.ckpt.format.source import Piece, Wanted, WantedSlab
from resilio_hpc.ckpt.replication.replicas import is_batch_statistic
from resilio_hpc.ckpt.restore.shard_files import ShardFiles
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks, name_of
from resilio_hpc.ckpt.restore.slab_reader import Part, read_parts
from resilio_hpc.ckpt.restore.whole_reader import read_whole
from resilio_hpc.ckpt.state import containers, decoded_tree, tensors
from resilio_hpc.ckpt.state.slab import Box, Shape, any_overlap
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.ckpt.tiers.peer_disks import PeerDisks, PeerFile
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch
from resilio_hpc.core.tiers import Tier


class CommittedSource:
    """One rank's part of a committed step, read at the offsets of its table."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        rank: int,
        world_size: int,
        layout: Layout,
        alone: bool = True,
        local_rank: int = 0,
        copies: Mapping[str, Path] = MappingProxyType({}),
        cached: bool = False,
        peers: Path | None = None,
    ) -> None:
        """Open it; ``alone`` False: other ranks of this node read the same bytes.

        ``local_rank``: see ``read_parts``. ``copies``: see ShardFiles. ``cached``: the files are, or will be, in the
        page cache. ``peers``: see ``peer_disks``. Raises LayoutMismatch when this step is not for such a world,
        CorruptCheckpoint, OSError.
        """
        self.step = manifest.step
        self.is_foreign = layout == "own" and manifest.world_size != world_size
        self._manifest, self._store = manifest, store_of(directory)
        self._alone, self._local_rank, self._cached = alone, local_rank, cached
        self._apart = alone or layout == "own"
        self._shared = None if alone else SharedBlocks(name_of(directory, manifest))
        self._trees: dict[int, Any] = {}
        self._all: dict[str, list[tuple[ShardReader, TensorRecord]]] | None = None
        self._files = ShardFiles(directory, copies, PeerDisks(peers, manifest))
        self._parts: dict[int, tuple[ShardReader, RankTable]] = {}
        self._where: dict[str, ShardReader] = {}
        try:
            if manifest.layout != layout:
                raise LayoutMismatch(
                    f"step {manifest.step} was saved with layout {manifest.layout!r}, this Checkpointer has {layout!r}"
                )
            # for another world: ranks beyond the old one take another rank's plain values
            mine = rank % manifest.world_size
            reader, table = self._part(mine)
            if self.is_foreign and all(tensor.slab is None for tensor in table.tensors):
                raise LayoutMismatch(
                    f"step {manifest.step} was saved by {manifest.world_size} processes with tensors of their own and "
                    f"cannot be restored by {world_size}; start as many, or save with layout=REPLICATED, or say with "
                    "Slab or DTensor which part of a tensor each process holds"
                )
            self.tree = self._tree_bytes(mine)
            self._tensors = list(self._resolve(reader, table))
            self.tensors: Sequence[TensorRecord] = self._tensors
        except BaseException:
            self.close()
            raise

    def _part(self, rank: int) -> tuple[ShardReader, RankTable]:
        """Return a rank's file and table, read once."""
        if rank not in self._parts:
            shard, record = self._manifest.shard_of(rank)
            reader = self._files.reader(shard)
            self._parts[rank] = reader, self._files.described(reader, partial(reader.table, record))
        return self._parts[rank]

    def _tree_bytes(self, rank: int) -> bytes:
        reader, table = self._part(rank)
        return self._files.described(reader, partial(reader.tree, self._manifest.shard_of(rank)[1], table))

    def _resolve(self, reader: ShardReader, table: RankTable) -> Sequence[TensorRecord]:
        """Return records with their bytes: those of replicated tensors are rank 0's; slabs are searched when wanted."""
        self._where = {record.path: reader for record in table.tensors}
        if all(record.offset >= 0 or record.slab for record in table.tensors):
            return table.tensors
        first, table_of_first = self._part(0)
        held = {record.path: record for record in table_of_first.tensors if record.slab is None}
        found: list[TensorRecord] = []
        for mine in table.tensors:
            theirs = held.get(mine.path) if mine.offset < 0 and mine.slab is None else mine
            if theirs is None or (theirs.offset < 0 and theirs.slab is None) or _kind(mine) != _kind(theirs):
                raise CorruptCheckpoint(f"step {self.step}: rank 0 holds no such tensor as {mine.path}")
            if theirs is not mine:
                self._where[mine.path] = first
            found.append(theirs)
        return found

    def find(self, record: TensorRecord, box: Box) -> Sequence[Piece]:
        """See Source. Reads the tables of all ranks, once."""
        pieces: dict[Box, Piece] = {}
        for reader, held in self._everywhere().get(record.path, []):
            if held.slab is None and self._manifest.layout == "own":
                raise LayoutMismatch(f"step {self.step}: {record.path} was saved in parts, and as a whole")
            if (held.kind, held.dtype, _global_shape(held)) != (record.kind, record.dtype, _global_shape(record)):
                self._refuse_differences(held)
                raise CorruptCheckpoint(f"step {self.step}: the ranks' parts of {record.path} are of different tensors")
            tensors.check_description(held.kind, held.dtype, held.shape, held.size_bytes)
            start = held.slab.start if held.slab is not None else (0,) * len(held.shape)
            common = box.intersect(Box(start, held.shape))
            if common is None:
                continue
            piece = Piece(reader, held, common.seen_from(start), common.seen_from(box.start).start)
            first = pieces.setdefault(common, piece).record
            if (first.slab, first.checksums) != (held.slab, held.checksums):
                if held.slab is None and is_batch_statistic(held.path):
                    continue  # rank 0's, as DDP has it
                self._refuse_differences(held)
                raise CorruptCheckpoint(f"step {self.step}: two ranks saved the same part of {record.path} differently")
        self._check_cover(record.path, box, list(pieces.values()))
        return list(pieces.values())

    def _refuse_differences(self, held: TensorRecord) -> None:
        """Raise LayoutMismatch for a replicated tensor that differs between ranks: that is no damage."""
        if held.slab is None and self._manifest.layout == "replicated":
            raise LayoutMismatch(
                f"step {self.step}: the ranks saved different tensors as {held.path} in layout REPLICATED, so there is "
                "no whole one to take a part of"
            )

    def whole(self, record: TensorRecord) -> Piece:
        """Return the place of a tensor of ``tensors`` that is no slab."""
        start = (0,) * len(record.shape)
        return Piece(self._where[record.path], record, Box(start, record.shape), start)

    def is_the_same_everywhere(self, record: TensorRecord) -> bool:
        """See Source: compared by the checksums."""
        copies = [held for _, held in self._everywhere().get(record.path, [])]
        return bool(copies) and all(
            held.slab is None and _kind(held) == _kind(record) and held.checksums == record.checksums for held in copies
        )

    def elsewhere(self, path: Sequence[Any]) -> Any:
        """See Source. Reads the trees of the other ranks, one after the other, until one has it."""
        if self._manifest.layout == "replicated":
            return containers.NOTHING  # all ranks have the same
        for rank in range(self._manifest.world_size):
            found = containers.look_up(self.tree_of(rank), path)
            if found is not containers.NOTHING:
                return found
        return containers.NOTHING

    def tree_of(self, rank: int) -> Any:
        """Return the decoded tree of another rank; ``tensors`` grows by the tensors that it refers to."""
        if rank not in self._trees:
            reader, table = self._part(rank)
            self._trees[rank] = decoded_tree.renumber(decoded_tree.decode(self._tree_bytes(rank)), len(self._tensors))
            self._tensors += table.tensors
            for held in table.tensors:
                self._where.setdefault(held.path, reader)  # this rank's own part is not asked for here
        return self._trees[rank]

    def _everywhere(self) -> Mapping[str, Sequence[tuple[ShardReader, TensorRecord]]]:
        """Return the tensors under each path, of all ranks."""
        if self._all is None:
            self._store.together(*(partial(self._read_tables, shard) for shard in self._manifest.shards))
            self._all = defaultdict(list)
            for rank in range(self._manifest.world_size):
                reader, table = self._part(rank)
                for held in table.tensors:
                    if held.offset >= 0:
                        self._all[held.path].append((reader, held))
        return self._all

    def _read_tables(self, shard: ShardRecord) -> None:
        for rank in shard.ranks:
            self._part(rank.rank)

    def _check_cover(self, path: str, box: Box, pieces: Sequence[Piece]) -> None:
        if any_overlap([Box(piece.start, piece.box.shape) for piece in pieces]):
            raise CorruptCheckpoint(f"step {self.step}: the parts of {path} that two ranks saved overlap")
        held = sum(piece.box.size for piece in pieces)
        if held != box.size:
            raise LayoutMismatch(f"step {self.step} holds {held} of the {box.size} elements of {path} that are wanted")

    @property
    def tier(self) -> Tier:
        """See Source: the furthest tier of all that was read."""
        return self._files.tier

    def node_of(self, record: TensorRecord) -> str:
        """Return the node whose own disk has a tensor of ``tensors`` that this node's own has not; "": none."""
        return self._files.node_of(self._where[record.path])

    def fill_slabs(self, wanted: Sequence[WantedSlab], pool: ThreadPoolExecutor) -> None:
        """See Source."""
        parts = [
            Part(piece.reader, piece.record, piece.box, target, shape, piece.start)
            for pieces, target, shape in wanted
            for piece in pieces
        ]

        def read(some: Sequence[Part], peer: PeerFile | None) -> None:
            cached = self._cached and peer is None
            direct = False if cached else self._alone or None
            read_parts(self.step, some, direct, pool, self._local_rank, None if cached else self._shared, peer)

        for copy, some in self._files.by_copy(parts).items():
            self._files.read(copy, partial(read, some))

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """See Source."""
        reads = [(self._where[record.path], record, target) for record, target in wanted]

        def read(some: Sequence[tuple[ShardReader, TensorRecord, memoryview]], peer: PeerFile | None) -> None:
            cached = self._cached and peer is None
            shared = None if cached else self._shared
            read_whole(self.step, some, self._apart and not cached, pool, shared, peer)

        for copy, some in self._files.by_copy(reads).items():
            self._files.read(copy, partial(read, some))

    def close(self) -> None:
        """Close the files."""
        if self._shared is not None:
            self._shared.close()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _kind(record: TensorRecord) -> tuple[str, Shape]:
    return record.dtype, record.shape


def _global_shape(record: TensorRecord) -> Shape:
    return record.shape if record.slab is None else record.slab.global_shape
