"""The saver of a process without a launcher: it writes that process's part of a step, and commits or waits for rank 0.

``saver_process`` starts ``main`` with a socket as standard input and output. A packet is a request, with the descriptor
of its arena, or an answer, both as JSON. Where no process can be started, ``save`` is called instead.

A sent request stays in the socket, and its descriptor keeps the arena (a path below /proc/PID ends with that process).
So no request is lost with the process that sent it: it is carried out, and then this process ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.manifest import ShardRecord, Writer
from resilio_hpc.ckpt.restore.arena_source import Mappings
from resilio_hpc.ckpt.saver import detached_savers, saver
from resilio_hpc.ckpt.saver.messages import Answer, Commit, Committed, Persist, Persisted, Progress, SaverFailed
from resilio_hpc.ckpt.store import checkpoint_index, writers
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.staging import staged, staging_directory
from resilio_hpc.core import helper_process
from resilio_hpc.core.errors import CheckpointError, os_error_text
from resilio_hpc.core.json_lines import LineDecoder, encode_line

READY = b"ready\n"
"""The first packet of a saver: it has all that it needs."""
_PACKET_BYTES = 64 << 10
_ERROR_CHARACTERS = 4000
_POLL_S = 0.02
_LOOK_S = 1.0
_ALONE_LIMIT_S = 1800.0
"""For how long a saver outlives the process that asked it, at most."""
ALONE_STALL_S = 10.0
"""After how long without a sign of the other processes' savers it takes them for dead, too."""


