"""Shard files of steps that were removed, which the next step writes over in the place of new ones.

To give the room of a large file back to a file system and to ask for as much costs it as much as the write itself, and
time of processors; so databases write over the segments of their logs. A file is taken where no process has it open
and it has no other name: see ``durable.new_file``.
"""

from __future__ import annotations

import os
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import is_shard_name
from resilio_hpc.core import regular_file
from resilio_hpc.core.durable import is_ours_alone


def worn(directory: Path) -> Path:
    """Where those of a directory of steps are, if there are any."""
    return directory / ".worn"


def strip(step: Path) -> bool:
    """Leave nothing but the shard files in the directory of a step that was removed: whether they may be written over.

    Behind a link nothing is changed. Raises OSError.
    """
    if not regular_file.is_real_directory(step):
        return False  # a link to a step that lies elsewhere
    shards = []
    for path in list(step.iterdir()):
        if is_shard_name(path.name):
            shards.append(path)
        else:
            regular_file.remove(path, ignore_errors=False)
    if not shards:
        return False
    fd = regular_file.open_file(shards[0], os.O_RDWR)
    try:
        return is_ours_alone(fd)
    finally:
        os.close(fd)
