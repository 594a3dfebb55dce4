"""The directory of committed checkpoints: what is there, and removing old steps. ``commit`` makes new ones.

    checkpoints/
      step-0000000100/          a committed step: appears whole, by one rename, and disappears the same way
        node-0.h5 …             one shard file per node
        manifest.json
        checkpoint.h5           all of it as one HDF5 file, once a user has asked for that (see ``view``)
        damaged                 why (text), once a restore or verify has found it so
      latest                    number of the step committed last (text), for people and scripts
      epoch-fence               the lowest epoch that may still commit (see ``fence``); absent: any
      .worn/                    shard files of a removed step, which the next one writes over
      .staging-step-…-e<epoch>-r<round>/   shards on their way (…-s<session>: of processes without a launcher;
                                …-whole: about to take the place of a former one)

Needs neither torch nor h5py.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
from collections.abc import Sequence
from functools import cache, partial
from numbers import Integral
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Manifest, ShardRecord, read_manifest
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.retention import CommittedStep, Retention
from resilio_hpc.ckpt.store.staging import STEP, empty_bin
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, UsageError, is_damage
from resilio_hpc.core.regular_file import NotRegular

MANIFEST = "manifest.json"
DAMAGED = "damaged"
VIEW = "checkpoint.h5"
MANIFEST_LIMIT = 1 << 30
_NOTE_LIMIT = 1 << 16


def check_step(step: object) -> int:
    """Return the number of a step, numpy's integers included. Raises UsageError for what cannot be one."""
    number = -1 if isinstance(step, bool) or not isinstance(step, Integral) else int(step)
    if not 0 <= number < 1 << 53:
        raise UsageError(f"step {step!r} is not a whole number from 0 on (to 2**53 - 1)")
    return number


def step_directory(directory: Path, step: int) -> Path:
    """Return where a committed step lies."""
    return directory / f"step-{step:010d}"


def committed_steps(directory: Path) -> list[int]:
    """Return every committed step with a valid manifest and files of the right sizes, in the order of commits.

    Raises OSError where that cannot be seen: it is not taken for an empty directory.
    """
    return [manifest.step for manifest in committed(directory)]


def committed(directory: Path) -> list[Manifest]:
    """Return the manifests of committed_steps, in its order (which is that of the commits, not of the numbers)."""
    return survey(directory)[0]


def manifests(directory: Path) -> list[Manifest]:
    """Return the manifests that are valid, in the order of commits. Their files are not looked at."""
    valid = [manifest for manifest in _manifests_or_why(directory).values() if isinstance(manifest, Manifest)]
    return sorted(valid, key=lambda manifest: (manifest.order, manifest.step))


def survey(directory: Path) -> tuple[list[Manifest], dict[int, str]]:
    """Return what ``committed`` returns, and what ``damaged_steps`` does, of one look."""
    found = _manifests_or_why(directory)
    valid = [manifest for manifest in found.values() if isinstance(manifest, Manifest)]
    looks = [partial(wrong_files, step_directory(directory, one.step), one.shards) for one in valid]
    bad = {one.step: names for one, names in zip(valid, store_of(directory).together(*looks), strict=True)}
    why = {step: manifest for step, manifest in found.items() if isinstance(manifest, str)}
    why |= {
        step: f"{', '.join(names[:5])}: missing, or not as large as it was written"
        for step, names in bad.items()
        if names
    }
    good = [manifest for manifest in valid if not bad[manifest.step]]
    return sorted(good, key=lambda manifest: (manifest.order, manifest.step)), dict(sorted(why.items()))


def damaged_steps(directory: Path) -> dict[int, str]:
    """Return steps that exist, but not in ``committed``, and why."""
    return survey(directory)[1]


def _manifests_or_why(directory: Path) -> dict[int, Manifest | str]:
    steps = _numbers(directory)
    found = store_of(directory).together(*(partial(_manifest_or_why, directory, step) for step in steps))
    return dict(zip(steps, found, strict=True))


def _manifest_or_why(directory: Path, step: int) -> Manifest | str:
    """Return its manifest, or what is wrong with it.

    Raises OSError that is no damage: then nothing is known of the step.
    """
    try:
        return manifest_of(directory, step)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        if not is_damage(error):
            raise
        return str(error)


def note_damage(directory: Path, step: int, why: str) -> None:
    """Note in a step that it was found damaged, and why; "": it was found good.

    Pruning does not count on a damaged one; restores still try it. A note that cannot be written is no error. Nothing
    is noted behind a link.
    """
    store, where = store_of(directory), step_directory(directory, step)
    if not store.is_directory(where):
        return
    with contextlib.suppress(OSError):
        if why:
            store.create(where / DAMAGED, f"{why}\n".encode("utf-8", "backslashreplace"))
        else:
            store.remove(where / DAMAGED)


