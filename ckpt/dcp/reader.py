"""A storage reader for ``torch.distributed.checkpoint``: each process reads what its planner asks for, verified."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from resilio_hpc.ckpt.coordination import fresh_start, world
from resilio_hpc.ckpt.coordination.coordinator import Place, local_directory, peer_disks_file
from resilio_hpc.ckpt.coordination.local_coordinator import await_saves
from resilio_hpc.ckpt.dcp import metadata as dcp_metadata
from resilio_hpc.ckpt.dcp.boxes import BoxRead, Origin, read_boxes
from resilio_hpc.ckpt.dcp.metadata import Refused, SavedTensor, SavedValue
from resilio_hpc.ckpt.dcp.values import stream_of
from resilio_hpc.ckpt.format.manifest import Manifest, TensorRecord
from resilio_hpc.ckpt.snapshot.snapshot import copy_threads
from resilio_hpc.ckpt.state import decoded_tree, tensors
from resilio_hpc.ckpt.state.slab import Box, Shape, any_overlap, is_dtensor
from resilio_hpc.ckpt.store import checkpoint_index, writers
from resilio_hpc.ckpt.store.urls import checkpoints_path
from resilio_hpc.ckpt.tiers import local_disk
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, LayoutMismatch
from resilio_hpc.core.standard_streams import say


class ResilioReader(StorageReader):
    """Storage for ``dcp.load``: reads a committed step, of ``ResilioWriter`` or ``Checkpointer``.

    Saves of this process that are on their way are waited for.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int | None = None,
        *,
        local: str | os.PathLike[str] | None = None,
    ) -> None:
        """``directory``: of the checkpoints.

        ``step``: None, the one committed last. ``local``: directory on this node's own disk, where copies are read
        first (default $RESILIO_LOCAL_CHECKPOINT_DIR). Raises UsageError.
        """
        self.directory = checkpoints_path(directory, "the directory of checkpoints")
        self.step = None if step is None else checkpoint_index.check_step(step)
        self._local = local_directory(local, os.environ)
        self._manifest: Manifest | None = None
        self._found: dict[Any, Any] = {}
        self._incomplete: set[str] = set()

    @property
    def checkpoint_id(self) -> str:
        """Return the directory of the step, as torch's logs name a checkpoint."""
        step = self.step if self._manifest is None else self._manifest.step
        return str(self.directory if step is None else checkpoint_index.step_directory(self.directory, step))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reset for a load; ``checkpoint_id``: another directory of checkpoints, instead of the one given at first."""
        if checkpoint_id:
            self.directory = checkpoints_path(checkpoint_id, "checkpoint_id")
        self._manifest = None

    def storage_meta(self) -> StorageMeta:
        """Return what planners may need to know."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # torch takes a reader with **kwargs here as one with a metadata file per rank
    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """Return the metadata from the tables and trees of all ranks.

        Raises CheckpointError and subclasses, OSError.
        """
        writers.await_threads(self.directory)
        await_saves(self.directory)
        self._manifest = self._choose()
        together = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        if self.step is None and rank == 0 and (why := fresh_start.why_newest_is_gone(self.directory)):
            say(f"{why}: loading step {self._manifest.step}")
        where = checkpoint_index.step_directory(self.directory, self._manifest.step)
        return dcp_metadata.read(where, self._manifest, rank, world_size)

    def _choose(self) -> Manifest:
        if self.step is None:
            found = checkpoint_index.committed(self.directory)
            if not found:
                why = fresh_start.why_newest_is_gone(self.directory)
                raise CheckpointError(why or f"{self.directory} holds no committed step")
            return found[-1]
        try:
            return checkpoint_index.manifest_of(self.directory, self.step)
        except FileNotFoundError as error:
            raise CheckpointError(f"step {self.step} is not in {self.directory}") from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the result of ``read_metadata``."""
        self._found = metadata.storage_data
        self._incomplete = {
            name
            for name, known in metadata.state_dict_metadata.items()
            if isinstance(known, TensorStorageMetadata) and _is_incomplete(known)
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check the plan. Raises LayoutMismatch for a tensor of which it is not clear what should be loaded."""
        for item in plan.items:
            saved = self._found[item.storage_index]
            if isinstance(saved, Refused):
                raise LayoutMismatch(f"step {self._step}: {item.storage_index.fqn} cannot be loaded: {saved.why}")
        return replace(plan, storage_data=(self._step, self._manifest and self._manifest.order))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check the plans. Raises CheckpointError when a commit came between, and the processes see different steps."""
        chosen = {plan.storage_data for plan in plans}
        if len(chosen) > 1:
            steps = sorted({step for step, _ in chosen})
            raise CheckpointError(f"the processes found different steps as the newest one ({steps}); give step=")
        return plans

    @property
    def _step(self) -> int:
        assert self._manifest is not None
        return self._manifest.step

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, then pass its values.

        Raises CorruptCheckpoint for bytes that do not match their checksum, LayoutMismatch where the step lacks some of
        the plan, OSError. Tensors may already be changed then.
        """
        of_tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        self._check_cover(of_tensors, planner)
        reads = [self._read_of(item, planner) for item in of_tensors]
        values = [(item, self._found[item.storage_index]) for item in plan.items if item.type is LoadItemType.BYTE_IO]
        inside = [_new_tensors(saved) for _, saved in values]
        known = world.group()
        place = world.place_of(*known[1:], os.environ) if known else Place.read(os.environ)
        assert self._manifest is not None
        try:
            read_boxes(
                self._origin(self._manifest),
                [*reads, *(read for some in inside for read in some.values())],
                place.local_world_size == 1,
                place.local_rank,
                copy_threads(place.local_world_size),
            )
        except CorruptCheckpoint as error:
            checkpoint_index.note_damage(self.directory, self._step, str(error))
            raise
        for item, read in zip(of_tensors, reads, strict=True):
            planner.commit_tensor(item, read.target)
        for (item, saved), some in zip(values, inside, strict=True):
            planner.load_bytes(item, stream_of(_filled(saved, some)))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _origin(self, manifest: Manifest) -> Origin:
        copies = local_disk.copies_or_none(self._local, self.directory, manifest, say)
        where = checkpoint_index.step_directory(self.directory, manifest.step)
        return Origin(where, manifest, copies, peer_disks_file(os.environ))

    def _read_of(self, item: ReadItem, planner: LoadPlanner) -> BoxRead:
        saved: SavedTensor = self._found[item.storage_index]
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != box.shape or not _is_inside(box, saved.record.shape):
            raise LayoutMismatch(
                f"step {self._step}: {list(box.shape)} at {list(box.start)} of a part of {item.storage_index.fqn} of "
                f"shape {list(saved.record.shape)} cannot be loaded into a tensor of shape {list(target.shape)}"
            )
        return BoxRead(saved, box, target)

    def _check_cover(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Refuse a step that lacks parts: planners ask for what exists, and leave the rest of a tensor unchanged."""
        boxes: dict[MetadataIndex, list[Box]] = defaultdict(list)
        for item in items:
            boxes[item.dest_index].append(Box(tuple(item.dest_offsets), tuple(item.lengths)))
        for index, parts in boxes.items():
            if any_overlap([box for box in parts if box.size]):
                raise CorruptCheckpoint(f"step {self._step}: the parts of {index.fqn} that two ranks saved overlap")
        state = getattr(planner, "state_dict", None)
        if not isinstance(state, dict):
            return
        for name in self._incomplete & state.keys():
            wanted = _elements(state[name])
            held = sum(box.size for index, parts in boxes.items() if index.fqn == name for box in parts)
            if held != wanted:
                raise LayoutMismatch(
                    f"step {self._step} holds {held} of the {wanted} elements of {name} that are wanted"
                )


def _is_incomplete(known: TensorStorageMetadata) -> bool:
    return sum(prod(chunk.sizes) for chunk in known.chunks) != prod(known.size)


def _is_inside(box: Box, shape: Shape) -> bool:
    return len(box.start) == len(box.shape) == len(shape) and all(
        first >= 0 and first + length <= whole for first, length, whole in zip(box.start, box.shape, shape, strict=True)
    )


def _elements(value: Any) -> int:
    """Return the number of elements of the part of a tensor that this process has."""
    if isinstance(value, ShardedTensor):
        return sum(shard.tensor.numel() for shard in value.local_shards())
    local = value.to_local() if is_dtensor(value) else value
    return local.numel() if isinstance(local, torch.Tensor) else 0


def _new_tensors(saved: SavedValue) -> dict[int, BoxRead]:
    """Return new tensors for those inside of a plain value, by number."""
    return {
        number: BoxRead(tensor, Box((0,) * len(tensor.record.shape), tensor.record.shape), _empty_like(tensor.record))
        for number, tensor in saved.tensors.items()
    }


def _empty_like(record: TensorRecord) -> Any:
    return tensors.empty(record.kind, record.dtype, record.shape)


def _filled(saved: SavedValue, inside: dict[int, BoxRead]) -> Any:
    return decoded_tree.replaced(saved.value, lambda ref: inside[ref.index].target)
