"""The items in the files of a torch.distributed.checkpoint folder, each read when it is asked for."""

from __future__ import annotations

import io
import os
from math import prod
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.convert.dcp_metadata import DcpMetadata, DcpTensor, StoredExtent
from resilio_hpc.ckpt.convert.target import DCP_METADATA
from resilio_hpc.ckpt.convert.torch_file import load
from resilio_hpc.ckpt.state import tensors
from resilio_hpc.ckpt.state.tensors import Leaf, is_tensor
from resilio_hpc.core import regular_file
from resilio_hpc.core.errors import CorruptCheckpoint


class DcpItems:
    """The items of a folder. ``places``: by name, placeholders of its tensors; their memory is never touched."""

    def __init__(self, path: Path, metadata: DcpMetadata) -> None:
        self._path, self._metadata = path, metadata
        self.places: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        for name, tensor in metadata.tensors.items():
            size = sum(chunk.stored.length for chunk in tensor.chunks)
            self.places[name] = made = _stand_in(name, tensor, size)
            if made.nbytes:
                self._names[_address(made)] = name

    def fetch(self, leaf: Leaf) -> Any:
        """Return a tensor with its content."""
        name = self._names.get(_address(leaf.value)) if leaf.size_bytes else None
        if name is None:
            return leaf.value  # inside another value; it came with that
        tensor = self._metadata.tensors[name]
        dtype, made = tensors.torch_dtype(tensor.dtype), None
        for chunk in tensor.chunks:
            part = self._load(name, chunk.stored)
            if not is_tensor(part) or (part.dtype, tuple(part.shape)) != (dtype, chunk.box.shape):
                raise CorruptCheckpoint(f"{self._path / chunk.stored.relative_path} holds something else than {name}")
            if chunk.box.shape == tensor.shape:
                return part
            made = tensors.empty("torch", tensor.dtype, tensor.shape) if made is None else made
            box = zip(chunk.box.start, chunk.box.shape, strict=True)
            made[tuple(slice(first, first + length) for first, length in box)] = part
        return made

    def value(self, name: str) -> Any:
        """Return a value that is no tensor."""
        return self._load(name, self._metadata.values[name])

    def _load(self, name: str, stored: StoredExtent) -> Any:
        path = self._path / stored.relative_path
        try:
            with open(regular_file.open_file(path, follow=False), "rb", buffering=0) as file:
                if stored.offset + stored.length > os.fstat(file.fileno()).st_size:
                    raise CorruptCheckpoint(f"{path} ends too early for {name}")
                return load(io.BufferedReader(_Window(file.fileno(), stored)), f"{name} in {path}")
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{path} is missing") from error


class _Window(io.RawIOBase):
    """An item of a file as a file of its own."""

    def __init__(self, fd: int, stored: StoredExtent) -> None:
        self._fd, self._stored, self._at = fd, stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._stored.length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._stored.length - self._at, 0)]
        done = os.preadv(self._fd, [view], self._stored.offset + self._at) if view else 0
        self._at += done
        return done


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data)


def _stand_in(name: str, tensor: DcpTensor, size: int) -> Any:
    """Return a placeholder tensor, whose memory is never touched. It is no larger than its parts in the files."""
    try:
        item = tensors.torch_dtype(tensor.dtype).itemsize
    except ValueError as error:
        raise CorruptCheckpoint(f"{DCP_METADATA}: {name}: {error}") from error
    if prod(tensor.shape) * item > size:
        raise CorruptCheckpoint(f"{DCP_METADATA}: {name} is larger than its parts in the files")
    return tensors.empty("torch", tensor.dtype, tensor.shape)
