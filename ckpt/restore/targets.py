"""The tensors that a restore fills: which saved tensor goes into which, and reading them.

New tensors are read first, since no code uses them yet. Live ones come last, after all else that can refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.format.source import CheckpointSource, Piece, Wanted, WantedSlab
from resilio_hpc.ckpt.restore.loads import Undo
from resilio_hpc.ckpt.state import meta_device, target_checks, tensors
from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.ckpt.state.paths import place
from resilio_hpc.ckpt.state.slab import Shape, slab_of
from resilio_hpc.core.errors import LayoutMismatch

Path = tuple[Any, ...]


@dataclass(eq=False)
class _Target:
    """A tensor to be filled. ``early``: it is new. ``index``: of the saved tensor, whole, or -1: from ``pieces``.

    ``side``: a buffer for its bytes, where they are not read into it.
    """

    path: Path
    live: Any
    early: bool
    index: int
    record: TensorRecord
    pieces: Sequence[Piece] = ()
    shape: Shape = ()
    side: Any = None

    def __post_init__(self) -> None:
        self.tensor = _local(self.live)

    @property
    def content(self) -> Any:
        """Return a value that is equal for the same bytes, as far as their checksums tell."""
        if self.index >= 0:
            return self.record.dtype, self.record.shape, self.record.checksums
        parts = sorted((piece.start, piece.box, piece.record.checksums) for piece in self.pieces)
        only = self.pieces[0] if len(self.pieces) == 1 else None
        if only is not None and only.box.shape == only.record.shape == self.shape:
            return only.record.dtype, only.record.shape, only.record.checksums
        return self.record.dtype, self.shape, tuple(parts)


class Targets:
    """The tensors to fill, by ``add`` and similar methods.

    Then, in this order: ``check``, ``give_memory``, ``read_new``, ``read_live``.
    """

    def __init__(self, records: Sequence[TensorRecord]) -> None:
        """Begin; ``records``: all that the source has, by number; it may grow."""
        self._records = records
        self._targets: list[_Target] = []
        self._wanted_new: dict[int, TensorRef] = {}
        self._read: dict[int, Any] = {}  # by number, the memory that a tensor's bytes were read into
        self._fresh: dict[int, Any] = {}
        self._meta: dict[int, Any] = {}

    # -- what goes where -----------------------------------------------------------------------------------------------

    def want(self, saved: TensorRef) -> None:
        """Order a new tensor: see ``fresh``."""
        self._wanted_new[saved.index] = saved

    def fresh(self, index: int) -> Any:
        """Return the new tensor, the same for all callers, once it is read; never a live one."""
        if index not in self._fresh:
            record, strides = self._records[index], self._wanted_new[index].strides
            self._fresh[index] = tensors.empty(record.kind, record.dtype, record.shape, strides)
            tensors.copy_into(self._fresh[index], self._read[index])
        return self._fresh[index]

    def add(self, path: Path, live: Any, early: bool, index: int) -> None:
        """Order that a saved tensor goes into ``live``, whole."""
        self._targets.append(_Target(path, live, early, index, self._records[index]))

    def add_pieces(
        self, path: Path, live: Any, early: bool, record: TensorRecord, pieces: Sequence[Piece], shape: Shape
    ) -> None:
        """Order that ``live``, of ``shape``, is filled from ``pieces``."""
        self._targets.append(_Target(path, live, early, -1, record, pieces, shape))

    def note_meta(self, live: Any) -> None:
        """Note a tensor that may have no memory yet."""
        if meta_device.is_meta(live):
            self._meta[id(live)] = live

    # -- before anything is changed ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise LayoutMismatch, with both places, for two saved tensors that go into one live tensor and differ."""
        for one, other in self._overlapping():
            if one.content == other.content and _view(one.tensor) == _view(other.tensor):
                continue
            if _view(one.tensor) == _view(other.tensor):
                raise LayoutMismatch(
                    f"{place(one.path)} and {place(other.path)} are one tensor in the state (tied), and the checkpoint "
                    "holds two that differ"
                )
            for target in (one, other):  # views that share some elements: known once they are read
                if target.side is None:
                    target.side = tensors.empty(target.record.kind, target.record.dtype, tuple(target.tensor.shape))

    def _overlapping(self) -> list[tuple[_Target, _Target]]:
        """Return neighbours in memory that share bytes."""
        placed = sorted(
            (*target_checks.memory_range(target.tensor), number)
            for number, target in enumerate(self._targets)
            if not target.early and target.record.size_bytes and target.tensor.nbytes
        )
        found: list[tuple[_Target, _Target]] = []
        where, end, widest = "", -1, -1
        for device, start, stop, number in placed:
            if device == where and start < end:
                found.append((self._targets[widest], self._targets[number]))
            if device != where or stop > end:
                where, end, widest = device, stop, number
        return found

    # -- reading -------------------------------------------------------------------------------------------------------

    def give_memory(self, undo: Undo) -> None:
        """Allocate memory for live tensors that have none. Raises UsageError."""
        for live in self._meta.values():
            made = meta_device.give_memory(live)
            undo.add(partial(meta_device.exchange, live, made))
        for target in self._targets if self._meta else ():
            target.tensor = _local(target.live)

    def read_new(self, source: CheckpointSource, pool: ThreadPoolExecutor) -> None:
        """Read the new tensors, and those that have to be compared first. Raises CorruptCheckpoint, OSError."""
        early = [target for target in self._targets if target.early or target.side is not None]
        for target in early:
            is_first = target.index >= 0 and target.side is None and target.index not in self._read
            if is_first and tensors.bytes_of(target.tensor) is not None:
                self._read[target.index] = target.tensor
        numbers = {target.index for target in early if target.index >= 0} | self._wanted_new.keys()
        for index in numbers - self._read.keys():
            record = self._records[index]
            self._read[index] = tensors.empty(record.kind, record.dtype, record.shape)
            if index in self._wanted_new and not self._wanted_new[index].strides:
                self._fresh[index] = self._read[index]
        self._fill(source, pool, sorted(numbers), [target for target in early if target.index < 0])
        for target in early:
            if target.index >= 0 and target.side is not None:
                target.side = self._read[target.index]
            elif target.index >= 0 and self._read[target.index] is not target.tensor:
                tensors.copy_into(target.tensor, self._read[target.index])

    def read_live(self, source: CheckpointSource, pool: ThreadPoolExecutor) -> None:
        """Read all others, in place.

        Raises LayoutMismatch where views share elements that differ in the checkpoint, and nothing is changed then;
        CorruptCheckpoint, OSError.
        """
        self._assign_compared()
        late = [target for target in self._targets if not target.early and target.side is None]
        numbers = []
        copies: list[tuple[Any, Any]] = []
        for target in late:
            if target.index < 0:
                continue
            into = self._read.get(target.index)
            if into is None:
                numbers.append(target.index)
                direct = tensors.bytes_of(target.tensor) is not None
                record = target.record
                into = target.tensor if direct else tensors.empty(record.kind, record.dtype, record.shape)
                self._read[target.index] = into
            if into is not target.tensor:
                copies.append((target.tensor, into))
        self._fill(source, pool, numbers, [target for target in late if target.index < 0])
        for tensor, into in copies:
            tensors.copy_into(tensor, into)

    def _fill(
        self, source: CheckpointSource, pool: ThreadPoolExecutor, numbers: Sequence[int], in_pieces: Sequence[_Target]
    ) -> None:
        wanted: list[Wanted] = [(self._records[index], _memory(self._read[index])) for index in numbers]
        slabs: list[WantedSlab] = []
        copies: list[tuple[Any, Any]] = []
        for target in in_pieces:
            into = target.tensor if target.side is None else target.side
            if tensors.bytes_of(into) is None:
                into = tensors.empty(target.record.kind, target.record.dtype, target.shape)
                copies.append((target.tensor, into))
            slabs.append((target.pieces, _memory(into), target.shape))
        if wanted:
            source.fill(wanted, pool)
        if slabs:
            source.fill_slabs(slabs, pool)
        for tensor, into in copies:
            tensors.copy_into(tensor, into)

    def _assign_compared(self) -> None:
        compared = [target for target in self._targets if target.side is not None]
        before = [_copy_of(target) for target in compared]
        for target in compared:
            tensors.copy_into(target.tensor, target.side)
        wrong = next((target for target in compared if not tensors.same_bytes(target.tensor, target.side)), None)
        if wrong is None:
            return
        for target, old in reversed(list(zip(compared, before, strict=True))):
            tensors.copy_into(target.tensor, old)
        others = ", ".join(place(target.path) for target in compared if target is not wrong)
        raise LayoutMismatch(
            f"{place(wrong.path)} shares memory in the state with others ({others}), and the checkpoint holds values "
            "for them that differ"
        )


def _copy_of(target: _Target) -> Any:
    made = tensors.empty(target.record.kind, target.record.dtype, tuple(target.tensor.shape))
    tensors.copy_into(made, target.tensor)
    return made


def _memory(tensor: Any) -> memoryview:
    memory = tensors.bytes_of(tensor)
    assert memory is not None
    return memory


def _view(tensor: Any) -> Any:
    stride = tensor.stride() if hasattr(tensor, "stride") else tensor.strides
    flags = (tensor.is_conj(), tensor.is_neg()) if hasattr(tensor, "is_conj") else ()
    return target_checks.memory_range(tensor), tuple(tensor.shape), stride, tensor.dtype, flags


def _local(live: Any) -> Any:
    """Return the part of it that lies in this process."""
    slab = slab_of(live)
    return live if slab is None else slab.tensor
