"""What an agent and its saver say to each other: JSON lines on the saver's standard input and output."""

from __future__ import annotations

import msgspec

from resilio_hpc.ckpt.records import ShardRecord
from resilio_hpc.core.errors import WireError


class Persist(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → saver: write this node's shard file of ``step`` from pinned arenas. Answer: Persisted or SaverFailed."""

    step: int
    epoch: int
    round: int
    world_size: int
    node_rank: int
    arenas: list[str]
    directory: str


class Commit(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → saver: all shards are durable, write the manifest. Answer: Committed or SaverFailed."""

    step: int
    epoch: int
    round: int
    world_size: int
    directory: str
    shards: list[ShardRecord]
    keep_last: int = 3


class Persisted(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: the shard file is durable."""

    step: int
    round: int
    record: ShardRecord


class Committed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: the step is committed; ``seconds`` is what the commit itself took."""

    step: int
    seconds: float


class SaverFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """saver → agent: nothing of that request remains on disk; older steps are untouched."""

    step: int
    error: str


Request = Persist | Commit
Answer = Persisted | Committed | SaverFailed

_encoder = msgspec.json.Encoder()
_request_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answer_decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode_line(message: Request | Answer) -> bytes:
    """One line, with its newline."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """A line from the agent. Raises WireError."""
    try:
        return _request_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a request to the saver: {error}") from error


def decode_answer(line: bytes) -> Answer:
    """A line from the saver. Raises WireError."""
    try:
        return _answer_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an answer of the saver: {error}") from error
