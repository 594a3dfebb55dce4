"""Committing a step to the directory of checkpoints: from an empty staging directory to one rename.

See ``checkpoint_index`` for the names.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from resilio_hpc.ckpt.format import manifest as records
from resilio_hpc.ckpt.format.manifest import Layout, Manifest, ShardRecord, Writer, read_manifest, why_incomplete
from resilio_hpc.ckpt.store import writers
from resilio_hpc.ckpt.store.checkpoint_index import (
    MANIFEST,
    MANIFEST_LIMIT,
    VIEW,
    expendable,
    manifests,
    remove_steps,
    step_directory,
    wrong_files,
)
from resilio_hpc.ckpt.store.fence import check_fence
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.staging import staging_directory, sweep
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint

_THREAD_END_S = 1.0  # seconds that the thread of a failed save may need to end


def open_staging(directory: Path, step: int, epoch: int, round_: int, writer: Writer) -> Path:
    """Return the staging directory of a save that begins, empty.

    Leftovers of dead saves are removed first: disks fill up. Only the one process, ``writer``, that begins it for all
    calls this. Raises CheckpointError when ``epoch`` may not commit, or when that step is being saved already; OSError.
    """
    store = store_of(directory)
    if not store.is_directory(directory, follow=True):  # making it syncs it, which ``begin`` does again
        store.make_directory(directory)
    _check_fence(directory, epoch)
    staging = staging_directory(directory, step, epoch, round_)
    if other := writers.at_work(staging, has_session=False, patience_s=_THREAD_END_S):
        raise CheckpointError(f"step {step} is being saved to {directory} already, by process {other.pid}")
    store.move_away(staging, "removed")
    sweep(directory, step, epoch, round_)
    writers.begin(staging, writer)
    return staging


def commit_step(
    directory: Path,
    step: int,
    epoch: int,
    round_: int,
    world_size: int,
    layout: Layout,
    shards: Sequence[ShardRecord],
    retention: Retention | None,
    session: str = "",
    writer: Writer | None = None,
) -> str:
    """Make ``step`` a committed checkpoint from its durable shards, then prune (None: no other step is removed).

    ``writer``: without a launcher, the process that asks. Returns "", or that another job writes here, too: its steps
    are neither replaced nor pruned. Raises CheckpointError when it must not be committed (another epoch's or job's
    business, or incomplete), OSError when the disk fails; older steps are untouched then.
    """
    store = store_of(directory)
    staging, final = staging_directory(directory, step, epoch, round_, session), step_directory(directory, step)
    existing: Manifest | None
    _, existing, wrong, names, found = store.together(
        partial(_check_fence, directory, epoch),
        partial(_read, final, step),
        partial(wrong_files, staging, shards, follow=False),
        partial(_names, staging),
        partial(manifests, directory),
    )
    if existing is not None and existing.epoch > epoch:
        raise CheckpointError(f"step {step} was committed in epoch {existing.epoch}, later than our {epoch}")
    asked_before = not session and existing is not None and (existing.epoch, existing.round) == (epoch, round_)
    if asked_before and not store.is_directory(staging, follow=True):
        return ""
    why = why_incomplete(shards, world_size) or "".join(f"{name} is missing or has another size. " for name in wrong)
    if why:
        raise CheckpointError(f"step {step} cannot be committed: {why}")
    others = {} if writer is None else writers.others_at_work(directory, writer, found)
    writers.check_former(directory, writer, existing)
    order = 1 + max((manifest.order for manifest in found), default=0)
    manifest = Manifest(step, epoch, round_, order, world_size, layout, tuple(shards), *filter(None, [writer]))
    store.write(staging / MANIFEST, records.write_manifest(manifest))
    left = {*names} - {MANIFEST, VIEW, *(shard.file for shard in shards)}  # notes, and what dead processes left

    def last_look() -> None:
        """Look at the fence again. Notes of writers go as late as possible, too: see ``sweep``."""
        removals = [partial(store.remove, staging / name, ignore_errors=False) for name in left]
        store.together(partial(_check_fence, directory, epoch), *removals)

    store.put_in_place(
        staging, final, lambda former: writers.check_former(directory, writer, _read(former, step)), last_look
    )
    store.sync(directory)
    # the step is committed, whatever happens to the rest

    def old() -> list[int]:
        if retention is None:
            return []
        known = [one for one in found if one.step != step and one.step not in others]
        return expendable(directory, retention, time.time(), known, manifest)

    with contextlib.suppress(OSError):
        _, steps = store.together(partial(_tell_latest, directory, step), old)
        remove_steps(directory, steps, recycle=True)
    with contextlib.suppress(OSError):
        sweep(directory, step, epoch, round_, session)
    return next((writers.words(directory, other) for other in others.values()), "")


def _tell_latest(directory: Path, step: int) -> None:
    with contextlib.suppress(OSError):
        store_of(directory).write(directory / "latest", f"{step}\n".encode())


def _names(staging: Path) -> list[str]:
    try:
        return store_of(staging).names(staging)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _check_fence(directory: Path, epoch: int) -> None:
    check_fence(directory, epoch, lambda: [manifest.epoch for manifest in manifests(directory)])


def _read(where: Path, step: int) -> Manifest | None:
    try:
        return read_manifest(store_of(where).read(where / MANIFEST, MANIFEST_LIMIT), step)
    except (CorruptCheckpoint, OSError):
        return None  # nothing, or nothing of worth
