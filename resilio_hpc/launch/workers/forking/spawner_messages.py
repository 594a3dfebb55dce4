"""Messages between the agent and its spawner process: one msgspec-JSON packet each, never pickle.

The socket is a Unix SOCK_SEQPACKET pair, so a message is whole or absent, and end-of-file means that the peer is gone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from resilio_hpc.core.struct_codec import StructCodec

MAX_BYTES = 1024 * 1024

Kind = Literal["script", "module", "command"]
Mode = Literal["fork", "exec", "mpi", "image"]


class RankCommand(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → spawner: start one rank.

    ``argv[0]`` is the script's path, the module's name or the program; ``env`` is set on top of the spawner's own
    environment; both outputs are opened for appending; ``cpus`` None leaves the affinity as the spawner's;
    ``open_files``: the soft limit on them that the user set, None leaves the spawner's; ``stdin_path`` "": nothing.
    ``after``: the rank's process before, of the same round: what it has left running ends first. ``image``: restore
    that process, which then waits for its place; where that fails (ImageFailed), the rank starts as without.
    """

    local_rank: int
    argv: tuple[str, ...]
    kind: Kind
    env: dict[str, str]
    cwd: str
    stdout_path: str
    stderr_path: str
    cpus: tuple[int, ...] | None = None
    open_files: int | None = None
    stdin_path: str = ""
    after: int = 0
    image: RankImage | None = None


class RankImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that CRIU has dumped into ``directory``. ``program``: CRIU; ``command``: started the process.

    ``inode``: of the process's connection to the agent; ``limit_s``: on the time that its restore may take.
    """

    program: str
    directory: str
    pid: int
    inode: int
    command: RankCommand
    limit_s: float


class OpenStore(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → spawner: hold a TCPStore for ``round`` in a process of its own; stores before ``round - 1`` end."""

    round: int
    host: str


class Stop(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → spawner: end all ranks and their descendants; stores of rounds below ``keep_stores_from`` end as well.

    ``heeded_only``: the grace is for processes that handle the signal. ``spare``: the ranks have ended well, and what
    they have left running is awaited for ``grace_s`` and not ended. ``keep``: ranks that live on, by their pids, and
    what is below them.
    """

    signal: int
    grace_s: float
    kill_timeout_s: float
    keep_stores_from: int | None = None
    heeded_only: bool = False
    spare: bool = False
    keep: tuple[int, ...] = ()


class Ready(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """spawner → agent: preloading is over after ``seconds``; ``why_not_fork`` is "" where ranks will be forked."""

    pid: int
    seconds: float
    threads: int
    why_not_fork: str


class Started(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """spawner → agent: a rank runs; ``why`` says why it was executed anew instead of forked."""

    local_rank: int
    pid: int
    time: float
    mode: Mode
    why: str


class ImageFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """spawner → agent: a process could not be restored; its rank starts without (Started or SpawnFailed follows)."""

    local_rank: int
    pid: int
    reason: str
    seconds: float


class SpawnFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """spawner → agent: a rank could not be started at all (no such directory, program, output file)."""

    local_rank: int
    error: str


class Exited(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """spawner → agent: a rank ended at ``time`` (Unix seconds), by ``exit_code`` or by ``signal``."""

    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    time: float
    mode: Mode


class StoreReady(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """store host → agent: the store of ``round`` listens on ``port``."""

    round: int
    port: int


class StoreDied(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """store host or spawner → agent: the store of ``round`` could not be opened, or ended without being told to."""

    round: int
    error: str


class AllStopped(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """spawner → agent: every rank and every descendant is gone and reaped, ``seconds`` after Stop arrived."""

    seconds: float


class StopFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """spawner → agent: ``pids`` outlived SIGKILL (uninterruptible sleep?); AllStopped follows if they go after all."""

    pids: tuple[int, ...]
    seconds: float


class SpawnerDied(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Made on the agent's side: the spawner process is gone.

    ``swept``: processes of its ranks that were left and killed.
    """

    exit_code: int | None
    signal: int | None
    time: float
    swept: tuple[int, ...]


Command = RankCommand | OpenStore | Stop
RankEvent = Ready | Started | SpawnFailed | Exited | StoreReady | StoreDied | AllStopped | StopFailed | SpawnerDied
SpawnerEvent = RankEvent | ImageFailed

to_spawner: StructCodec[Command] = StructCodec(Command, "a command to the spawner", MAX_BYTES)
from_spawner: StructCodec[SpawnerEvent] = StructCodec(SpawnerEvent, "an event of the spawner", MAX_BYTES)
