"""The directory of committed checkpoints: what is there, committing a step, and removing old ones.

    checkpoints/
      step-0000000100/          a committed step: appears whole, by one rename, and disappears the same way
        node-0.h5 …             one shard file per node
        manifest.json
        checkpoint.h5           all of it as one HDF5 file, once somebody has asked for that (see ``view``)
        damaged                 why (text), once a restore or verify has found it so
      latest                    number of the step committed last (text), for people and scripts
      epoch-fence               the lowest epoch that may still commit (text); absent: any
      .worn/                    shard files of a step that was removed (see ``worn_files``)
      .staging-step-…-e<epoch>-r<round>/   shards on their way (…-s<session>: of processes without a launcher;
                                …-whole: about to take the place of a former one)

Needs neither torch nor h5py.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import time
from collections.abc import Collection, Sequence
from functools import cache
from numbers import Integral
from pathlib import Path

from resilio_hpc.ckpt.records import Layout, Manifest, ShardRecord, read_manifest, why_incomplete, write_manifest
from resilio_hpc.ckpt.retention import CommittedStep, Retention
from resilio_hpc.ckpt.worn_files import strip, worn
from resilio_hpc.core import regular_file
from resilio_hpc.core.durable import exchange, make_directory, sync_directory, write_atomic
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, UsageError
from resilio_hpc.core.regular_file import NotRegular

MANIFEST = "manifest.json"
DAMAGED = "damaged"
VIEW = "checkpoint.h5"
_MANIFEST_LIMIT = 1 << 30
_NOTE_LIMIT = 1 << 16
_STEP = re.compile(r"step-(\d{10,18})")
_STAGING = re.compile(r"\.staging-step-(\d{10,18})-e(\d{1,18})-r(\d{1,18})(?:-s([0-9a-f]{1,32}))?(-whole)?")
_GOING = re.compile(  # as ``_move_away`` names them; others' files beside the steps may have names like these
    rf"\.(removed|replaced)-({_STEP.pattern}|{_STAGING.pattern[2:]}|worn)-\d+-[0-9a-f]{{8}}"
)
_UNFINISHED = re.compile(r"\.latest\.[a-z0-9_]{8}\.tmp")  # of a process that died while it wrote `latest`


def check_step(step: object) -> int:
    """The number of a step, numpy's integers included. Raises UsageError for what cannot be one."""
    number = -1 if isinstance(step, bool) or not isinstance(step, Integral) else int(step)
    if not 0 <= number < 1 << 53:
        raise UsageError(f"step {step!r} is not a whole number from 0 on")
    return number


def step_directory(directory: Path, step: int) -> Path:
    """Where a committed step lies."""
    return directory / f"step-{step:010d}"


def staging_directory(directory: Path, step: int, epoch: int, round_: int, session: str = "") -> Path:
    """Where the shards of a step are written before its commit: never shared between rounds, nor between sessions."""
    return directory / f".staging-step-{step:010d}-e{epoch}-r{round_}{session and f'-s{session}'}"


