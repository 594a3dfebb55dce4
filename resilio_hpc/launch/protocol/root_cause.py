"""Which of several failures came first and caused the others (RES-3, DLR-4). Pure.

Errors spread: when one rank dies, its peers' collectives break within milliseconds, and clocks of different nodes
differ by about as much. `diagnose.cascade` weighs what each end says, who waited for whom, and time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from resilio_hpc.diagnose.cascade.clocks import UNKNOWN_S
from resilio_hpc.diagnose.cascade.death import Death, death_of
from resilio_hpc.diagnose.cascade.verdict import judge
from resilio_hpc.diagnose.causes.known_faults import fault_in
from resilio_hpc.diagnose.causes.pattern_table import FaultOf
from resilio_hpc.launch.protocol.message_parts import RankFailure

EARLY = "exited with 0 after {} steps, before training was finished (a loop left on purpose calls run.finish)"
LEFT_OUT = "exited with 0 without train.attach(), while other ranks train"
INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/resilio_hpc/")
_FRAME = re.compile(r'^ *(?:\| +)*File "([^"\n]*)", line (\d+)', re.MULTILINE)


def reads_like_echo(message: str) -> bool:
    """Return whether an error reads like the consequence of another rank's end."""
    return fault_in(message, FaultOf.PEER) is not None


def is_consequence(failure: RankFailure) -> bool:
    """Return whether this failure reads like the consequence of another rank's end."""
    return failure.kind == "exit" and reads_like_echo(failure.message)


def may_be_consequence(failure: RankFailure) -> bool:
    """Return whether it may be a consequence though it does not read like one: it was raised in torch's collectives."""
    frames = _frames(failure.traceback)
    in_collective = bool(frames) and "torch/distributed/" in frames[-1][0]
    return failure.kind == "exit" and (is_consequence(failure) or in_collective)


def place_of(traceback: str) -> str:
    """Return the program's own line that raised an error, as ``train.py:88``; "" without a traceback.

    Frames of installed packages and of the standard library do not count where there are others.
    """
    frames = _frames(traceback)
    own = [frame for frame in frames if not any(part in frame[0] for part in INSTALLED)]
    for file, line in (own or frames)[-1:]:
        return f"{file.rpartition('/')[2]}:{line}"
    return ""


def _frames(traceback: str) -> list[tuple[str, str]]:
    """Return file and line of each frame, the innermost last."""
    return [(found[1], found[2]) for found in _FRAME.finditer(traceback)]


def as_death(failure: RankFailure) -> Death:
    """Return a failure as the judge of cascades takes it."""
    f = failure
    clock_s = f.uncertain_s if f.uncertain_s >= 0 else UNKNOWN_S
    return death_of(f.rank, f.node, f.kind, f.time, clock_s, f.signal, f.message, f.traceback, f.groups, f.log)


def origin(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure to blame, of all those of a round."""
    return failures[judge([as_death(failure) for failure in failures]).index] if failures else None
