"""A file or folder of another program made into a committed step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.ckpt.convert import dcp_folder, safetensors_file, sharded, torch_file
from resilio_hpc.ckpt.convert.export import Format
from resilio_hpc.ckpt.convert.imported import Imported, library
from resilio_hpc.ckpt.format.manifest import Layout, Manifest
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.state import tree
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.ckpt.store.step_copy import commit_verified, new_step
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError

_READERS = {"torch": torch_file.read, "safetensors": safetensors_file.read, "dcp": dcp_folder.read}


@dataclass(frozen=True)
class ImportSource:
    """What is to be imported, described; nothing but the plain values was read."""

    imported: Imported
    flattened: Flattened

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(leaf.size_bytes for leaf in self.flattened.leaves)


def open_source(path: Path, format_: Format) -> ImportSource:
    """Open it. Raises UsageError for what is not there, needs code to be read, or a checkpoint cannot hold.

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
    """Make a committed step of ``target``, as a world of one process would save it; the one committed last there.

    ``progress`` hears of every byte twice: what was written is read again and verified before it counts. Raises
    CheckpointError when the step is there already or may not be committed there, CorruptCheckpoint, OSError; nothing
    remains then.
    """
    library("h5py", "writing checkpoints")
    from resilio_hpc.ckpt.store.shard_stream import write_stream

    with new_step(target, step, 0, 0) as staging:
        shard = write_stream(step, layout, source.flattened, staging, progress, source.imported.fetch)
        commit_verified(target, staging, Manifest(step, 0, 0, 0, 1, layout, (shard,)), progress)
