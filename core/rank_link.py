"""The link between a rank and the agent of its node: a Unix SOCK_SEQPACKET socket, one JSON message per packet.

The agent listens at ``$RESILIO_AGENT_SOCKET`` (mode 0600, in a directory of mode 0700); a rank connects and sends
``Attach`` first. All of it works without torch. Messages are data (msgspec), never pickle.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgspec

from resilio_hpc.core.judgement import Judgement
from resilio_hpc.core.struct_codec import StructCodec
from resilio_hpc.core.tiers import SnapshotRoom, Stage, Tier

MAX_BYTES = 64 * 1024
COLLECTIVE_VARIABLE = "RESILIO_COLLECTIVE_TIMEOUT_S"
"""In a rank's environment: for how many seconds it may wait in a collective; 0 where that is not known."""
LAST_CHECKPOINT = "last checkpoint"
"""The section in which a rank waits until its last save is committed: as long as that takes."""
STANDBY_VARIABLE = "RESILIO_STANDBY"
"""In the environment of a process that has no rank yet: its local rank for the agent, below 0."""
PAUSED = "paused"
"""The section in which a rank waits at a step boundary while nodes are tested."""


class Attach(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent, first message of a connection."""

    rank: int
    local_rank: int
    round: int
    pid: int


class StepDone(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: ``step`` optimizer steps are complete (counted from the beginning of training).

    ``collected_s``: seconds that Python's garbage collector has taken so far.
    """

    step: int
    time: float
    collected_s: float = 0.0


class StepsPlanned(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank 0 → agent: it does the steps ``start`` … ``total - 1`` from here on."""

    start: int
    total: int


class ValuesLogged(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: what the script has logged when ``step`` steps were complete, at ``time`` (Unix seconds).

    ``sums``: of amounts, over the ``seconds`` since the last such message; ``not_finite``: values that are NaN or
    infinite; ``last``: training ends with this step.
    """

    step: int
    time: float
    seconds: float
    values: dict[str, float]
    sums: dict[str, float]
    not_finite: tuple[str, ...] = ()
    last: bool = False


class SnapshotTaken(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: the snapshot of ``step`` lies whole and checksummed in the arena file ``arena``."""

    step: int
    arena: str
    size_bytes: int
    blocked_s: float


class SnapshotPlaced(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: from ``step`` on its snapshots have this room, and why not more."""

    step: int
    room: SnapshotRoom
    why: str


class Restored(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: state of ``step`` was restored from ``source``; step -1 and None: nothing to restore."""

    step: int
    source: Tier | None
    seconds: float


class RestoreFailed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: the copy of ``step`` in ``source`` is bad; the next round must choose another. The rank exits."""

    step: int
    source: Tier
    error: str


class StopAck(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: answer to StopAt. ``accepted`` False: this rank has already begun a step beyond ``target``."""

    target: int
    accepted: bool
    step: int


class Stopped(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: the agreed stop was reached and the final save of ``step`` was taken; the rank exits with 0."""

    step: int


class Finished(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: training is complete after ``step`` steps; an exit with 0 from here on is right."""

    step: int


class Section(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: what it does from here on, beside its steps; "": steps again."""

    name: str


class HoldsSteps(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: it can still save the last finished step when the ranks cannot go on (SaveLastStep).

    ``shared``: other ranks have the same tensors, so that it helps where a rank is lost; ``group``: names these ranks.
    """

    shared: bool
    group: str = ""


class SavingLastStep(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: it saves the last finished step now."""


class LastStepSaved(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: the snapshot of ``step``, the last finished one, is whole; -1: there is none, for ``error``."""

    step: int
    error: str = ""


class ReplicaDigest(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: digests of its parameters and optimizer state, after a sweep over them that ended with ``step``.

    ``group``: of the ``replicas`` ranks that must have the same. ``first``: the part that was digested first, of
    ``parts``. The rest: see ``launch/protocol/correctness_messages``.
    """

    step: int
    first: int
    parts: int
    group: str
    replicas: int
    mark: int
    digests: bytes
    labels: tuple[str, ...] = ()


class StepJudged(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: the ranks did a step again, and know more of its result."""

    judgement: Judgement


class SaveLastStep(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: the ranks will be ended; save the last finished step. Answers: SavingLastStep, LastStepSaved.

    ``ahead``: they may have to be, soon.
    """

    ahead: bool = False


class CanReenter(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: when the ranks cannot go on, it can leave this round and enter the next one in this process."""


class Raised(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: its function has ended with an error at ``time`` (Unix seconds); it waits for LeaveRound."""

    message: str
    traceback: str
    time: float


class LeaveRound(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: the round is over; leave its communication, and wait for the next one.

    Answers: LeavingRound, LeftRound.
    """


class LeavingRound(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: LeaveRound has come, and LeftRound will."""


class LeftRound(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """rank → agent: it has left the round, and waits for EnterRound. ``seconds``: since LeaveRound came."""

    seconds: float


class EnterRound(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: enter the next round. ``variables``: of its environment; outputs are opened for appending."""

    variables: dict[str, str]
    stdout_path: str
    stderr_path: str


class StopAt(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: propose to stop after ``target`` steps."""

    target: int


class StopConfirmed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: every rank accepted ``target``; save there and exit."""

    target: int


class PauseConfirmed(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: every rank accepted ``target``; wait there for Resume, at most ``limit_s`` seconds."""

    target: int
    limit_s: float


class Resume(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: the pause is over, or will not come: go on."""


class SaveAt(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: save when ``step`` steps are finished, and go on."""

    step: int


class SaveProgress(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → rank: the save of ``step`` reached ``stage``: LOCAL, COMMITTED or FAILED (see ``error``)."""

    step: int
    stage: Stage
    error: str = ""


LastStepMessage = HoldsSteps | SavingLastStep | LastStepSaved
ReentryMessage = CanReenter | Raised | LeavingRound | LeftRound
RankMessage = (
    Attach | StepDone | SnapshotTaken | Restored | RestoreFailed | StopAck | Section | Stopped | Finished
    | LastStepMessage | ReentryMessage | StepsPlanned | ValuesLogged | ReplicaDigest | StepJudged | SnapshotPlaced
)  # fmt: skip
AgentMessage = (
    StopAt | StopConfirmed | PauseConfirmed | Resume | SaveAt | SaveProgress | SaveLastStep | LeaveRound | EnterRound
)

to_agent: StructCodec[RankMessage] = StructCodec(RankMessage, "a message from a rank")
to_rank: StructCodec[AgentMessage] = StructCodec(AgentMessage, "a message from an agent")


def connect(environment: Mapping[str, str]) -> socket.socket | None:
    """Return a blocking connection to this rank's agent; None without resilio-launch."""
    path = environment.get("RESILIO_AGENT_SOCKET")
    if not path:
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        link.connect(path)
    except OSError:
        link.close()
        return None
    return link
