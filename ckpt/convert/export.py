"""A committed step, or one rank's part of it, written in another program's format."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from resilio_hpc.ckpt.convert import dcp_folder, safetensors_file, sharded, torch_file
from resilio_hpc.ckpt.convert.flat_names import names_of
from resilio_hpc.ckpt.convert.target import DCP_METADATA, check_target, written_whole
from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core.errors import UsageError

Format = Literal["torch", "safetensors", "dcp"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SUFFIXES: dict[str, Format] = {
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".safetensors": "safetensors",
    "": "dcp",
}


def format_of(path: Path) -> Format:
    """Return the format by a file's suffix; a directory, or a name without suffix, is a DCP folder.

    Raises UsageError.

    A directory with an index of a model in several files has the format of those files, which the index tells.
    """
    index = sharded.index_in(path) if path.is_dir() and not (path / DCP_METADATA).exists() else path
    if index is not None and index.name.endswith(sharded.INDEX):
        return format_of(Path(index.name.removesuffix(sharded.INDEX)))
    if path.is_dir():
        return "dcp"
    try:
        return _SUFFIXES[path.suffix]
    except KeyError:
        raise UsageError(
            f"the name of {path} does not tell its format; give --format {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        ) from None


def export_step(
    whole: WholeState, target: Path, format_: Format, overwrite: bool, progress: Progress = lambda size: None
) -> list[str]:
    """Write a state to ``target``, which appears whole and durable, or not at all; return notes on conversions.

    ``progress`` is called for every byte of ``size_in``. Raises UsageError, CorruptCheckpoint, CheckpointError,
    OSError.
    """
    check_target(target, format_ == "dcp", overwrite)
    store_of(target).check_space(target.parent, size_in(whole, format_))
    notes: list[str] = []
    with written_whole(target, format_ == "dcp", overwrite) as path:
        if format_ == "safetensors":
            safetensors_file.write(whole, path, progress)
        else:
            notes = (torch_file if format_ == "torch" else dcp_folder).write(whole, path, progress)
    return notes


def size_in(whole: WholeState, format_: Format) -> int:
    """Return the bytes of the tensors in a format; torch's files hold a tensor with two names once."""
    if format_ == "torch":
        return whole.size_bytes
    return sum(whole.tensors[number].size_bytes for number in names_of(whole.state).values())
