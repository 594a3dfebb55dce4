"""Read-ahead: the kernel reads what this node's ranks will restore while they initialise (RES-6, RES-14).

``python -m resilio_hpc.ckpt.restore.read_ahead REQUEST`` (a ReadAhead as JSON) is a process of its own, because the
file system may hang. What was read stays in the page cache, which the kernel takes back where memory runs short; ranks
that are faster than the disk wait for the rest as for any read.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.files import ReadFile
from resilio_hpc.ckpt.format.manifest import Manifest
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.tiers import local_disk
from resilio_hpc.core import helper_process
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.core.memory_left import MemoryLeft, memory_left

NEWEST = -1
_PIECE_BYTES = 1 << 20
_Range = tuple[ReadFile, int, int]
_MEMORY_FACTOR = 4  # the ranks' tensors and two snapshots are still to come, beside the cache


class ReadAhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request: read the parts of ``ranks`` of a world. ``step``: NEWEST, the one that was committed last.

    ``begun``: a file that holds the number of the step as soon as it is being read; ranks look there. ``others``: nodes
    from whose disks ranks read what is not on their own (``peer_disks``); that is not read ahead.
    """

    directory: str
    step: int
    world_size: int
    ranks: tuple[int, ...]
    begun: str
    local: str = ""
    others: tuple[str, ...] = ()


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result: bytes of a step that were read, or are about to be.

    0: none, for the reason given, or without a step.
    """

    step: int
    size_bytes: int
    seconds: float
    why_not: str = ""


def read_ahead(request: ReadAhead, left: MemoryLeft | None) -> Done:
    """Read ahead; ``left``: the memory that may still be used.

    Raises CheckpointError, OSError; may hang with the file system.
    """
    started = time.monotonic()
    manifest = _manifest(Path(request.directory), request.step)
    if manifest is None:
        return Done(NEWEST, 0, 0.0)
    if manifest.layout == "own" and manifest.world_size != request.world_size:
        return Done(manifest.step, 0, 0.0, "another number of ranks saved it: which parts are wanted is not known")
    with contextlib.ExitStack() as stack:
        parts = _parts(request, manifest, stack)
        size = sum(length for part in parts for _, _, length in part)
        if left is not None and left.left_bytes < _MEMORY_FACTOR * size:
            return Done(manifest.step, 0, 0.0, f"{left.left_bytes >> 20} MiB of memory are left for {size >> 20} MiB")
        write_atomic(Path(request.begun), b"%d" % manifest.step, durable=False)
        for some in zip_longest(*map(_pieces, parts)):  # in turns, so that no rank waits for all of another's
            for file, offset, length in filter(None, some):
                file.read_ahead(offset, length)
        return Done(manifest.step, size, time.monotonic() - started)


def _manifest(directory: Path, step: int) -> Manifest | None:
    if step != NEWEST:
        return checkpoint_index.manifest_of(directory, step)
    good = [
        found
        for found in checkpoint_index.committed(directory)
        if not checkpoint_index.noted_damage(directory, found.step)
    ]
    return good[-1] if good else None


def _parts(request: ReadAhead, manifest: Manifest, stack: contextlib.ExitStack) -> list[list[_Range]]:
    """Return the ranges that each rank will read: (file, offset, size), in the order of the file, each once."""
    directory = Path(request.directory)
    copies: Mapping[str, Path] = {}
    if request.local:
        with contextlib.suppress(OSError):  # the ranks, which read it too, will report it
            copies = local_disk.copies(Path(request.local), directory, manifest)
    known: set[tuple[tuple[int, int], int]] = set()
    parts = []
    for rank in request.ranks:
        source = stack.enter_context(
            CommittedSource(
                checkpoint_index.step_directory(directory, manifest.step), manifest, rank, request.world_size,
                manifest.layout, copies=copies,
            )
        )  # fmt: skip
        mine = []
        for record in source.tensors:
            file = source.whole(record).reader.file
            where = file.identity, record.offset
            if source.node_of(record) in request.others:
                continue
            if record.offset >= 0 and record.size_bytes and where not in known:
                known.add(where)
                mine.append((file, record.offset, record.size_bytes))
        parts.append(sorted(mine, key=lambda part: (part[0].identity, part[1])))
    return parts


def _pieces(part: list[_Range]) -> Iterator[_Range]:
    for file, offset, size in part:
        for at in range(offset, offset + size, _PIECE_BYTES):
            yield file, at, min(_PIECE_BYTES, offset + size - at)


def main() -> int:
    """Read, and print the result in one line on standard output."""
    answers = helper_process.begin("read_ahead")
    if answers is None:
        return 0
    request = msgspec.json.decode(sys.argv[1], type=ReadAhead)
    try:
        done = read_ahead(request, memory_left())
    except (CheckpointError, OSError) as error:
        done = Done(request.step, 0, 0.0, str(error))
    answers.write(encode_line(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
