"""Copies a committed step into another directory of checkpoints, verified on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Manifest
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.commit import commit_step
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.ckpt.store.verify import verify_files
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint

_PIECE_BYTES = 16 << 20


@contextmanager
def new_step(target: Path, step: int, epoch: int, round_: int) -> Iterator[Path]:
    """Give a staging directory for a step that ``target`` (made if missing) does not have.

    At the end it is removed, with what was not committed. Raises CheckpointError when the step exists, or is on its
    way; OSError.
    """
    store = store_of(target)
    if store.exists(checkpoint_index.step_directory(target, step)):
        raise CheckpointError(f"step {step} is in {target} already")
    store.make_directory(target)
    staging = staging_directory(target, step, epoch, round_)
    try:
        store.make_new_directory(staging)
    except FileExistsError:
        raise CheckpointError(
            f"{staging} is there: step {step} is being written, or its writer died; remove it"
        ) from None
    try:
        yield staging
    finally:
        store.remove(staging)


def commit_verified(target: Path, staging: Path, manifest: Manifest, progress: Progress) -> None:
    """Commit the staged files after they were read again and match. No older step is removed.

    Raises CorruptCheckpoint, CheckpointError when it may not be committed there, OSError.
    """
    store_of(staging).sync(staging)
    damages = verify_files(staging, manifest, progress)
    if damages:
        raise CorruptCheckpoint(f"step {manifest.step}: {damages[0].file}: {damages[0].what}")
    commit_step(
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
    """Commit ``manifest``'s step of ``source`` in ``target``, as the newest one there.

    The copy is read again and verified before the commit; ``progress`` is called twice for every byte. Raises
    CheckpointError when the step exists already or may not be committed there, CorruptCheckpoint when it is damaged,
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
        contextlib.closing(store_of(source).open(source)) as read,
        store_of(target).new_file(target) as write,
    ):
        write.allocate(read.size_bytes)
        at = 0
        while data := read.pread(_PIECE_BYTES, at):
            write.write_small(memoryview(data), at)
            at += len(data)
            progress(len(data))
