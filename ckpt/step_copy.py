"""Copying a committed step into another directory of checkpoints, verified on the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from resilio_hpc.ckpt import catalogue
from resilio_hpc.ckpt.records import Manifest
from resilio_hpc.ckpt.verify import Progress, verify_files
from resilio_hpc.core.durable import make_directory, sync_directory
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint

_PIECE_BYTES = 16 << 20
_KEEP_ALL = 1 << 62


def copy_step(source: Path, manifest: Manifest, target: Path, progress: Progress = lambda size: None) -> None:
    """Make ``manifest``'s step of ``source`` a committed step of ``target``, the one committed last there.

    What was copied is read again and verified before it counts; ``progress`` hears of every byte twice. Raises
    CheckpointError when the step is there already or may not be committed there, CorruptCheckpoint when it is damaged,
    OSError. Nothing remains then.
    """
    step, round_ = manifest.step, manifest.round
    if catalogue.step_directory(target, step).exists():
        raise CheckpointError(f"step {step} is in {target} already")
    make_directory(target)
    staging = catalogue.staging_directory(target, step, manifest.epoch, round_)
    try:
        staging.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{staging} is there: step {step} is being written, or its writer died; remove it"
        ) from None
    try:
        for shard in manifest.shards:
            _copy_file(catalogue.step_directory(source, step) / shard.file, staging / shard.file, progress)
        sync_directory(staging)
        damages = verify_files(staging, manifest, progress)
        if damages:
            raise CorruptCheckpoint(f"step {step}: {damages[0].file}: {damages[0].what}")
        catalogue.commit(
            target, step, manifest.epoch, round_, manifest.world_size, manifest.layout, manifest.shards, _KEEP_ALL
        )
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_file(source: Path, target: Path, progress: Progress) -> None:
    with (
        open(os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb", buffering=0) as read,
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
