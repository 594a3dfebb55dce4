"""Import of another program's file or folder as a committed step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.ckpt.convert import dcp_folder, safetensors_file, sharded, torch_file
from resilio_hpc.ckpt.convert.export import Format
from resilio_hpc.ckpt.convert.imported import Imported
from resilio_hpc.ckpt.format.manifest import Layout, Manifest
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.state import tree
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.ckpt.store.step_copy import commit_verified, new_step
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError

_READERS = {"torch": torch_file.read, "safetensors": safetensors_file.read, "dcp": dcp_folder.read}


@dataclass(frozen=True)
class ImportSource:
    """The description of what is to be imported; only the plain values were read."""

    imported: Imported
    flattened: Flattened

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(leaf.size_bytes for leaf in self.flattened.leaves)


def open_source(path: Path, format_: Format) -> ImportSource:
    """Open and describe it.

    Raises UsageError for a missing path, for data that needs code or that a checkpoint cannot hold.

    CorruptCheckpoint, OSError.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    index = sharded.index_in(path) if path.is_dir() and format_ != "dcp" else path
    if index is None or path.is_dir() != (format_ == "dcp" or index is not path):
        raise UsageError(f"{path} is {'a directory' if path.is_dir() else 'a file'}, and so not of format {format_}")
    try:
        if index.name.endswith(sharded.INDEX) and format_ != "dcp":
            imported = sharded.read(index, _READERS[format_])
        else:
            imported = _READERS[format_](path)
    except RecursionError as error:
        raise CorruptCheckpoint(f"{path} holds a state that is nested too deep") from error
    return ImportSource(imported, tree.flatten(imported.state))


def import_step(
    source: ImportSource, target: Path, step: int, layout: Layout, progress: Progress = lambda size: None
) -> None:
    """Commit ``step`` in ``target``, as a world of one process would save it, as the newest one there.

    ``progress`` is called twice for every byte: what was written is read again and verified before the commit. Raises
    CheckpointError when the step exists already or may not be committed there, CorruptCheckpoint, OSError; nothing
    remains then.
    """
    from resilio_hpc.ckpt.store.shard_stream import write_stream

    with new_step(target, step, 0, 0) as staging:
        shard = write_stream(step, layout, source.flattened, staging, progress, source.imported.fetch)
        commit_verified(target, staging, Manifest(step, 0, 0, 0, 1, layout, (shard,)), progress)
