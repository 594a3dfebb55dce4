"""The ``.metadata`` of a torch.distributed.checkpoint folder, a pickle that is read without running any code.

A pickle may name any function and have it called. Here a name maps to a record of this module, to a string, or to an
error, whatever torch has under it: the result is records of plain values, which are then checked.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - the format is not ours, and nothing that it names is looked up
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec

from resilio_hpc.ckpt.format.manifest import Count
from resilio_hpc.ckpt.state.slab import Box, any_overlap
from resilio_hpc.ckpt.state.tree import MAX_DEPTH
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError

_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
_Path = Annotated[tuple[int | str, ...], msgspec.Meta(max_length=MAX_DEPTH)]


class StoredExtent(msgspec.Struct, frozen=True):
    """Where an item lies: ``length`` bytes from ``offset`` of a file in the folder."""

    relative_path: str
    offset: Count
    length: Count


class Chunk(NamedTuple):
    """A part of a tensor, and where it is stored."""

    box: Box
    stored: StoredExtent


class DcpTensor(NamedTuple):
    """A tensor; its chunks cover it, and do not overlap. ``dtype``: a name in torch."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class DcpMetadata(NamedTuple):
    """Tensors and other values by their names; the place of each in the nested state."""

    tensors: dict[str, DcpTensor]
    values: dict[str, StoredExtent]
    paths: dict[str, _Path]


class _Record:
    """Stands for one of torch's classes: keeps an object's pickled fields. No pickle can change the class itself."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Record):
    pass


class _TensorMetadata(_Record):
    pass


class _Only(_Record):
    """Stands for a class or function with one argument, which is all of its content."""

    def __new__(cls, value: Any) -> Any:
        return value


class _Member(_Record):
    """Stands for ``getattr``, by which some versions of Python pickle members of an enumeration: looks nothing up."""

    def __new__(cls, kind: Any, name: Any) -> Any:
        if kind is not _Only or type(name) is not str:
            raise UsageError(".metadata asks for builtins.getattr, which has no place there; nothing was read")
        return name


class _Ignored(_Record):
    """Stands for a class with arguments that are not needed."""

    def __init__(self, *_: Any) -> None:
        pass


class _Dtype(str):
    __slots__ = ()


_MODULE = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], type] = {
    (_MODULE, "Metadata"): _Metadata,
    (_MODULE, "TensorStorageMetadata"): _TensorMetadata,
    (_MODULE, "BytesStorageMetadata"): _Record,
    (_MODULE, "ChunkStorageMetadata"): _Record,
    (_MODULE, "TensorProperties"): _Record,
    (_MODULE, "MetadataIndex"): _Record,
    (_MODULE, "StorageMeta"): _Record,
    (_MODULE, "_MEM_FORMAT_ENCODING"): _Only,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): _Only,
    ("torch.serialization", "_get_layout"): _Only,
    ("builtins", "getattr"): _Member,
    ("pathlib", "PosixPath"): _Ignored,
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python: the one in C allocates a memo as large as any number in the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.isidentifier() and name.islower():
            return _Dtype(name)  # checked when a tensor of it is made
        if (module, name) not in _KNOWN:
            raise UsageError(f".metadata asks for {module}.{name}, which has no place there; nothing was read")
        return _KNOWN[module, name]


def read_metadata(data: bytes) -> DcpMetadata:
    """Return the metadata of a folder. Raises UsageError for a file that names other classes, CorruptCheckpoint."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except UsageError:
        raise
    except Exception as error:
        raise CorruptCheckpoint(f".metadata cannot be read: {error!r}") from error
    try:
        return _checked(found)
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptCheckpoint(f".metadata is not as torch writes it: {error!r}") from error


def _checked(found: Any) -> DcpMetadata:
    if type(found) is not _Metadata:
        raise CorruptCheckpoint(".metadata is not that of a DCP folder")
    fields = found.state
    stored = {_index_of(index): _stored_of(info) for index, info in fields["storage_data"].items()}
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, StoredExtent] = {}
    for key, item in fields["state_dict_metadata"].items():
        name = msgspec.convert(key, str)
        if type(item) is _TensorMetadata:
            tensors[name] = _tensor_of(name, item.state, stored)
        elif (name, None) in stored:
            values[name] = stored[name, None]
        else:
            raise CorruptCheckpoint(f".metadata does not say where {name} is")
    paths = msgspec.convert(fields.get("planner_data") or {}, dict[str, _Path])
    return DcpMetadata(tensors, values, {name: paths.get(name) or (name,) for name in (*tensors, *values)})


def _index_of(index: Any) -> tuple[str, tuple[int, ...] | None]:
    offset = index.state.get("offset")
    return msgspec.convert(index.state["fqn"], str), None if offset is None else msgspec.convert(offset, _Shape)


def _stored_of(info: Any) -> StoredExtent:
    if info.state.get("transform_descriptors"):
        raise UsageError(f"the files went through {info.state['transform_descriptors']!r}; only plain ones are read")
    found: StoredExtent = msgspec.convert(info.state, StoredExtent)
    if "/" in found.relative_path or found.relative_path in ("", ".", "..") or "\0" in found.relative_path:
        raise CorruptCheckpoint(f".metadata names a file outside of the folder: {found.relative_path!r}")
    return found


def _tensor_of(name: str, fields: Any, stored: dict[tuple[str, tuple[int, ...] | None], StoredExtent]) -> DcpTensor:
    dtype, shape = fields["properties"].state[0], msgspec.convert(fields["size"], _Shape)
    if type(dtype) is not _Dtype:
        raise CorruptCheckpoint(f".metadata does not say the dtype of {name}")
    chunks = []
    for chunk in fields["chunks"]:
        box = Box(msgspec.convert(chunk.state["offsets"], _Shape), msgspec.convert(chunk.state["sizes"], _Shape))
        if not len(box.start) == len(box.shape) == len(shape) or any(
            first + length > whole for first, length, whole in zip(box.start, box.shape, shape, strict=True)
        ):
            raise CorruptCheckpoint(f".metadata has a part of {name} that lies outside of it")
        if (name, box.start) not in stored:
            raise CorruptCheckpoint(f".metadata does not say where the part of {name} at {list(box.start)} is")
        if box.size:
            chunks.append(Chunk(box, stored[name, box.start]))
    if sum(chunk.box.size for chunk in chunks) != prod(shape) or any_overlap([chunk.box for chunk in chunks]):
        raise CorruptCheckpoint(f".metadata: the parts of {name} are not all of it, or overlap")
    return DcpTensor(str(dtype), shape, chunks)
