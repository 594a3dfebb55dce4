"""Groups and datasets of an HDF5 file whose bytes depend on nothing but their names and types: they hold no times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import h5py

from resilio_hpc.ckpt.format.manifest import SlabRecord
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.stored_types import Stored

_ALIGNED = {"alignment_threshold": 64 * 1024, "alignment_interval": PAGE}


@contextlib.contextmanager
def hdf_file(fd: int, mode: str) -> Iterator[Any]:
    """Open the file in memory ``fd`` by h5py, by its names of modes."""
    with (
        open(fd, "r+b", buffering=0, closefd=False) as memory,
        h5py.File(memory, mode, libver="latest", **(_ALIGNED if mode == "w" else {})) as file,
    ):
        yield file


class HdfGroup:
    """A group of an HDF5 file, without times, so that the same tensors always have the same metadata."""

    def __init__(self, parent: Any, name: str) -> None:
        self._links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._links.set_char_encoding(h5py.h5t.CSET_UTF8)
        self._properties = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        self._properties.set_obj_track_times(False)
        self._id = h5py.h5g.create(parent, name.encode("utf-8"), self._links, self._properties)
        self._made: set[str] = set()

    def make_dataset(self, name: str, stored: Stored, slab: SlabRecord | None = None) -> int:
        """Allocate a contiguous dataset without writing to it; return the offset of its bytes in the file."""
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.CONTIGUOUS)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        properties.set_obj_track_times(False)
        self._make_parents(name)
        space = h5py.h5s.create_simple(stored.shape) if stored.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        dataset = h5py.h5d.create(self._id, name.encode("utf-8"), stored.type, space, dcpl=properties, lcpl=self._links)
        if stored.name:
            h5py.Dataset(dataset).attrs["dtype"] = stored.name
        if slab is not None and slab.global_shape != stored.shape:
            h5py.Dataset(dataset).attrs["global_shape"] = slab.global_shape
            h5py.Dataset(dataset).attrs["start"] = slab.start
        return dataset.get_offset() or 0

    def _make_parents(self, name: str) -> None:
        """Make the parent groups of ``name``, once each."""
        parent = name.rpartition("/")[0]
        if parent and parent not in self._made:
            self._make_parents(parent)
            h5py.h5g.create(self._id, parent.encode("utf-8"), self._links, self._properties)
            self._made.add(parent)