def open_staging(directory: Path, step: int, epoch: int, round_: int) -> Path:
    """The staging directory of a save that begins, empty. What saves that died left behind goes first: disks fill up.

    Only for whoever begins it for all of its processes. Raises CheckpointError when ``epoch`` may not commit, OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _check_fence(directory, epoch)
    staging = staging_directory(directory, step, epoch, round_)
    _move_away(staging, "removed")
    sweep(directory, step, epoch, round_)
    staging.mkdir()
    sync_directory(directory)
    return staging


def make_staging(staging: Path) -> None:
    """Make a staging directory where there is none, durable; a link of that name goes. Raises OSError."""
    if staging.is_symlink():
        with contextlib.suppress(OSError):  # another process was faster
            staging.unlink()
    if not staging.is_dir():
        make_directory(staging)


def committed_steps(directory: Path) -> list[int]:
    """Every committed step whose manifest is right and whose files have their sizes, the one committed last, last."""
    return [manifest.step for manifest in committed(directory)]


def committed(directory: Path) -> list[Manifest]:
    """The manifests of committed_steps, in its order (which is that of the commits, not of the numbers)."""
    found = []
    for step in _numbers(directory):
        try:
            manifest = manifest_of(directory, step)
        except (CheckpointError, OSError):
            continue
        where = step_directory(directory, step)
        if all(_has_size(where / s.file, s.size_bytes) for s in manifest.shards):
            found.append(manifest)
    return sorted(found, key=lambda manifest: (manifest.order, manifest.step))


def damaged_steps(directory: Path) -> dict[int, str]:
    """Steps that are there, but not in ``committed``, and why."""
    why: dict[int, str] = {}
    for step in _numbers(directory):
        try:
            manifest = manifest_of(directory, step)
        except (CheckpointError, OSError) as error:
            why[step] = str(error)
            continue
        where = step_directory(directory, step)
        bad = [s.file for s in manifest.shards if not _has_size(where / s.file, s.size_bytes)]
        if bad:
            why[step] = f"{', '.join(bad[:5])}: missing, or not as large as it was written"
    return why


def note_damage(directory: Path, step: int, why: str) -> None:
    """Note in a step that it was found damaged, and why; "": it was found good.

    Whoever prunes does not count on a damaged one; restores still try it. It is no error that it cannot be written.
    Nothing is noted behind a link.
    """
    if not regular_file.is_real_directory(step_directory(directory, step)):
        return
    path = step_directory(directory, step) / DAMAGED
    with contextlib.suppress(OSError):
        if why:
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{why}\n")
        else:
            path.unlink()


def noted_damage(directory: Path, step: int) -> str:
    """Why a step was found damaged; "" when it was not."""
    try:
        data = regular_file.read_file(step_directory(directory, step) / DAMAGED, _NOTE_LIMIT)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    return data.decode("utf-8", "backslashreplace").strip() or "it was found so"


def check_not_all_damaged(directory: Path) -> None:
    """Raises CorruptCheckpoint when there are steps and none is good: to begin anew then is not ours to decide."""
    damaged = damaged_steps(directory)
    if damaged and not committed_steps(directory):
        step, why = max(damaged.items())
        raise CorruptCheckpoint(
            f"every step in {directory} is damaged; step {step}: {why} (to begin anew, remove them)"
        )


def why_latest_is_wrong(directory: Path) -> str:
    """Why ``latest`` is nothing that a commit wrote; "" when it is (it may be behind), or not there. Raises OSError."""
    try:
        text = regular_file.read_file(directory / "latest", 40)
    except FileNotFoundError:
        return ""
    except NotRegular as error:
        return error.strerror or ""
    if text in [f"{step}\n".encode() for step in _numbers(directory)]:
        return ""
    return f"it says {text.decode('ascii', 'backslashreplace')!r}, and no step of that number is here"


def manifest_of(directory: Path, step: int) -> Manifest:
    """The manifest of one step. Raises CorruptCheckpoint, CheckpointError for a newer format, OSError."""
    try:
        data = regular_file.read_file(step_directory(directory, step) / MANIFEST, _MANIFEST_LIMIT + 1)
    except NotRegular as error:
        raise CorruptCheckpoint(f"manifest of step {step}: {error.strerror}") from error
    if len(data) > _MANIFEST_LIMIT:
        raise CorruptCheckpoint(f"manifest of step {step} is larger than {_MANIFEST_LIMIT} bytes")
    return read_manifest(data, step)


def fence(directory: Path) -> int:
    """The lowest epoch that may still commit."""
    try:
        return int(regular_file.read_file(directory / "epoch-fence", 40))
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise CheckpointError(f"{directory / 'epoch-fence'} is not a number; write the current epoch to it") from error


def raise_fence(directory: Path, epoch: int) -> None:
    """From now on refuse every commit of an epoch below ``epoch``."""
    if epoch > fence(directory):
        write_atomic(directory / "epoch-fence", f"{epoch}\n".encode())


def commit(
    directory: Path,
    step: int,
    epoch: int,
    round_: int,
    world_size: int,
    layout: Layout,
    shards: Sequence[ShardRecord],
    retention: Retention | None,
    session: str = "",
) -> None:
    """Make ``step`` a committed checkpoint from its durable shards, then prune (None: no other step is removed).

    Raises CheckpointError when it must not be committed (another epoch's business, or incomplete), OSError when the
    disk fails; older steps are untouched then.
    """
    staging, final = staging_directory(directory, step, epoch, round_, session), step_directory(directory, step)
    _check_fence(directory, epoch)
    existing = _existing(directory, step)
    if existing is not None and existing.epoch > epoch:
        raise CheckpointError(f"step {step} was committed in epoch {existing.epoch}, later than our {epoch}")
    asked_before = not session and existing is not None and (existing.epoch, existing.round) == (epoch, round_)
    if asked_before and not staging.is_dir():
        return
    why = why_incomplete(shards, world_size) or "".join(
        f"{shard.file} is missing or has another size. "
        for shard in shards
        if not _has_size(staging / shard.file, shard.size_bytes, follow=False)
    )
    if why:
        raise CheckpointError(f"step {step} cannot be committed: {why}")
    _remove_strangers(staging, {VIEW, *(shard.file for shard in shards)})
    found = committed(directory)
    order = 1 + max((manifest.order for manifest in found), default=0)
    manifest = Manifest(step, epoch, round_, order, world_size, layout, tuple(shards))
    write_atomic(staging / MANIFEST, write_manifest(manifest))
    _check_fence(directory, epoch)  # again: the shards took long
    _put_in_place(staging, final)
    sync_directory(directory)
    # the step is committed, whatever becomes of the rest
    with contextlib.suppress(OSError):
        write_atomic(directory / "latest", f"{step}\n".encode())
    with contextlib.suppress(OSError):
        if retention is not None:
            others = [known for known in found if known.step != step]
            _remove(directory, expendable(directory, retention, time.time(), [*others, manifest]), keep_worn=True)
        sweep(directory, step, epoch, round_, session)


def expendable(directory: Path, retention: Retention, now: float, known: Sequence[Manifest] | None = None) -> list[int]:
    """The committed steps that ``retention`` does not keep. ``now``: Unix time.

    ``known``: what ``committed`` gives, where that was just asked for: it looks at every file of every step.
    """
    steps = []
    for manifest in committed(directory) if known is None else known:
        path = step_directory(directory, manifest.step)
        steps.append(
            CommittedStep(
                manifest.step, (path / MANIFEST).stat().st_mtime, manifest.size_bytes, (path / DAMAGED).exists()
            )
        )
    return retention.expendable(steps, now)


def prune(directory: Path, retention: Retention, now: float) -> list[int]:
    """Remove what ``retention`` does not keep, and all that is of no use; the steps removed. Raises OSError."""
    old = expendable(directory, retention, now)
    remove_worn(directory)
    _remove(directory, old)
    return old


def remove_worn(directory: Path) -> None:
    """No step is expected that would write over the files of a removed one. Raises nothing."""
    with contextlib.suppress(OSError):
        _move_away(worn(directory), "removed")
        _empty_bin(directory)


@cache  # once for each
def remove_worn_at_exit(directory: Path) -> None:
    """When this process ends, none is expected any more."""
    atexit.register(remove_worn, directory)


def _remove(directory: Path, steps: Sequence[int], keep_worn: bool = False) -> None:
    gone = [_move_away(step_directory(directory, step), "removed") for step in steps]
    if gone:
        sync_directory(directory)  # else a power cut could give a step its name back, and not its files
        with contextlib.suppress(OSError):
            if keep_worn and strip(gone[-1]):
                _move_away(worn(directory), "removed")
                gone[-1].rename(worn(directory))
    _empty_bin(directory)


def staged(directory: Path, session: str) -> dict[Path, int]:
    """The staging directories of a session, and their steps. Raises OSError."""
    found = {path: _STAGING.fullmatch(path.name) for path in directory.iterdir()}
    return {path: int(name[1]) for path, name in found.items() if name and name[4] == session}


def give_up(directory: Path, session: str) -> None:
    """Whoever still writes for that session can commit nothing of it any more. Raises OSError."""
    for path in staged(directory, session):
        _move_away(path, "removed")
    _empty_bin(directory)


def sweep(directory: Path, step: int, epoch: int, round_: int, session: str = "") -> None:
    """Remove what earlier, failed saves left behind: shards older than these, or of this step but of another session.

    Raises OSError.
    """
    ours = (epoch, round_, step)
    for path in list(directory.iterdir()):
        if found := _STAGING.fullmatch(path.name):
            theirs = (int(found[2]), int(found[3]), int(found[1]))
            if theirs < ours or (theirs == ours and (found[4] or "") != session):
                _move_away(path, "removed")
    _empty_bin(directory)


def _remove_strangers(staging: Path, files: Collection[str]) -> None:
    """What processes that died left in here, and the notes of those that live, do not belong to the step."""
    for path in list(staging.iterdir()):
        if path.name not in files:
            regular_file.remove(path)


def _put_in_place(staging: Path, final: Path) -> None:
    """Make the step appear. At every instant ``final`` is the former one of that number, or the new one.

    A file system that cannot exchange two names (NFS) has neither for an instant; a kill just then loses the former.
    The new one has a name of its own by then: under that of the staging directory, the former could be taken for it.
    """
    if not os.path.lexists(final):
        staging.rename(final)
        return
    whole = staging.with_name(f"{staging.name}-whole")
    _move_away(whole, "removed")  # of a process that died just here
    staging.rename(whole)
    if not exchange(whole, final):
        former = _move_away(final, "replaced")
        try:
            whole.rename(final)
        except OSError:
            former.rename(final)
            raise
    _move_away(whole, "replaced")


def _move_away(path: Path, why: str) -> Path:
    """Rename first: a step is there whole, or not at all. Where to; nothing happens to what is not there."""
    target = path.with_name(f".{why}-{path.name.lstrip('.')}-{os.getpid()}-{os.urandom(4).hex()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(target)
    return target


def _empty_bin(directory: Path) -> None:
    for path in list(directory.iterdir()):
        if _UNFINISHED.fullmatch(path.name) or _GOING.fullmatch(path.name):
            regular_file.remove(path)


def _check_fence(directory: Path, epoch: int) -> None:
    lowest = fence(directory)
    if epoch < lowest:
        raise CheckpointError(f"epoch {epoch} may not commit any more: epoch {lowest} has taken over")


def _existing(directory: Path, step: int) -> Manifest | None:
    try:
        return manifest_of(directory, step)
    except (CorruptCheckpoint, OSError):
        return None  # nothing, or nothing of worth


def _numbers(directory: Path) -> list[int]:
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))


def _has_size(path: Path, size: int, follow: bool = True) -> bool:
    return regular_file.size_of(path, follow) == size
