"""Directories on their way: shards before their commit, the commit's rename, and what is to be removed.

Every directory gets or loses its name by one rename. See ``checkpoint_index`` for the names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from resilio_hpc.ckpt.store import writers
from resilio_hpc.core import regular_file
from resilio_hpc.core.durable import exchange
from resilio_hpc.core.errors import CheckpointError

STEP = re.compile(r"step-(\d{10,18})")
_STAGING = re.compile(r"\.staging-step-(\d{10,18})-e(\d{1,18})-r(\d{1,18})(?:-s([0-9a-f]{1,32}))?(-whole)?")
_GOING = re.compile(  # as ``move_away`` names them; others' files beside the steps may have names like these
    rf"\.(removed|replaced)-({STEP.pattern}|{_STAGING.pattern[2:]}|worn)-\d+-[0-9a-f]{{8}}"
)
_UNFINISHED = re.compile(r"\.latest\.[a-z0-9_]{8}\.tmp")  # of a process that died while it wrote `latest`


def staging_directory(directory: Path, step: int, epoch: int, round_: int, session: str = "") -> Path:
    """Where the shards of a step are written before its commit: never shared between rounds, nor between sessions."""
    return directory / f".staging-step-{step:010d}-e{epoch}-r{round_}{session and f'-s{session}'}"


def staged(directory: Path, session: str) -> dict[Path, int]:
    """Return the staging directories of a session, and their steps. Raises OSError."""
    found = {path: _STAGING.fullmatch(path.name) for path in directory.iterdir()}
    return {path: int(name[1]) for path, name in found.items() if name and name[4] == session}


def give_up(directory: Path, session: str) -> None:
    """Take the staging directories of a session away: its savers can commit nothing any more. Raises OSError."""
    for path in staged(directory, session):
        move_away(path, "removed")
    empty_bin(directory)


def sweep(directory: Path, step: int, epoch: int, round_: int, session: str = "") -> None:
    """Remove what earlier, failed saves left behind: shards older than these, or of this step but of another session.

    What other saves are writing stays. Raises OSError.
    """
    ours = (epoch, round_, step)
    for path in list(directory.iterdir()):
        if found := _STAGING.fullmatch(path.name):
            theirs = (int(found[2]), int(found[3]), int(found[1]))
            their_session = found[4] or ""
            if theirs > ours or (theirs == ours and their_session == session):
                continue
            is_own = bool(session) and their_session == session  # which saves one step after the other
            if is_own or writers.at_work(path, bool(their_session)) is None:
                move_away(path, "removed")
    empty_bin(directory)


def remove_strangers(staging: Path, files: Collection[str]) -> None:
    """Remove all but ``files`` and the writers' notes: what processes that died left in here. Raises OSError."""
    for path in list(staging.iterdir()):
        if path.name not in files and not path.name.startswith(writers.NOTE):
            regular_file.remove(path, ignore_errors=False)


def put_in_place(staging: Path, final: Path, check: Callable[[Path], None]) -> None:
    """Make the step appear. At every instant ``final`` is the former one of that number, or the new one.

    ``check`` raises CheckpointError for a former one that has to stay; it may have come just before.

    A file system that cannot exchange two names (NFS) has neither for an instant; a kill just then loses the former.
    The new one has a name of its own by then: under that of the staging directory, the former could be taken for it.
    """
    if not os.path.lexists(final):
        try:
            staging.rename(final)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    whole = staging.with_name(f"{staging.name}-whole")
    move_away(whole, "removed")  # of a process that died just here
    staging.rename(whole)
    if exchange(whole, final):
        try:
            check(whole)
        except CheckpointError:
            exchange(whole, final)
            raise
    else:
        check(final)
        former = move_away(final, "replaced")
        try:
            whole.rename(final)
        except OSError:
            former.rename(final)
            raise
    move_away(whole, "replaced")


def move_away(path: Path, why: str) -> Path:
    """Rename before removing: a step is there whole, or not at all. Returns the new path; it may not exist."""
    target = path.with_name(f".{why}-{path.name.lstrip('.')}-{os.getpid()}-{os.urandom(4).hex()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(target)
    return target


def empty_bin(directory: Path) -> None:
    """Remove what ``move_away`` renamed, here or in a process that died, and its temporary files. Raises OSError."""
    for path in list(directory.iterdir()):
        if _UNFINISHED.fullmatch(path.name) or _GOING.fullmatch(path.name):
            regular_file.remove(path)
