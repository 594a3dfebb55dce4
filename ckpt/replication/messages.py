"""Messages between an agent and its replicator (JSON lines), and between replicators of two nodes (wire)."""

from __future__ import annotations

import secrets

import msgspec

from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord
from resilio_hpc.core.json_lines import LineDecoder
from resilio_hpc.core.snapshot_transport import SnapshotTransport
from resilio_hpc.core.wire import Codec

Life = tuple[int, int]
"""(epoch, round) of a start of all ranks; later ones are larger."""
ANY: Life = (-1, -1)
TOKEN_BYTES = KEY_BYTES = 32
TCP = "tcp"
SILENT_S = 10.0
"""Nothing came for so long: the other side is gone."""


class ServeSnapshots(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → replicator, once and first: listen on ``host``. Answer: Serving.

    ``arenas``: this node's own snapshots; ``copies``: those of others; ``spill``: where copies go that do not fit into
    memory; ``silent_s``: another node that sends nothing for so long is gone; ``transport``: ``auto``, ``tcp`` or
    ``fabric``.
    """

    secret: str
    host: str
    arenas: str
    copies: str
    spill: str
    silent_s: float = SILENT_S
    transport: SnapshotTransport = "tcp"


class Fetch(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → replicator: copy the snapshots of ``step`` of these ranks from the replicator at ``endpoint``.

    ``into_arenas``: they become snapshots of this node's own ranks, the first of which is local rank 0 of
    ``local_world_size``; else they are kept for the other node, which gives them when it has begun ``life``.
    ``as_replicas``: of those, only what this node's own snapshots of the step do not have (see ``replica_copies``).
    Answer: Fetched or FetchFailed, with ``number``.
    """

    number: int
    step: int
    ranks: list[int]
    world_size: int
    endpoint: str
    life: Life = ANY
    into_arenas: bool = False
    first_rank: int = 0
    local_world_size: int = 0
    as_replicas: bool = False


class Begin(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → replicator: this node has begun ``life``, and its arenas hold only snapshots that belong to it.

    Of the copies, only these (rank, step) belong to it. Until this message, requests because of that life have to wait.
    """

    life: Life
    copies: list[tuple[int, int]]


class Follow(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → replicator: take the records of boundaries of these ranks from the replicator at ``endpoint``.

    It goes on until another one follows. See ``boundary_records``.
    """

    endpoint: str
    ranks: list[int]


class MakeLost(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → replicator: make copies of ``step`` for the followed ranks, which may be lost. Answer: LostMade."""

    number: int
    step: int
    world_size: int


class Cancel(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → replicator: cancel these fetches, if they are not done. They get no answer any more."""

    numbers: list[int]


class Serving(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """replicator → agent: others may fetch here."""

    port: int


class Fetched(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """replicator → agent: all of it is here, whole. ``by``: what moved the bytes, see ``transport.Lane``."""

    number: int
    size_bytes: int
    seconds: float
    by: str = TCP


class StillFetching(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """replicator → agent, every second or so: the fetch goes on."""

    number: int


class FetchFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """replicator → agent: some of it was not available. ``no_replicas``: too much of it is on no other node."""

    number: int
    error: str
    no_replicas: bool = False


class LostMade(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """replicator → agent: copies of that step are here for these ranks."""

    number: int
    step: int
    world_size: int
    ranks: list[int]


Request = ServeSnapshots | Fetch | Begin | Cancel | Follow | MakeLost
Answer = Serving | StillFetching | Fetched | FetchFailed | LostMade

decode_request = LineDecoder[Request](Request, "a request to the replicator").decode
decode_answer = LineDecoder[Answer](Answer, "an answer of the replicator").decode


class Want(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Request: keep the snapshot of ``step`` of ``rank`` for the caller, of ``life``.

    ``ranges``: the parts of it to send, by offset and size; ``table``: its table alone. Answer: Have or Miss, but none
    before the other node has begun that life.
    """

    rank: int
    step: int
    world_size: int
    life: Life = ANY
    table: bool = False
    ranges: tuple[tuple[int, int], ...] = ()


class WantRecords(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Request: the records of these ranks' boundaries that this caller has not got yet. Answer: NewRecords, in time."""

    ranks: tuple[int, ...]


class Release(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The caller needs it no more."""


class FabricPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What leads to registered memory: provider of libfabric, address of the endpoint (see ``fabric``)."""

    provider: str
    address: bytes
    token: bytes


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the bytes are given once, to the first caller.

    One that sends ``token`` gets them there (see ``core.encrypted_stream``); one that sends the token of ``fabric``
    reads them in this node's memory. None: only the first is possible.
    """

    port: int
    token: bytes
    key: bytes
    fabric: FabricPlace | None = None

    @classmethod
    def new(cls, port: int, fabric: FabricPlace | None = None) -> Stream:
        """Return one with a token that cannot be guessed."""
        return cls(port, secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(KEY_BYTES), fabric)


class Have(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """It is kept; ``header``: the first page of its arena. The rest, or what was asked for, comes over ``stream``."""

    rank: int
    step: int
    header: bytes
    stream: Stream


class RankBoundary(msgspec.Struct, frozen=True, array_like=True):
    """What a rank left at a boundary."""

    rank: int
    record: BoundaryRecord


class NewRecords(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """New records, the oldest first."""

    records: tuple[RankBoundary, ...]


class Miss(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """It is not here (any more)."""

    error: str


Asked = Want | WantRecords | Release
Given = Have | NewRecords | Miss
asking: Codec[Asked] = Codec(Asked)
giving: Codec[Given] = Codec(Given)
