"""The saver: a process of its own, at low priority, that writes snapshots from shared memory to disk.

``python -m resilio_hpc.ckpt.saver`` reads requests (see ``saver_messages``) as JSON lines from standard input, answers
each on standard output, in order, and ends with its input or its parent.
"""

from __future__ import annotations

import contextlib
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from resilio_hpc.ckpt import catalogue, helper_process
from resilio_hpc.ckpt.arena_source import ArenaSource
from resilio_hpc.ckpt.records import Layout
from resilio_hpc.ckpt.saver_messages import (
    Answer,
    Commit,
    Committed,
    Persist,
    Persisted,
    Request,
    SaverFailed,
    decode_request,
)
from resilio_hpc.core.durable import make_directory
from resilio_hpc.core.errors import CheckpointError, WireError, os_error_text
from resilio_hpc.core.json_lines import encode_line


def serve(request: Request) -> Answer:
    """Carry out one request. Never raises for what disks and arenas do: that is an answer."""
    try:
        return persist(request) if isinstance(request, Persist) else commit(request)
    except OSError as error:
        return SaverFailed(request.step, os_error_text(error, request.directory))
    except (CheckpointError, MemoryError) as error:
        return SaverFailed(request.step, f"{type(error).__name__}: {error}")


def persist(request: Persist) -> Persisted:
    """Write this node's shard file into the staging directory of that step and round."""
    from resilio_hpc.ckpt.shard_file import write_shard

    if not request.arenas:
        raise CheckpointError(f"step {request.step}: no arena was named")
    directory = Path(request.directory)
    staging = catalogue.staging_directory(directory, request.step, request.epoch, request.round, request.session)
    with ExitStack() as stack:
        arenas = [stack.enter_context(ArenaSource(Path(path))) for path in request.arenas]
        for arena in arenas:
            if arena.step != request.step or arena.header.world_size != request.world_size:
                raise CheckpointError(
                    f"the arena of rank {arena.header.rank} holds step {arena.step} of a world of "
                    f"{arena.header.world_size}, not step {request.step} of {request.world_size}"
                )
        if len({arena.header.layout for arena in arenas}) != 1:
            raise CheckpointError(f"step {request.step}: the ranks of this node do not have the same layout")
        if request.node_rank == 0:  # before the new ones need their room
            with contextlib.suppress(OSError):
                catalogue.sweep(directory, request.step, request.epoch, request.round, request.session)
        if not staging.is_dir():
            make_directory(staging)
        return Persisted(request.step, request.round, write_shard(arenas, staging, request.node_rank))


def commit(request: Commit) -> Committed:
    """Write the manifest and make the step appear."""
    started = time.monotonic()
    layouts: set[Layout] = {shard.layout for shard in request.shards}
    if len(layouts) != 1:
        raise CheckpointError(f"step {request.step}: the shards have the layouts {sorted(layouts)}, not one")
    catalogue.commit(
        Path(request.directory),
        request.step,
        request.epoch,
        request.round,
        request.world_size,
        layouts.pop(),
        request.shards,
        request.keep_last,
        request.session,
    )
    return Committed(request.step, time.monotonic() - started)


def main() -> int:
    """Serve until the input ends."""
    answers = helper_process.begin()
    if answers is None:
        return 0
    for line in sys.stdin.buffer:
        try:
            request = decode_request(line)
        except WireError as error:
            answers.write(encode_line(SaverFailed(-1, str(error))))
            continue
        answers.write(encode_line(serve(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
