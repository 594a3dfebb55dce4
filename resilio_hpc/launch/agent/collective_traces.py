"""What communication libraries write in the round after a collective failed, and where it is kept (OPS-3).

The controller asks for it in ``Start.trace``. NCCL then logs to a file of each rank, and torch's flight recorder dumps
each rank's last calls when a collective times out. Both are files of the node's own disk. When the round is over, they
go to the run directory by way of the spool. The next round has none of this, unless a collective failed again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, wait
from functools import cache
from importlib import metadata
from pathlib import Path

from resilio_hpc.core import bounded
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.node_context import NodeContext

FOLDER = "traces"
DUMP = "nccl_trace_rank_"  # torch adds the rank
LOG = "nccl-%h-%p.log"  # NCCL fills in host and process
ENTRIES = "2000"  # calls that a rank's flight recorder keeps
MOST_LOG_BYTES = 1 << 20  # of the end of a rank's log
MOST_NODE_BYTES = 64 << 20
MOST_BYTES = 2 << 30  # of all nodes together
CLOSE_S = 2.0


@cache
def _knows_new_names() -> bool:
    """Return whether torch is new enough to warn, on each rank, of the recorder's former name (before 2.7)."""
    try:
        major, minor = metadata.version("torch").split(".")[:2]
        return (int(major), int(minor)) >= (2, 7)
    except (metadata.PackageNotFoundError, ValueError):
        return False  # the ranks' torch may be one that is not installed here


def variables(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is set for ranks; nothing that the user has set.

    No library reads these when it is loaded, so forked ranks have them, too.
    """
    wanted = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(directory / LOG),
        "TORCH_FR_BUFFER_SIZE": ENTRIES,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(directory / DUMP),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(directory / DUMP),
    }
    if not _knows_new_names():
        wanted["TORCH_NCCL_TRACE_BUFFER_SIZE"] = ENTRIES
    if "NCCL_DEBUG" in environment:  # the user's output stays where the user wants it
        wanted.pop("NCCL_DEBUG_FILE")
    return {name: value for name, value in wanted.items() if name not in environment}


class CollectiveTraces:
    """The traces of one node's ranks. ``spool``: what is under it comes to the run directory."""

    def __init__(self, node: NodeContext, spool: Path) -> None:
        self._node = node
        self._spool = spool
        self._round = -1  # of the files that are being written; -1: none
        self._nodes = 1
        self._kept: tuple[int, Future[tuple[int, int]]] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for the ranks of this round."""
        return variables(self._directory(self._round), os.environ) if self._round >= 0 else {}

    def _directory(self, number: int) -> Path:
        return self._node.local_dir / FOLDER / str(number)

    def begin(self, start: m.Start) -> None:
        """Keep what the last round's ranks wrote, and let those of this one write if that is wanted."""
        self._keep()
        if start.trace:
            self._round, self._nodes = start.state.round, len(start.state.members)
            self._directory(self._round).mkdir(parents=True, exist_ok=True)

    def _keep(self) -> None:
        number, self._round = self._round, -1
        if number < 0:
            return
        source, target = self._directory(number), self._spool / FOLDER / str(number) / self._node.name
        most = min(MOST_NODE_BYTES, max(MOST_LOG_BYTES, MOST_BYTES // self._nodes))
        self._kept = number, bounded.begin(lambda: keep(source, target, most))

    def tick(self) -> None:
        """Tell where the files are, once they are there."""
        if self._kept is None or not self._kept[1].done():
            return
        number, kept = self._kept
        self._kept = None
        if error := kept.exception():
            self._node.record("traces_lost", round=number, error=str(error))
            return
        files, size = kept.result()
        if files:
            place = self._node.run.path / FOLDER / str(number) / self._node.name
            self._node.record("traces", round=number, files=files, bytes=size, directory=str(place))

    def close(self) -> None:
        """Keep the last round's files."""
        self._keep()
        if self._kept is not None:
            wait([self._kept[1]], CLOSE_S)
            self.tick()


def keep(source: Path, target: Path, most: int) -> tuple[int, int]:
    """Move at most ``most`` bytes of files to ``target``: dumps first and whole, then the ends of logs.

    Return how many files and bytes there are.
    """
    files = total = 0
    for path in sorted(source.iterdir(), key=lambda path: (not path.name.startswith(DUMP), path.name)):
        size = path.stat().st_size
        wanted = size if path.name.startswith(DUMP) else min(size, MOST_LOG_BYTES)
        if not size or wanted > most - total or path.is_symlink() or not path.is_file():
            continue
        target.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            read.seek(size - wanted)
            write.write(read.read(wanted))
        files, total = files + 1, total + wanted
    shutil.rmtree(source, ignore_errors=True)
    return files, total
