"""What an agent sees of one rank from outside: its process, its steps, and the calls that it has not completed."""

from __future__ import annotations

from typing import Annotated

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)]  # -1: unknown, or none
Word = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,64}\Z")]
Text = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,200}\Z")]
Place = Annotated[str, msgspec.Meta(max_length=300)]
Calls = Annotated[float, msgspec.Meta(ge=-1.0, le=1e12)]
MAX_GROUPS = 64
MAX_CALLS = 32
STOPPED, TRACED = "T", "t"  # by a signal; by a debugger, or a tool such as gcore, which lets it go on
GONE = "ZXx"


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a message."""


class GroupSight(_Part, frozen=True):
    """A communicator as one rank has it.

    ``id``: the same on all its ranks. ``rank``: this rank's number in it. ``entered``: its collective calls so far.
    """

    id: Whole
    family: Word
    rank: Whole
    size: Whole
    entered: Whole


class CallSight(_Part, frozen=True):
    """A call in the communicator ``groups[group]``. ``sequence``: 0 for a send or receive; ``peer``: rank in it.

    ``blocks``: the program's main thread waits for it; else it goes on beside the program. ``awaited``: some thread
    waits for it.
    """

    group: Whole
    op: Word
    sequence: Whole
    shape: Word = ""
    peer: Whole = -1
    completed: bool = False
    blocks: bool = True
    awaited: bool = True


class GpuSight(_Part, frozen=True):
    """What one rank asked of its GPU so far, and how far the GPU is known to be.

    ``waits_for``: what the program waits for at this moment, "" where it does not; ``waits_s``: since how many seconds.
    ``launching``: kernel launches that have not returned. ``gemms`` and ``flops``: of cuBLAS. ``sampled``: calls behind
    which an event was recorded, ``reached`` of them; ``reached_s``: how many seconds ago the last one was seen to be,
    -1 without one.
    """

    waits_for: Word = ""
    waits_s: Calls = 0.0
    launches: Whole = 0
    launching: Whole = 0
    graphs: Whole = 0
    gemms: Whole = 0
    flops: Annotated[float, msgspec.Meta(ge=0.0, le=1e300)] = 0.0
    waits: Whole = 0
    sampled: Whole = 0
    reached: Whole = 0
    reached_s: Calls = -1.0


class RankSight(_Part, frozen=True):
    """One rank. ``calls``: of each communicator the ones that are not completed, and the last one.

    ``state``: the kernel's letter, "" where the process is not there; ``waits_in``: the kernel function in which it
    sleeps; ``cpu_s``: processor time so far, seconds; ``begun`` and ``completed``: calls, -1 where none were seen;
    ``place``: the program's line, where known; ``joins``: the function of torch.distributed in which it waits for its
    peers to come, such as ``init_process_group``, where known; ``gpu``: None where it asked nothing of one.
    ``within``: "data loader" where that is what it waits in. ``may_wait_s``: how long torch lets it wait in a call: the
    longest time limit of its process groups, 0 where that is not known.
    """

    rank: Whole
    step: Whole = -1
    state: Word = ""
    waits_in: Word = ""
    cpu_s: Calls = 0.0
    begun: Whole = -1
    completed: Whole = -1
    groups: Annotated[tuple[GroupSight, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    calls: Annotated[tuple[CallSight, ...], msgspec.Meta(max_length=MAX_GROUPS + MAX_CALLS)] = ()
    place: Place = ""
    joins: Word = ""
    gpu: GpuSight | None = None
    within: Word = ""
    may_wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
