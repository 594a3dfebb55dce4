"""Files of torch.save: zip archives with a pickle of the structure and the bytes of each tensor, uncompressed.

torch writes such a file without the bytes, and they are filled in, piece by piece. Files are read with
``weights_only``, which runs no code, and mapped.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from resilio_hpc.ckpt.convert.imported import Imported
from resilio_hpc.ckpt.convert.numpy_pickles import STAND_INS, settled
from resilio_hpc.ckpt.convert.torch_state import tensors_of, torch_state
from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.state.plain_values import CLASSES
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, UsageError
from resilio_hpc.core.extras import library
from resilio_hpc.core.regular_file import open_file

_LOCAL_HEADER_BYTES, _LOCAL_LENGTHS_AT = 30, 26
_CENTRAL_HEADER_BYTES, _CENTRAL_LENGTHS_AT, _CENTRAL_CRC_AT = 46, 28, 16
_DESCRIPTOR, _DESCRIPTOR_CRC_AT = b"PK\x07\x08", 4


def write(whole: WholeState, path: Path, progress: Progress) -> list[str]:
    """Write ``path``, durable; return notes on conversions.

    Raises UsageError for what the format cannot hold, CheckpointError, OSError.
    """
    made = torch_state(whole)
    try:
        offsets = _write_structure(made.state, made.tensors, path)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"torch could not write it: {first_line(error)}") from error
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)  # a full disk shows now
        crcs: dict[int, int] = {}
        for number, offset in offsets.items():
            file.seek(offset)
            crc = 0
            for chunk in whole.chunks(number):
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
                progress(len(chunk))
            crcs[offset] = crc
        _write_crcs(file, crcs)
        file.flush()
        os.fsync(file.fileno())
    return made.notes


def _write_structure(state: Any, tensors: list[Any], path: Path) -> dict[int, int]:
    """Write everything but the tensors' bytes; return the offset for those of each tensor, by its number."""
    import torch

    with torch.serialization.skip_data():
        torch.save(state, path)
    # torch maps a tensor to the place of its bytes
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    places = {
        numbers[id(mine)]: theirs.untyped_storage().data_ptr()
        for mine, theirs in zip(tensors_of(state), tensors_of(load(path, str(path))), strict=True)
        if mine.nbytes
    }
    with open(path, "rb") as file:
        sizes = {offset: entry.file_size for entry, offset in _entries(file) if "/data/" in entry.filename}
    begin = min((offset for offset, size in sizes.items() if size), default=0) - min(places.values(), default=0)
    offsets = {number: begin + at for number, at in places.items()}
    if any(sizes.get(offset) != tensors[number].nbytes for number, offset in offsets.items()):
        raise CheckpointError("this version of torch lays its files out in a way that is not known here")
    return offsets


def _entries(file: IO[bytes]) -> list[tuple[zipfile.ZipInfo, int]]:
    """Return the entries of an archive, each with the offset of its bytes."""
    found = []
    for entry in zipfile.ZipFile(file).infolist():
        file.seek(entry.header_offset + _LOCAL_LENGTHS_AT)
        lengths = file.read(4)
        name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
        found.append((entry, entry.header_offset + _LOCAL_HEADER_BYTES + name + extra))
    return found


def _write_crcs(file: IO[bytes], crcs: dict[int, int]) -> None:
    """Write the CRC-32 of the bytes at each offset, both behind them and into the archive's directory."""
    entries = _entries(file)
    at = zipfile.ZipFile(file).start_dir
    for entry, offset in entries:
        file.seek(at + _CENTRAL_LENGTHS_AT)
        lengths = file.read(6)
        if offset in crcs and entry.file_size:
            crc = crcs[offset].to_bytes(4, "little")
            file.seek(offset + entry.file_size)
            if file.read(4) == _DESCRIPTOR:
                file.seek(offset + entry.file_size + _DESCRIPTOR_CRC_AT)
                file.write(crc)
            file.seek(at + _CENTRAL_CRC_AT)
            file.write(crc)
        at += _CENTRAL_HEADER_BYTES + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2, 4))


def read(path: Path) -> Imported:
    """Return a file's state, its tensors mapped.

    Raises UsageError for a file that needs code, CorruptCheckpoint, OSError.
    """
    library("torch", "reading torch files")
    try:
        with open(open_file(path), "rb") as file:
            compressed = [entry.filename for entry, _ in _entries(file) if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{path} is no whole torch.save file; one older than torch 1.6 has to be saved again: {error}"
        ) from error
    if compressed:
        raise CorruptCheckpoint(f"{path} was packed again, with compression; torch.save files have none")
    return Imported(load(path, str(path)))


def load(file: Path | IO[bytes], name: str) -> Any:
    """Return the contents that torch.load reads without running code; mapped if ``file`` is a path.

    Raises UsageError, CorruptCheckpoint.
    """
    import torch

    try:
        with torch.serialization.safe_globals([*STAND_INS, *CLASSES]):
            found = torch.load(file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True)
        return settled(found)
    except OSError:
        raise
    except UsageError as error:
        raise UsageError(f"{name} holds {error}: it was not read") from error
    except Exception as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked or "weights_only" in str(error):
            what = f"asks for {asked[1]}" if asked else "holds more than tensors and plain values"
            raise UsageError(
                f"{name} {what}, and to read that would run code of the file: it was not read; where you trust it, "
                "load it and save its tensors and plain values alone"
            ) from error
        raise CorruptCheckpoint(f"{name} cannot be read: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; torch's have many."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
