"""Messages between an agent and the tasks of an MPI step: one msgspec-JSON packet each, never pickle.

A task introduces itself, gets its command, and reports how that went, with the spawner's own messages.
"""

from __future__ import annotations

import msgspec

from resilio_hpc.core.struct_codec import StructCodec
from resilio_hpc.launch.workers.forking.spawner_messages import MAX_BYTES, Exited, RankCommand, SpawnFailed, Started

SOCKET_NAME = "mpi.sock"  # in the agent's private directory


class Present(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """task → agent: task number ``task`` of the step that was started for ``round`` runs on this node."""

    round: int
    task: int


class NotWanted(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → task: end; the round is over, or this task has no place in it."""

    reason: str


ToAgent = Present | Started | SpawnFailed | Exited
ToTask = RankCommand | NotWanted

to_agent: StructCodec[ToAgent] = StructCodec(ToAgent, "a message from an MPI task", MAX_BYTES)
to_task: StructCodec[ToTask] = StructCodec(ToTask, "a message to an MPI task", MAX_BYTES)
