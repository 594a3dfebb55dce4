"""Staging directories: shards before their commit, and steps that are to be removed.

See ``checkpoint_index`` for the names.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from resilio_hpc.ckpt.store import writers
from resilio_hpc.ckpt.store.mounts import store_of

STEP = re.compile(r"step-(\d{10,18})")
_STAGING = re.compile(r"\.staging-step-(\d{10,18})-e(\d{1,18})-r(\d{1,18})(?:-s([0-9a-f]{1,32}))?(-whole)?")


def staging_directory(directory: Path, step: int, epoch: int, round_: int, session: str = "") -> Path:
    """Return where a step's shards are written before its commit: never shared between rounds, nor between sessions."""
    return directory / f".staging-step-{step:010d}-e{epoch}-r{round_}{session and f'-s{session}'}"


def staged(directory: Path, session: str) -> dict[Path, int]:
    """Return the staging directories of a session, and their steps. Raises OSError."""
    found = {name: _STAGING.fullmatch(name) for name in store_of(directory).names(directory, steps=False)}
    return {directory / name: int(parts[1]) for name, parts in found.items() if parts and parts[4] == session}


def give_up(directory: Path, session: str) -> None:
    """Move the staging directories of a session away: its savers can commit nothing any more. Raises OSError."""
    for path in staged(directory, session):
        store_of(directory).move_away(path, "removed")
    empty_bin(directory)


def sweep(directory: Path, step: int, epoch: int, round_: int, session: str = "") -> None:
    """Remove what earlier, failed saves left: shards older than these, or of this step but of another session.

    Shards that other saves are writing stay. Raises OSError.
    """
    ours = (epoch, round_, step)
    store = store_of(directory)
    gone = []
    for name in store.names(directory, steps=False):
        if store.is_moved_away(name):
            gone.append(directory / name)
        elif found := _STAGING.fullmatch(name):
            theirs = (int(found[2]), int(found[3]), int(found[1]))
            their_session = found[4] or ""
            if theirs > ours or (theirs == ours and their_session == session):
                continue
            is_own = bool(session) and their_session == session  # it saves one step after the other
            if is_own or writers.at_work(directory / name, bool(their_session)) is None:
                gone.append(store.move_away(directory / name, "removed"))
    store.together(*(partial(store.remove, path) for path in gone))


def empty_bin(directory: Path) -> None:
    """Remove what was moved away, here or by a process that died, and its temporary files. Raises OSError."""
    store = store_of(directory)
    for name in store.names(directory, steps=False):
        if store.is_moved_away(name):
            store.remove(directory / name)