def noted_damage(directory: Path, step: int) -> str:
    """Return why a step was found damaged; "" when it was not."""
    try:
        data = store_of(directory).read(step_directory(directory, step) / DAMAGED, _NOTE_LIMIT)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    return data.decode("utf-8", "backslashreplace").strip() or "it was found so"


def why_latest_is_wrong(directory: Path) -> str:
    """Return why no commit wrote this ``latest``; "" when one did (it may be old), or it is missing. Raises OSError."""
    try:
        text = store_of(directory).read(directory / "latest", 40)
    except FileNotFoundError:
        return ""
    except NotRegular as error:
        return error.strerror or ""
    if text in [f"{step}\n".encode() for step in _numbers(directory)]:
        return ""
    return f"it says {text.decode('ascii', 'backslashreplace')!r}, and no step of that number is here"


def manifest_of(directory: Path, step: int) -> Manifest:
    """Return the manifest of one step. Raises CorruptCheckpoint, CheckpointError for a newer format, OSError."""
    try:
        data = store_of(directory).read(step_directory(directory, step) / MANIFEST, MANIFEST_LIMIT + 1)
    except NotRegular as error:
        raise CorruptCheckpoint(f"manifest of step {step}: {error.strerror}") from error
    if len(data) > MANIFEST_LIMIT:
        raise CorruptCheckpoint(f"manifest of step {step} is larger than {MANIFEST_LIMIT} bytes")
    return read_manifest(data, step)


def expendable(
    directory: Path, retention: Retention, now: float, known: Sequence[Manifest] | None = None, *new: Manifest
) -> list[int]:
    """Return the committed steps that ``retention`` does not keep. ``now``: Unix time.

    ``known``: what ``manifests`` returns, where that was just asked for. ``new``: committed just now, after those.
    """
    store = store_of(directory)

    def state(manifest: Manifest) -> CommittedStep | None:
        step = step_directory(directory, manifest.step)
        wrong, is_damaged = store.together(
            partial(wrong_files, step, manifest.shards), partial(store.exists, step / DAMAGED)
        )
        if wrong:
            return None
        return CommittedStep(manifest.step, committed_at(directory, manifest.step), manifest.size_bytes, is_damaged)

    known = manifests(directory) if known is None else known
    steps = filter(None, store.together(*(partial(state, manifest) for manifest in known)))
    return retention.expendable([*steps, *(CommittedStep(one.step, now, one.size_bytes) for one in new)], now)


def committed_at(directory: Path, step: int) -> float:
    """Return the Unix time of a step's commit. Raises OSError."""
    found = store_of(directory).look(path := step_directory(directory, step) / MANIFEST, follow=True)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return found.changed_ns / 1e9


def prune(directory: Path, retention: Retention, now: float) -> list[int]:
    """Remove what ``retention`` does not keep, and all that is of no use; the steps removed. Raises OSError."""
    old = expendable(directory, retention, now)
    remove_recycled(directory)
    remove_steps(directory, old)
    return old


def recycled(directory: Path) -> Path:
    """Return where the shard files of a removed step wait to be overwritten."""
    return directory / ".worn"


def remove_recycled(directory: Path) -> None:
    """Remove the files that no later step is expected to overwrite. Raises nothing."""
    with contextlib.suppress(OSError):
        store_of(directory).move_away(recycled(directory), "removed")
        empty_bin(directory)


@cache  # once for each
def remove_recycled_at_exit(directory: Path) -> None:
    """Remove these files at this process's exit: it makes no later step."""
    atexit.register(remove_recycled, directory)


def remove_steps(directory: Path, steps: Sequence[int], recycle: bool = False) -> None:
    """Remove these steps. ``recycle``: keep the files of one, for the next step to write over. Raises OSError."""
    store = store_of(directory)
    gone = store.together(*(partial(store.move_away, step_directory(directory, step), "removed") for step in steps))
    if gone:
        store.sync(directory)  # otherwise a power cut could give a step its name back without its files
        with contextlib.suppress(OSError):
            if recycle:
                store.recycle(gone[-1], recycled(directory))
    store.together(*(partial(store.remove, path) for path in gone))


def _numbers(directory: Path) -> list[int]:
    try:
        names = store_of(directory).names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(found[1]) for name in names if (found := STEP.fullmatch(name)))


def wrong_files(where: Path, shards: Sequence[ShardRecord], follow: bool = True) -> list[str]:
    """Return the shard files that are missing, or have another size than they were written with."""
    sizes = store_of(where).sizes(where, [shard.file for shard in shards], follow)
    return [shard.file for shard, size in zip(shards, sizes, strict=True) if size != shard.size_bytes]
