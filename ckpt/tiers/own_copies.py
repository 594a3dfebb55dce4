"""Which committed steps a node's own disk holds, and of which ranks. Its contents are not read.

``python -m resilio_hpc.ckpt.tiers.own_copies DIR CHECKPOINTS HOLDER`` prints them as one line of JSON. It is a process
of its own, because that disk or the shared file system may hang.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.manifest import Manifest
from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.tiers.disk_layout import STEP, check_directory, holder_directory, is_private
from resilio_hpc.core import helper_process
from resilio_hpc.core.errors import CheckpointError

MOST = 8


def own_copies(directory: Path, checkpoints: Path, holder: str) -> list[OwnCopy]:
    """Return the copies of ``holder`` below ``directory`` that a committed manifest names, at most MOST, newest first.

    A file counts by its name and size: each of its blocks is verified when it is read. Raises OSError.
    """
    check_directory(directory)
    mine = holder_directory(directory, checkpoints, holder)
    if not is_private(mine):
        return []
    found: list[OwnCopy] = []
    names = sorted(
        (name for path in mine.iterdir() if (name := STEP.fullmatch(path.name))), key=lambda name: int(name[1])
    )
    for name in reversed(names):
        step, epoch, round_ = (int(number) for number in name.groups())
        try:
            manifest = checkpoint_index.manifest_of(checkpoints, step)
        except (CheckpointError, OSError):
            continue  # it was never committed, or is removed
        if (manifest.epoch, manifest.round) == (epoch, round_) and is_private(mine / name[0]):
            found += _of_step(mine / name[0], manifest)
    return found[:MOST]


def _of_step(path: Path, manifest: Manifest) -> list[OwnCopy]:
    found = []
    for shard in manifest.shards:
        ranks = sorted(record.rank for record in shard.ranks)
        if ranks == list(range(ranks[0], ranks[0] + len(ranks))) and _size(path / shard.file) == shard.size_bytes:
            found.append(OwnCopy(manifest.step, ranks[0], len(ranks), manifest.world_size))
    return found


def _size(path: Path) -> int:
    """Return the size of a regular file; -1 for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def main() -> int:
    """Print the copies."""
    answers = helper_process.begin("own_copies", is_urgent=True)
    if answers is None:
        return 0
    directory, checkpoints, holder = sys.argv[1:4]
    try:
        found = own_copies(Path(directory), Path(checkpoints), holder)
    except OSError as error:
        print(error, file=sys.stderr)
        found = []
    answers.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
