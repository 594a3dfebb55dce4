"""The saver: a process of its own, at low priority, that writes snapshots from shared memory to disk.

``python -m resilio_hpc.ckpt.saver.saver`` reads requests (see ``messages``) as JSON lines from standard input, answers
each on standard output, in order, and ends with its input or its parent. With a disk of the node's own, files are
written to that disk first, and then copied to the shared file system.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.manifest import Checks, Layout, ShardRecord
from resilio_hpc.ckpt.replication import lost_ranks, replicas
from resilio_hpc.ckpt.replication.replicas import Differences
from resilio_hpc.ckpt.restore.arena_source import ArenaSource, Mappings
from resilio_hpc.ckpt.restore.borrowed_source import BorrowedSource
from resilio_hpc.ckpt.saver.messages import (
    Abandon,
    Answer,
    Commit,
    Committed,
    LocalFailed,
    Persist,
    Persisted,
    Progress,
    Request,
    SaverFailed,
    decode_order,
)
from resilio_hpc.ckpt.saver.write_through import LocalWay
from resilio_hpc.ckpt.store import checkpoint_index, writers
from resilio_hpc.ckpt.store.commit import commit_step
from resilio_hpc.ckpt.store.coverage import check_slabs
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.space_trend import SpaceTrend
from resilio_hpc.ckpt.store.staging import staging_directory, sweep
from resilio_hpc.ckpt.tiers.bounded_io import PATIENCE, Patience
from resilio_hpc.ckpt.tiers.local_disk import advice
from resilio_hpc.core import helper_process
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, WireError, os_error_text
from resilio_hpc.core.json_lines import encode_line


def serve(
    request: Request,
    say: Callable[[Progress], None] = lambda progress: None,
    mappings: Mappings | None = None,
    patience: Patience = PATIENCE,
    why_never: Callable[[], str] = lambda: "",
) -> Answer:
    """Carry out one request; ``say`` is called with its progress.

    Errors of disks and arenas are answers, never raised.

    ``mappings``: where arenas stay mapped, if many requests are served; ``patience``: with the node's own disk;
    ``why_never``: returns why rank 0 will not write its part, once that is known.
    """
    try:
        if isinstance(request, Commit):
            return commit(request)
        return persist(request, say, mappings, patience, why_never)
    except OSError as error:
        return SaverFailed(request.step, os_error_text(error, request.directory))
    except (CheckpointError, MemoryError) as error:
        return SaverFailed(request.step, f"{type(error).__name__}: {error}")


def persist(
    request: Persist,
    say: Callable[[Progress], None],
    mappings: Mappings | None,
    patience: Patience = PATIENCE,
    why_never: Callable[[], str] = lambda: "",
) -> Persisted:
    """Write this node's shard file into the staging directory of that step and round, if asked through its own disk.

    Once it is on that disk the arenas may be overwritten, so what that disk then loses is lost: this save fails.
    """
    with ExitStack() as memory:
        arenas = _open_arenas(request, memory, mappings)
        staging = cache(partial(_staging, request))
        found = replicas.compare(arenas, request.world_size, staging, request.rank_0_s, why_never)
        _check_kept(arenas, found)
        if request.local:
            record = LocalWay(request, arenas, memory.close, say, staging, patience, found.numbers).take()
            if isinstance(record, ShardRecord):
                return _persisted(request, record, found)
            text = f"{os_error_text(record, request.local)}: {advice(record)}"
            say(LocalFailed(request.step, f"{text}; until then steps go straight to {request.directory}"))
        return _persisted(request, _write_directly(request, arenas, staging(), found), found)


def _check_kept(arenas: Sequence[ArenaSource], found: Differences) -> None:
    """Raise CheckpointError where a rank has left out what no other rank writes (``ckpt.reduced_snapshot``)."""
    for arena in arenas:
        for number in found.numbers.get(arena.header.rank, ()):
            record = arena.tensors[number]
            if record.offset < 0 < record.size_bytes:
                raise CheckpointError(
                    f"{record.path} of rank {arena.header.rank} is another tensor than rank 0's, and its snapshot has "
                    "left it out for lack of memory"
                )


def _persisted(request: Persist, record: ShardRecord, found: Differences) -> Persisted:
    checks = Checks(record.checks.slabs if record.checks else "", found.base, found.first)
    return Persisted(request.step, request.round, msgspec.structs.replace(record, checks=checks))


def _write_directly(request: Persist, arenas: Sequence[ArenaSource], staging: Path, found: Differences) -> ShardRecord:
    from resilio_hpc.ckpt.store.shard_file import write_shard

    return write_shard(
        arenas, staging, request.node_rank, bytes_per_s=request.bytes_per_s, verify=request.verify,
        recycled=checkpoint_index.recycled(Path(request.directory)), own=found.numbers,
    )  # fmt: skip


def _open_arenas(request: Persist, stack: ExitStack, mappings: Mappings | None) -> list[ArenaSource]:
    if not request.arenas:
        raise CheckpointError(f"step {request.step}: no arena was named")
    arenas = [stack.enter_context(ArenaSource(Path(path), mappings)) for path in request.arenas]
    for rank in request.lent:
        lent = lost_ranks.borrowed(Path(request.memory), rank, request.step, request.world_size)
        if lent is None:
            raise CheckpointError(f"step {request.step}: what rank {rank} left of it is gone")
        arenas.append(stack.enter_context(BorrowedSource(lent, mappings)))
    arenas.sort(key=lambda arena: arena.header.rank)
    for arena in arenas:
        if arena.step != request.step or arena.header.world_size != request.world_size:
            raise CheckpointError(
                f"the arena of rank {arena.header.rank} holds step {arena.step} of a world of "
                f"{arena.header.world_size}, not step {request.step} of {request.world_size}"
            )
    if len({arena.header.layout for arena in arenas}) != 1:
        raise CheckpointError(f"step {request.step}: the ranks of this node do not have the same layout")
    return arenas


def _staging(request: Persist) -> Path:
    """Return the directory on the shared file system for the files of this save."""
    directory = Path(request.directory)

    def swept() -> None:
        """Remove leftovers, before the new files need their space."""
        if request.node_rank == 0:
            with contextlib.suppress(OSError):
                sweep(directory, request.step, request.epoch, request.round, request.session)

    staging = staging_directory(directory, request.step, request.epoch, request.round, request.session)
    store_of(directory).together(swept, partial(writers.make_staging, staging, request.writer))
    return staging


def commit(request: Commit) -> Committed:
    """Write the manifest and make the step appear."""
    started = time.monotonic()
    layouts: set[Layout] = {shard.layout for shard in request.shards}
    if len(layouts) != 1:
        raise CheckpointError(f"step {request.step}: the shards have the layouts {sorted(layouts)}, not one")
    directory = Path(request.directory)
    _check(request, directory)
    others = commit_step(
        directory,
        request.step,
        request.epoch,
        request.round,
        request.world_size,
        layouts.pop(),
        [msgspec.structs.replace(shard, checks=msgspec.UNSET) for shard in request.shards],
        request.retention,
        request.session,
        request.writer,
    )
    seconds = time.monotonic() - started
    short = _space(directory, sum(shard.size_bytes for shard in request.shards))
    differs = next((shard.checks.differs for shard in request.shards if shard.checks and shard.checks.differs), "")
    return Committed(request.step, seconds, short, differs, others)


def _check(request: Commit, directory: Path) -> None:
    """Raise CheckpointError where the shards do not belong together, OSError."""
    staging = staging_directory(directory, request.step, request.epoch, request.round, request.session)
    if len({shard.checks.base for shard in request.shards if shard.checks}) > 1:
        raise CheckpointError(
            f"step {request.step}: the nodes compared their tensors with those of two different saves"
        )
    try:
        check_slabs(directory, staging, request.shards)
    except CorruptCheckpoint:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"step {request.step} cannot be committed: {error}") from error


def _space(directory: Path, step_bytes: int) -> str:
    """Return a warning of low space, or ""."""
    try:
        free_bytes = store_of(directory).free_bytes(directory)
    except OSError:
        return ""
    trend = _trends.setdefault(directory, SpaceTrend())
    text = trend.committed(time.monotonic(), free_bytes, step_bytes)
    return text and f"{directory}: {text}"


_trends: dict[Path, SpaceTrend] = {}


class _Orders:
    """The lines of standard input, which are also read while a request is carried out."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._data = bytearray()  # a line that is not complete: a commit of thousands of nodes takes many reads
        self._waiting: deque[Request | Abandon | WireError] = deque()

    def __iter__(self) -> Iterator[Request | Abandon | WireError]:
        while self._waiting or self._read():
            while self._waiting:
                yield self._waiting.popleft()

    def why_abandoned(self, request: Request) -> str:
        """Return why ``request`` is of no use any more, or "".

        Its round is over, or another step was requested meanwhile.
        """
        while select.select([self._descriptor], [], [], 0)[0] and self._read():
            pass
        for order in self._waiting:
            if isinstance(order, Abandon):
                return "the round is over"
            if not isinstance(order, WireError) and (order.round, order.step) != (request.round, request.step):
                return f"step {order.step} was asked for meanwhile"
        return ""

    def _read(self) -> bool:
        """Read a part of the input; return False at its end."""
        data = os.read(self._descriptor, 1 << 20)
        self._data += data
        if b"\n" not in data:
            return bool(data)
        *lines, self._data = self._data.split(b"\n")
        for line in lines:
            try:
                self._waiting.append(decode_order(bytes(line)))
            except WireError as error:
                self._waiting.append(error)
        return bool(data)


def main() -> int:
    """Serve until the input ends."""
    answers = helper_process.begin("saver")
    if answers is None:
        return 0

    def tell(word: Progress | Answer) -> None:
        answers.write(encode_line(word))

    mappings = Mappings()
    directories = set()
    orders = _Orders(sys.stdin.fileno())
    for order in orders:
        if isinstance(order, WireError):
            tell(SaverFailed(-1, str(order)))
        elif not isinstance(order, Abandon):
            directories.add(Path(order.directory))
            tell(serve(order, tell, mappings, why_never=partial(orders.why_abandoned, order)))
            mappings.let_go()
    for directory in directories:
        checkpoint_index.remove_recycled(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
