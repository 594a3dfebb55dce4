"""The content of ``checkpoint.h5``, made by h5py from the tables of a step.

``/whole/<path>`` is a tensor that the processes hold together: a virtual dataset over their parts, or a link to the one
dataset that is all of it. ``/rank<R>/<path>`` is a link to process R's own tensor. Places that share a tensor are soft
links to the first. ``/rank<R>/$tree`` holds the plain values as JSON.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy

from resilio_hpc.ckpt.format.dataset_names import dataset_names
from resilio_hpc.ckpt.format.manifest import FORMAT, VERSION, Manifest, RankTable, TensorRecord
from resilio_hpc.ckpt.format.stored_types import stored_as
from resilio_hpc.ckpt.state import decoded_tree
from resilio_hpc.ckpt.state.slab import Box, Shape, any_overlap
from resilio_hpc.ckpt.store.shard_reader import ShardReader

NOTE = (
    "This file holds no tensor: it shows those of the node-*.h5 files beside it. Where one of these is missing, HDF5 "
    "reads NaN, or 0 where a type has no NaN, in place of its parts of tensors, and reports no error. 'resilio ckpt "
    "verify' finds that. No restore reads this file."
)


class _Source(NamedTuple):
    """A dataset of a shard file."""

    file: str
    rank: int
    name: str
    record: TensorRecord

    @property
    def place(self) -> str:
        """Return the name of the dataset in that file."""
        return f"/rank{self.rank}/{self.name}"

    @property
    def box(self) -> Box:
        """Return which part of its tensor it is."""
        slab, shape = self.record.slab, self.record.shape
        return Box((0,) * len(shape) if slab is None else slab.start, shape)

    @property
    def whole_shape(self) -> Shape:
        """Return the shape of the whole tensor."""
        return self.record.shape if self.record.slab is None else self.record.slab.global_shape


def view_image(step: Path, manifest: Manifest, front: int) -> tuple[bytes, list[str]]:
    """Return the file, and the paths of tensors that are shown in parts only, since these make no whole one.

    ``step``: the directory of the step. ``front``: so many bytes (a power of two from 512 on) that HDF5 skips, first.
    Raises CorruptCheckpoint for tables or trees that do not match, OSError.
    """
    fd = os.memfd_create("resilio-view", os.MFD_CLOEXEC)
    try:
        with (
            open(fd, "r+b", buffering=0, closefd=False) as memory,
            h5py.File(memory, "w", libver=("v110", "v110"), userblock_size=front) as file,
        ):
            in_parts = _Image(file, manifest).fill(step)
        return os.pread(fd, os.fstat(fd).st_size, 0), in_parts
    except (RuntimeError, ValueError) as error:  # h5py reports errors of libhdf5 by these
        raise OSError(errno.ENOMEM, f"libhdf5: {error}") from error
    finally:
        os.close(fd)


class _Image:
    def __init__(self, file: Any, manifest: Manifest) -> None:
        self._file, self._manifest = file, manifest
        self._names: set[str] = set()
        self._groups: set[str] = set()
        attributes = {"format": FORMAT, "version": VERSION, "step": manifest.step, "world_size": manifest.world_size}
        file.attrs.update({**attributes, "layout": manifest.layout, "note": NOTE})

    def fill(self, step: Path) -> list[str]:
        """Add everything; return the paths of tensors that are in parts only."""
        whole: dict[str, list[_Source]] = defaultdict(list)
        shared: list[tuple[int, str, str]] = []
        for shard in self._manifest.shards:
            with ShardReader(step, shard) as reader:
                for rank in shard.ranks:
                    table = reader.table(rank)
                    plain = reader.tree(rank, table)
                    self._take(f"rank{rank.rank}/$tree")
                    self._file.create_dataset(f"rank{rank.rank}/$tree", data=plain.decode("ascii"))
                    for record, name in zip(table.tensors, dataset_names(table.tensors), strict=True):
                        source = _Source(shard.file, rank.rank, name, record)
                        if record.offset >= 0 and record.slab is None and self._manifest.layout == "own":
                            self._link(f"rank{rank.rank}/{name}", source)
                        elif record.offset >= 0:
                            whole[record.path].append(source)
                    shared += [(rank.rank, *pair) for pair in _shared(table, plain)]
        in_parts = [path for path, sources in whole.items() if not self._show_whole(path, sources)]
        for path in in_parts:
            for source in whole[path]:
                self._link(f"rank{source.rank}/{source.name}", source)
        for rank_number, path, first in shared:
            for group in ("whole", f"rank{rank_number}"):
                if f"{group}/{first}" in self._names and self._take(f"{group}/{path}"):
                    self._file[f"{group}/{path}"] = h5py.SoftLink(f"/{group}/{first}")
        return in_parts

    def _take(self, name: str) -> bool:
        """Return whether the name was free, and take it.

        Two processes may have tensors at ``a`` and ``a/b``, a file cannot.
        """
        parts = name.split("/")
        above = {"/".join(parts[:length]) for length in range(1, len(parts))}
        if name in self._names or name in self._groups or above & self._names:
            return False
        self._names.add(name)
        self._groups |= above
        return True

    def _link(self, name: str, source: _Source) -> bool:
        if not self._take(name):
            return False
        self._file[name] = h5py.ExternalLink(source.file, source.place)
        return True

    def _show_whole(self, path: str, sources: Sequence[_Source]) -> bool:
        """Show a tensor whole; return False where its parts do not make one tensor."""
        shape, of_boxes = sources[0].whole_shape, dict[Box, _Source]()
        for source in sources:
            first = of_boxes.setdefault(source.box, source).record
            alike = (source.record.kind, source.record.dtype) == (sources[0].record.kind, sources[0].record.dtype)
            if source.whole_shape != shape or not alike or first.checksums != source.record.checksums:
                return False
        if all_of_it := next((source for box, source in of_boxes.items() if box.shape == shape), None):
            return self._link(f"whole/{path}", all_of_it)
        parts = {box: source for box, source in of_boxes.items() if box.size}
        if sum(box.size for box in parts) != prod(shape) or any_overlap(list(parts)) or not self._take(f"whole/{path}"):
            return False
        like = next(iter(parts.values()), sources[0]).record  # an empty part does not tell the size of its elements
        self._make_virtual(f"whole/{path}", like, shape, parts)
        return True

    def _make_virtual(self, name: str, like: TensorRecord, shape: Shape, parts: Mapping[Box, _Source]) -> None:
        stored = stored_as(like)
        more = stored.shape[len(shape) :]  # of a tensor stored as its bytes
        space = h5py.h5s.create_simple(shape + more)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if stored.type.get_class() == h5py.h5t.FLOAT:
            properties.set_fill_value(numpy.array(numpy.nan, numpy.float32))
        for box, source in parts.items():
            space.select_hyperslab(box.start + (0,) * len(more), box.shape + more)
            part = h5py.h5s.create_simple(box.shape + more)
            properties.set_virtual(space, source.file.encode(), source.place.encode(), part)
        space.select_all()
        links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        dataset = h5py.h5d.create(self._file.id, name.encode(), stored.type, space, dcpl=properties, lcpl=links)
        if stored.name:
            h5py.Dataset(dataset).attrs["dtype"] = stored.name


def _shared(table: RankTable, plain: bytes) -> Iterator[tuple[str, str]]:
    """Yield places of a tensor that was stored for another place, and that place."""
    for path, ref in decoded_tree.places(decoded_tree.decode(plain)):
        if ref.index < len(table.tensors) and path != table.tensors[ref.index].path:
            yield path, table.tensors[ref.index].path
