"""A committed step as one state: the parts of its processes are joined, piece by piece, verified."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from typing_extensions import Self

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.manifest import Manifest, TensorRecord
from resilio_hpc.ckpt.replication.replicas import is_batch_statistic
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.restore.slab_reader import Part, read_part
from resilio_hpc.ckpt.state import containers, decoded_tree
from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.ckpt.state.numpy_types import dtype_of
from resilio_hpc.ckpt.state.paths import place
from resilio_hpc.ckpt.state.slab import Box, Shape, runs
from resilio_hpc.ckpt.state.tensors import Kind
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, LayoutMismatch, UsageError

_TORCH_HAS = {"bool"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_TORCH_HAS |= {"float16", "float32", "float64", "complex64", "complex128"}
_CHOOSE = "; --rank R exports what one process saved"


class WholeTensor(NamedTuple):
    """A tensor of the state. ``start``: its first element in the tensor that its processes hold together."""

    path: str
    kind: Kind
    dtype: str
    shape: Shape
    size_bytes: int
    start: Shape
    record: TensorRecord

    @property
    def torch_name(self) -> str:
        """Return the name of the torch dtype with the same bytes.

        Raises UsageError for an array dtype that torch lacks.
        """
        if self.kind == "torch":
            return self.dtype
        dtype = dtype_of(self.dtype)
        if not dtype.isnative or dtype.name not in _TORCH_HAS:
            raise UsageError(f"{self.path} is an array of dtype {self.dtype}, and torch has no such tensors")
        return str(dtype.name)


class WholeState:
    """A committed step.

    ``state`` has a TensorRef for tensor number ``index`` of ``tensors``, in the order of the state.

    Without a rank the plain values are those of rank 0, and of other ranks at places where it has none. With one, the
    state is what that rank saved, parts of tensors included. Methods raise CorruptCheckpoint or OSError.
    """

    def __init__(self, directory: Path, manifest: Manifest, rank: int | None = None) -> None:
        """Open a step. ``directory``: of the checkpoints.

        Raises LayoutMismatch where the ranks' states do not fit together.
        """
        self._manifest, self._whole = manifest, rank is None
        step = checkpoint_index.step_directory(directory, manifest.step)
        self._source = CommittedSource(step, manifest, rank or 0, manifest.world_size, manifest.layout)
        self._room = memoryview(mmap.mmap(-1, bulk_io.ROOM_BYTES))
        try:
            state = decoded_tree.decode(self._source.tree)
            if rank is None and manifest.layout == "own":
                for other in range(1, manifest.world_size):
                    self._merge(state, self._source.tree_of(other), ())
            self.state = self._number(state)
        except RecursionError as error:
            self.close()
            raise CorruptCheckpoint(f"step {manifest.step} has a state that is nested too deep") from error
        except BaseException:
            self.close()
            raise

    # -- making one state of many --------------------------------------------------------------------------------------

    def _merge(self, mine: Any, theirs: Any, path: tuple[Any, ...]) -> None:
        """Merge into ``mine`` what only ``theirs`` has. Raises an error rather than lose a tensor."""
        if isinstance(mine, dict) and isinstance(theirs, dict):
            for key, value in theirs.items():
                if key in mine:
                    self._merge(mine[key], value, (*path, key))
                else:
                    mine[key] = value
            if hasattr(mine, "_metadata") and hasattr(theirs, "_metadata"):
                mine._metadata = type(mine._metadata)({**theirs._metadata, **mine._metadata})
        elif type(mine) in containers.SEQUENCES and type(mine) is type(theirs) and len(mine) == len(theirs):
            for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                self._merge(one, other, (*path, number))
        elif isinstance(mine, TensorRef) and isinstance(theirs, TensorRef):
            one, other = self._record(mine), self._record(theirs)
            if one.path != other.path and _content(one) != _content(other):  # one object here, two objects there
                raise LayoutMismatch(f"{place(path)}: the processes saved different tensors{_CHOOSE}")
        elif any(decoded_tree.refs(theirs)):
            raise LayoutMismatch(f"{place(path)}: some processes have a tensor there, and others have not{_CHOOSE}")

    def _record(self, ref: TensorRef) -> TensorRecord:
        if ref.index >= len(self._source.tensors):
            raise CorruptCheckpoint(f"step {self._manifest.step} has no tensor number {ref.index}")
        return self._source.tensors[ref.index]

    def _number(self, state: Any) -> Any:
        numbers: dict[int, int] = {}
        self.tensors: list[WholeTensor] = []

        def renumber(leaf: Any) -> Any:
            if not isinstance(leaf, TensorRef):
                return leaf
            if leaf.index not in numbers:
                numbers[leaf.index] = len(self.tensors)
                self.tensors.append(self._describe(self._record(leaf)))
            return TensorRef(numbers[leaf.index])

        return containers.map_leaves(state, renumber)

    def _describe(self, record: TensorRecord) -> WholeTensor:
        """Describe a tensor, after a check that all its parts exist and the ranks agree about what each has whole."""
        start, shape, slab = (0,) * len(record.shape), record.shape, record.slab
        if slab is None:
            is_ours = self._manifest.layout == "replicated" and is_batch_statistic(record.path)
            if self._whole and not is_ours and not self._source.is_the_same_everywhere(record):
                raise LayoutMismatch(
                    f"step {self._manifest.step}: the processes have different tensors at {record.path}{_CHOOSE}"
                )
            pieces = [self._source.whole(record)]
        else:
            start, shape = ((0,) * len(shape), slab.global_shape) if self._whole else (slab.start, shape)
            try:
                pieces = list(self._source.find(record, Box(start, shape)))
            except CheckpointError as error:
                raise type(error)(f"{error}{_CHOOSE if self._whole else ''}") from error
        sizes = {piece.record.size_bytes / prod(piece.record.shape) for piece in pieces if piece.box.size}
        if len(sizes) > 1 or any(size != int(size) for size in sizes):
            raise CorruptCheckpoint(
                f"step {self._manifest.step}: {record.path} has a size that is not that of its shape"
            )
        item = int(max(sizes, default=0))
        return WholeTensor(record.path, record.kind, record.dtype, shape, item * prod(shape), start, record)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def chunks(self, index: int) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in row-major order, at most 64 MiB at a time; each is good until the next."""
        tensor = self.tensors[index]
        if not tensor.size_bytes:
            return
        item = tensor.size_bytes // prod(tensor.shape)
        for box in runs(tensor.shape, bulk_io.ROOM_BYTES // item):
            room = self._room[: box.size * item]
            self._read(tensor, box, room)
            yield room

    def read(self, index: int, target: memoryview) -> None:
        """Read a tensor whole, into memory of its size."""
        tensor = self.tensors[index]
        if tensor.size_bytes:
            self._read(tensor, Box((0,) * len(tensor.shape), tensor.shape), target)

    def _read(self, tensor: WholeTensor, box: Box, target: memoryview) -> None:
        start = tuple(first + at for first, at in zip(tensor.start, box.start, strict=True))
        if tensor.record.slab is None:
            pieces = [self._source.whole(tensor.record)._replace(box=box)]
        else:
            pieces = list(self._source.find(tensor.record, Box(start, box.shape)))
        for piece in pieces:
            part = Part(piece.reader, piece.record, piece.box, target, box.shape, piece.start)
            read_part(self._manifest.step, part)

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _content(record: TensorRecord) -> tuple[Any, ...]:
    return record.kind, record.dtype, record.shape, record.checksums, record.slab
