"""Copying a committed step into another directory of checkpoints, verified on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Manifest
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.ckpt.store.verify import verify_files
from resilio_hpc.core.durable import make_directory, sync_directory
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint
from resilio_hpc.core.regular_file import open_file

_PIECE_BYTES = 16 << 20


@contextmanager
def new_step(target: Path, step: int, epoch: int, round_: int) -> Iterator[Path]:
    """Give a staging directory for a step that ``target`` (made if need be) does not have.

    Gone at the end, with what was not committed. Raises CheckpointError when the step is there, or on its way; OSError.
    """
    if os.path.lexists(checkpoint_index.step_directory(target, step)):
        raise CheckpointError(f"step {step} is in {target} already")
    make_directory(target)
    staging = staging_directory(target, step, epoch, round_)
    try:
        staging.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{staging} is there: step {step} is being written, or its writer died; remove it"
        ) from None
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def commit_verified(target: Path, staging: Path, manifest: Manifest, progress: Progress) -> None:
    """Commit what was staged, once it was read again and is as it was written. No older step is removed.

    Raises CorruptCheckpoint, CheckpointError when it may not be committed there, OSError.
    """
    sync_directory(staging)
    damages = verify_files(staging, manifest, progress)
    if damages:
        raise CorruptCheckpoint(f"step {manifest.step}: {damages[0].file}: {damages[0].what}")
    checkpoint_index.commit(
        target,
        manifest.step,
        manifest.epoch,
        manifest.round,
        manifest.world_size,
        manifest.layout,
        manifest.shards,
        None,
    )


def copy_step(source: Path, manifest: Manifest, target: Path, progress: Progress = lambda size: None) -> None:
    """Make ``manifest``'s step of ``source`` a committed step of ``target``, the one committed last there.

    What was copied is read again and verified before it counts; ``progress`` hears of every byte twice. Raises
    CheckpointError when the step is there already or may not be committed there, CorruptCheckpoint when it is damaged,
    OSError. Nothing remains then.
    """
    with new_step(target, manifest.step, manifest.epoch, manifest.round) as staging:
        step = checkpoint_index.step_directory(source, manifest.step)
        for shard in manifest.shards:
            _copy_file(step / shard.file, staging / shard.file, progress)
        with contextlib.suppress(FileNotFoundError):
            _copy_file(step / checkpoint_index.VIEW, staging / checkpoint_index.VIEW, lambda size: None)
        commit_verified(target, staging, manifest, progress)


def _copy_file(source: Path, target: Path, progress: Progress) -> None:
    with (
        open(open_file(source), "rb", buffering=0) as read,
        open(target, "xb", buffering=0) as write,
    ):
        size = os.fstat(read.fileno()).st_size
        if size:
            os.posix_fallocate(write.fileno(), 0, size)  # a full disk shows now
        while data := read.read(_PIECE_BYTES):
            view = memoryview(data)
            while view:
                view = view[write.write(view) :]
            progress(len(data))
        os.fsync(write.fileno())
