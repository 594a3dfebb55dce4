"""What an agent and the tasks of an MPI step say to each other: one msgspec-JSON packet per message, never pickle.

A task presents itself, is told what to run, and tells how that went, in the spawner's own words.
"""

from __future__ import annotations

import msgspec

from resilio_hpc.core.errors import WireError
from resilio_hpc.launch.workers.spawner_messages import MAX_BYTES, Exited, RankCommand, SpawnFailed, Started

SOCKET_NAME = "mpi.sock"  # in the agent's private directory


class Present(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """task → agent: task number ``task`` of the step that was started for ``round`` runs on this node."""

    round: int
    task: int


class NotWanted(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → task: end, the round is over or this task has no place in it."""

    reason: str


ToAgent = Present | Started | SpawnFailed | Exited
ToTask = RankCommand | NotWanted

_encoder = msgspec.json.Encoder()
_agent_decoder: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)
_task_decoder: msgspec.json.Decoder[ToTask] = msgspec.json.Decoder(ToTask)


def encode(message: ToAgent | ToTask) -> bytes:
    """One packet. Raises WireError where the message is too long for one."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_BYTES:
        raise WireError(f"{type(message).__name__} of {len(packet)} bytes is longer than the {MAX_BYTES} of a packet")
    return packet


def decode_to_agent(packet: bytes) -> ToAgent:
    """Return a packet that a task sent. Raises WireError."""
    try:
        return _agent_decoder.decode(packet)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message from an MPI task: {error}") from error


def decode_to_task(packet: bytes) -> ToTask:
    """Return a packet that an agent sent. Raises WireError."""
    try:
        return _task_decoder.decode(packet)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message to an MPI task: {error}") from error