class Save(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request: write this process's part of ``step`` and see it committed. Answer: Committed or SaverFailed."""

    step: int
    round: int
    rank: int
    world_size: int
    directory: str
    session: str
    retention: Retention
    peers_timeout_s: float
    local: str
    holder: str
    bytes_per_s: float = 0.0
    alone_stall_s: float = ALONE_STALL_S
    writer: Writer | None = None
    local_keep: int = 1


class _Shard(msgspec.Struct, frozen=True):
    """A process's note to rank 0 that its shard is durable.

    ``session`` tells this run from one that died here before.
    """

    session: str
    record: ShardRecord | None = None
    error: str = ""


decode_request = LineDecoder[Save](Save, "a request to the saver").decode


def receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors; b"" when the other end is gone and all that it sent was received."""
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(link, _PACKET_BYTES, 1)
            return packet, descriptors
        except ConnectionResetError:
            continue  # it died before it read all answers; its own requests come next


def save(
    request: Save,
    arena: str,
    alone: threading.Event,
    say: Callable[[Progress], None],
    mappings: Mappings | None = None,
) -> Answer:
    """Carry out a request; ``say`` is called with its progress.

    Raises nothing: all that wait for this save must get its end. ``alone`` is set when the process that asked is dead.
    ``mappings``: see ``saver.serve``.
    """
    started = time.monotonic()
    try:
        note = _note_path(request, request.rank)
        looks = [partial(store_of(note).remove, note)]  # left by an earlier save of this step
        if request.rank == 0:
            looks.append(partial(detached_savers.wait_for_orphans, Path(request.directory), request.session))
        store_of(note).together(*looks)
        record = _persist(request, arena, say, mappings)
        store_of(note).write(note, msgspec.json.encode(_Shard(request.session, record)))
        done = Committed(request.step, 0.0)
        if request.rank == 0:
            done = _commit(request, record, alone)
        else:
            _await_commit(request, alone)
    except Exception as error:  # noqa: BLE001
        text = os_error_text(error, request.directory) if isinstance(error, OSError) else str(error)
        text = (text or type(error).__name__)[:_ERROR_CHARACTERS]
        note_failure(request, text)
        return SaverFailed(request.step, text)
    return msgspec.structs.replace(done, seconds=time.monotonic() - started)


def note_failure(request: Save, error: str) -> None:
    """Note the failure: other processes need not wait for this one, and staged files can go."""
    if request.writer is not None:
        writers.take_back(_note_path(request, request.rank).parent, request.writer)
    if request.world_size > 1:
        with contextlib.suppress(OSError):
            path = _note_path(request, request.rank)
            writers.make_staging(path.parent, None)
            store_of(path).write(path, msgspec.json.encode(_Shard(request.session, error=error)))


def _persist(request: Save, arena: str, say: Callable[[Progress], None], mappings: Mappings | None) -> ShardRecord:
    rank, world = request.rank, request.world_size
    asked = Persist(
        request.step, 0, request.round, world, rank, [arena], request.directory,
        request.local, request.holder, request.session, request.bytes_per_s, request.retention.needs_verified_writes,
        request.peers_timeout_s, request.writer, request.local_keep,
    )  # fmt: skip
    answer = saver.serve(asked, say, mappings, why_never=partial(_why_rank_0_failed, request))
    if isinstance(answer, SaverFailed):
        raise CheckpointError(answer.error)
    assert isinstance(answer, Persisted)
    return answer.record


def _why_rank_0_failed(request: Save) -> str:
    note = _read_note(request, 0)
    return f"rank 0: {note.error}" if note is not None and note.error else ""


def _commit(request: Save, record: ShardRecord, alone: threading.Event) -> Committed:
    progress = detached_savers.Progress(Path(request.directory), request.session)

    def others_are_dead() -> bool:
        return alone.is_set() and progress.idle_s() > request.alone_stall_s

    shards = [record, *(_shard_of(rank, request, others_are_dead) for rank in range(1, request.world_size))]
    if alone.is_set() and not detached_savers.is_marked(Path(request.directory), request.session):
        raise CheckpointError("another run has taken over")
    asked = Commit(
        request.step, 0, request.round, request.world_size, request.directory, shards,
        request.retention, request.session, request.writer,
    )  # fmt: skip
    answer = saver.serve(asked)
    if isinstance(answer, SaverFailed):
        raise CheckpointError(answer.error)
    assert isinstance(answer, Committed)
    return answer


def _shard_of(rank: int, request: Save, others_are_dead: Callable[[], bool]) -> ShardRecord:
    """Wait until that rank's part is durable."""
    deadline, look = time.monotonic() + request.peers_timeout_s, time.monotonic() + _LOOK_S
    while (note := _read_note(request, rank)) is None:
        now = time.monotonic()
        if now > deadline:
            raise CheckpointError(f"rank {rank} has not written its part within {request.peers_timeout_s:g} s")
        if now > look:
            look = now + _LOOK_S
            later = [path for path, step in _staged(request).items() if step > request.step]
            if any(_read(path / _note_name(rank), request.session) for path in later):
                raise CheckpointError(f"rank {rank} went on without it")
            if others_are_dead():
                raise CheckpointError(f"rank {rank} has died, too")
        time.sleep(_POLL_S)
    if note.record is None:
        raise CheckpointError(f"rank {rank}: {note.error}")
    return note.record


def _await_commit(request: Save, alone: threading.Event) -> None:
    """Wait for rank 0's commit, which renames the staging directory away.

    Its next save removes the staging directory.
    """
    staging = _note_path(request, 0).parent
    deadline = time.monotonic() + request.peers_timeout_s
    store = store_of(staging)
    while store.is_directory(staging, follow=True):
        if alone.is_set():
            return  # rank 0 has this part, and no process waits
        if time.monotonic() > deadline:
            raise CheckpointError(f"rank 0 has not committed within {request.peers_timeout_s:g} s")
        if why := _why_rank_0_failed(request):
            raise CheckpointError(why)
        time.sleep(_POLL_S)
    if not store.is_directory(checkpoint_index.step_directory(Path(request.directory), request.step), follow=True):
        raise CheckpointError("rank 0 did not commit it")


def _staged(request: Save) -> dict[Path, int]:
    return staged(Path(request.directory), request.session)


def _note_name(rank: int) -> str:
    return f".shard-{rank}.json"


def _note_path(request: Save, rank: int) -> Path:
    directory = Path(request.directory)
    staging = staging_directory(directory, request.step, 0, request.round, request.session)
    return staging / _note_name(rank)


def _read_note(request: Save, rank: int) -> _Shard | None:
    return _read(_note_path(request, rank), request.session)


def _read(path: Path, session: str) -> _Shard | None:
    try:
        note = msgspec.json.decode(store_of(path).read(path), type=_Shard)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if note.session == session else None


def main() -> None:
    """Serve until the process that asks is gone; its last request is finished first."""
    answers = helper_process.begin("local_saver", outlives_parent=True)
    assert answers is not None
    from resilio_hpc.ckpt.store import shard_file  # noqa: F401 - what takes longest to import, before it is needed

    link = socket.socket(fileno=0)
    with contextlib.suppress(OSError):  # no process reads the answers; its requests are still there to be read
        answers.write(READY)
    alone, mappings = threading.Event(), Mappings()

    def tell(word: Progress | Answer) -> None:
        with contextlib.suppress(OSError):  # no process reads it
            answers.write(encode_line(word))

    def work(request: Save, arena: int) -> None:
        answer = save(request, f"/proc/self/fd/{arena}", alone, tell, mappings)
        os.close(arena)
        mappings.let_go()
        tell(answer)

    with ThreadPoolExecutor(1) as writer:
        request, written = None, None
        while (received := receive(link))[0]:
            request = decode_request(received[0])
            written = writer.submit(work, request, received[1][0])
        if request is None or written is None:
            return
        if request.rank == 0:
            written.add_done_callback(partial(_expect_no_more, Path(request.directory)))
        if written.done():
            return
        limit = threading.Timer(_ALONE_LIMIT_S, os._exit, (1,))  # a file system may hang
        limit.daemon = True
        limit.start()
        _let_go_of_output()
        if request.rank == 0:
            with detached_savers.marked(Path(request.directory), request.session):
                alone.set()
                wait([written])
        else:
            alone.set()


def _expect_no_more(directory: Path, last: Future[None]) -> None:
    checkpoint_index.remove_recycled(directory)


def _let_go_of_output() -> None:
    """Close the output: a reader of the dead process's output waits for its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
