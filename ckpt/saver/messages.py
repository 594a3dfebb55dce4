"""Messages between an agent and its saver: JSON lines on the saver's standard input and output."""

from __future__ import annotations

import msgspec

from resilio_hpc.ckpt.format.manifest import ShardRecord, Writer
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core.json_lines import LineDecoder


class Persist(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → saver: write this node's shard file of ``step`` from pinned arenas. Answer: Persisted or SaverFailed.

    ``local``: by way of this directory on the node's own disk, where ``local_keep`` committed steps stay beside this
    one; "": there is none. Local or LocalFailed comes before the
    answer then. ``holder``: whose files they are, on this machine. ``bytes_per_s``: to the shared file system, at most;
    0: as fast as it takes them. ``verify``: see ``retention.Retention.needs_verified_writes``.
    ``rank_0_s``: how long to wait for rank 0's checksums, in layout REPLICATED. ``writer``: see ``Manifest``.
    ``lent``: ranks without an arena, whose states the files in ``memory`` make with those (``lost_ranks.borrowed``).
    """

    step: int
    epoch: int
    round: int
    world_size: int
    node_rank: int
    arenas: list[str]
    directory: str
    local: str = ""
    holder: str = ""
    session: str = ""
    bytes_per_s: float = 0.0
    verify: bool = True
    rank_0_s: float = 120.0
    writer: Writer | None = None
    local_keep: int = 1
    lent: tuple[int, ...] = ()
    memory: str = ""


class Commit(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → saver: all shards are durable, write the manifest. Answer: Committed or SaverFailed."""

    step: int
    epoch: int
    round: int
    world_size: int
    directory: str
    shards: list[ShardRecord]
    retention: Retention = Retention()
    session: str = ""
    writer: Writer | None = None


class Abandon(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → saver: the round is over.

    A Persist before it that waits for rank 0's checksums fails: they may never come. It has no answer of its own.
    """


class Local(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: the file is durable on the node's own disk, and the arenas are not needed any more.

    It is no answer: the request goes on.
    """

    step: int
    size_bytes: int
    seconds: float


class LocalFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: the node's own disk did not take the file; it goes straight to the shared one.

    ``error``: why, and what to do. It is no answer either.
    """

    step: int
    error: str


class Persisted(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: the shard file is durable on the shared file system."""

    step: int
    round: int
    record: ShardRecord


class Committed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: the step is committed; ``seconds``: what the commit itself took.

    ``short``: a warning that the file system is about to be full, or "". ``differs``: the first place where replicated
    tensors differ. ``others``: a warning that another job writes there too.
    """

    step: int
    seconds: float
    short: str = ""
    differs: str = ""
    others: str = ""


class SaverFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: nothing of that request remains on disk; older steps are untouched."""

    step: int
    error: str


Request = Persist | Commit
Progress = Local | LocalFailed
Answer = Persisted | Committed | SaverFailed

decode_order = LineDecoder[Request | Abandon](Request | Abandon, "a request to the saver").decode
decode_answer = LineDecoder[Progress | Answer](Progress | Answer, "an answer of the saver").decode
