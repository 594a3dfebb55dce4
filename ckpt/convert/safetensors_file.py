"""safetensors: its header is JSON, so a file is written without the library and without torch.

The format: 8 bytes with the size of the header, the header, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.convert.flat_names import names_of, state_from, text_of
from resilio_hpc.ckpt.convert.imported import Imported
from resilio_hpc.ckpt.convert.whole_state import WholeState, WholeTensor
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError
from resilio_hpc.core.extras import library
from resilio_hpc.core.regular_file import open_file

_STATE = "resilio_state"
"""The key of the string metadata that holds the plain values."""
_HEADER_LIMIT = 100_000_000  # the library reads no longer header
_DTYPES = {  # name in the format, and bytes of an element
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float4_e2m1fn_x2": ("F4", 1),
}


def write(whole: WholeState, path: Path, progress: Progress) -> None:
    """Write ``path``, durable. Raises UsageError for what the format cannot hold, CorruptCheckpoint, OSError."""
    names = names_of(whole.state)
    described = {name: _description(whole.tensors[number]) for name, number in names.items()}
    # the library maps tensors where they lie, so wide elements come first and all of them are aligned
    order = sorted(names, key=lambda name: (-_DTYPES[whole.tensors[names[name]].torch_name][1], name))
    metadata = {"format": "pt", _STATE: text_of(whole).decode("utf-8")}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in order:
        size = whole.tensors[names[name]].size_bytes
        header[name] = {**described[name], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise UsageError(f"the header would have {len(text)} bytes, and safetensors allows {_HEADER_LIMIT}")
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + at)  # a full disk shows now
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for chunk in whole.chunks(names[name]):
                file.write(chunk)
                progress(len(chunk))
        file.flush()
        os.fsync(file.fileno())


def _description(tensor: WholeTensor) -> dict[str, Any]:
    dtype = tensor.torch_name
    is_pair = dtype.endswith("_x2")  # where torch counts pairs, the format counts numbers
    if dtype not in _DTYPES or (is_pair and not tensor.shape):
        raise UsageError(f"{tensor.path} has dtype {dtype}, which safetensors does not have; choose another format")
    name, item = _DTYPES[dtype]
    if prod(tensor.shape) * item != tensor.size_bytes:
        raise CorruptCheckpoint(f"{tensor.path} has a size that is not that of its shape")
    return {"dtype": name, "shape": [*tensor.shape[:-1], 2 * tensor.shape[-1]] if is_pair else list(tensor.shape)}


def read(path: Path) -> Imported:
    """Return a file's tensors by name, mapped; the nested state with its plain values, if this package wrote it."""
    library("torch", "reading safetensors files")
    safe_open = library("safetensors", "reading safetensors files").safe_open
    os.close(open_file(path))  # opened and closed first: the library would wait for a named pipe
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            text = (file.metadata() or {}).get(_STATE)
    except OSError:
        raise
    except Exception as error:
        raise CorruptCheckpoint(f"{path} is no whole safetensors file: {error}") from error
    return Imported(tensors if text is None else state_from(text.encode("utf-8"), tensors))
