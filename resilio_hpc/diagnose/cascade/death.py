"""What one rank's end says by itself: when it was, whom it names, and whether it can follow from another's."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from resilio_hpc.diagnose.causes.known_faults import MOST_LINES
from resilio_hpc.diagnose.causes.log_line import stated
from resilio_hpc.diagnose.causes.pattern_table import CauseClass, FailurePattern, FaultOf, LineRole, find
from resilio_hpc.diagnose.hangs.rank_sight import GroupSight

OWN = 0.7  # from here on an end counts as one that does not follow from another
ECHO = 0.2  # up to here it counts as one that does
TEARDOWN_S = 5.0  # a killed process with GPUs is reaped so long after its peers miss it, or less
CORE_S = 15.0  # writing a core file takes so long, or less
RAISED_S = 0.05  # an exception is noted in the file of errors so long after it was raised
HEARD_S = 3.0  # a lost node died between its last sign of life and the next one
_SIGNALS = {  # number → (how sure it is the rank's own, what to say)
    9: (0.9, "killed by SIGKILL"), 4: (0.85, "SIGILL"), 7: (0.85, "SIGBUS"), 8: (0.85, "SIGFPE"),
    11: (0.8, "SIGSEGV"), 6: (0.4, "SIGABRT"), 15: (0.1, "SIGTERM"), 2: (0.1, "SIGINT"),
}  # fmt: skip
_SIGKILL = 9
OOM_KILLER = "out-of-memory killer ended"  # as agents say of a rank that the kernel killed, and not of any SIGKILL
_CRASHES = (4, 7, 8, 11)
_FACTS = {
    "early_exit": (0.95, "ended early with 0"), "restore_failed": (0.9, "could not restore its snapshot"),
    "hang": (0.95, "hung"), "corruption": (0.95, "its values differ"),
    "node_lost": (0.95, "its node is gone"), "agent_lost": (0.9, "its agent is gone"),
}  # fmt: skip
# a class of text that both ends of a broken link show
_BOTH_ENDS = (CauseClass.NIC_NETWORK,)
_ADDRESS = re.compile(
    r"(?:peer|to|from|host|error) \[?((?:\d{1,3}\.){3}\d{1,3}|[0-9a-f:]{4,39}(?=[\]<]))", re.IGNORECASE
)
_LINK = re.compile(  # of TCP (errno 110, 113) and of InfiniBand (IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR)
    r"connection timed out|no route to host|host is unreachable|status=1[23]\b|retry count|transport retry",
    re.IGNORECASE,
)
_RAISED = re.compile(r"^(?:\[rank\d+\]: )?(?:[\w.]+)?(?:Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)
_FRAME = re.compile(r'^ *(?:\| +)*File "([^"\n]*)", line (\d+)', re.MULTILINE)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?", re.IGNORECASE)
_COLLECTIVES = "torch/distributed/"


class Death(msgspec.Struct, frozen=True):
    """The end of a rank, or of a node (``rank`` -1).

    ``earliest`` and ``latest``: when it happened, on the node's clock after correction, which is ``clock_s`` seconds
    wrong at most. ``own``: 0 to 1, that it does not follow from another end. ``same``: equal for the same error at the
    same place. ``named``: addresses of peers that its text names. ``link``: it says that a transfer failed or took too
    long, not that the peer had closed the connection. ``groups``: what it had called.
    """

    rank: int
    node: str
    earliest: float
    latest: float
    own: float
    says: str
    clock_s: float = 0.0
    same: str = ""
    named: tuple[str, ...] = ()
    link: bool = False
    groups: Sequence[GroupSight] = ()


def death_of(
    rank: int, node: str, kind: str, time: float, clock_s: float = 0.0, signal: int | None = None, message: str = "",
    traceback: str = "", groups: Sequence[GroupSight] = (), log: str = "",
) -> Death:  # fmt: skip
    """Return what the end of a rank says. ``kind``, ``signal`` and texts are those of a failure in the ledger.

    ``log``: the telling line of its log, where it left no traceback.
    """
    late_s = RAISED_S if traceback else CORE_S if signal in _CRASHES else TEARDOWN_S
    earliest, latest = time - late_s, time
    same = ""
    if kind == "node_lost":
        own, says = _FACTS[kind]
        earliest, latest = time - RAISED_S, time + HEARD_S
    elif kind not in ("signal", "exit"):
        own, says = _FACTS.get(kind, (0.9, kind.replace("_", " ") or "ended"))
    elif signal == _SIGKILL and OOM_KILLER in message:
        own, says = 0.95, "killed by the kernel for want of memory"
    elif traceback:  # also of one whose teardown crashed, after it had raised
        own, says = _of_text(message, traceback)
        frames = _FRAME.findall(traceback)
        same = f"{_CHANGING.sub('#', message.partition(chr(10))[0])[:200]} {frames[-1] if frames else ''}"
    elif kind == "signal":
        own, says = _of_signal(signal or 0, log)
    else:
        own, says = _of_text("\n".join((message, log)), "")
    text = f"{message[:4000]}\n{log}"
    named = tuple(dict.fromkeys(_ADDRESS.findall(text)))
    link = bool(named) and _LINK.search(text) is not None
    return Death(rank, node, earliest, latest, own, says, clock_s, same, named, link, groups)


def _of_signal(signal: int, log: str) -> tuple[float, str]:
    own, says = _SIGNALS.get(signal, (0.5, f"signal {signal}"))
    if not log or signal == _SIGKILL:  # the kernel's word counts, whatever was written before
        return own, says
    sure, reads = _of_text(log, "")
    if sure <= ECHO:
        return min(own - 0.3, 0.5) if signal in _CRASHES else sure, f"{says}, after a line that {reads}"
    return max(own, sure), f"{says}: {reads}"


def _of_text(message: str, traceback: str) -> tuple[float, str]:
    """Return how sure an error is the rank's own, from its text and from where it was raised."""
    found = _patterns(message)
    if any(pattern.fault is FaultOf.PEER for pattern in found):
        return 0.05, "reads like another one's end"
    if _is_wrapped_echo(traceback):
        return 0.15, "raised from an error that reads like another one's end"
    known = max(found, key=_strength, default=None)
    in_collective = _in_collective(traceback)
    if known is not None and known.fault is FaultOf.DEVICE:
        return 0.95, known.says
    if known is not None and known.role is LineRole.ROOT and known.cause not in _BOTH_ENDS:
        return (0.5 if in_collective else 0.85), known.says
    if known is not None and known.cause in _BOTH_ENDS:
        return 0.45, known.says
    if known is not None and known.role is LineRole.ECHO:
        return 0.15, known.says
    if not traceback:
        return 0.45, "ended without a word of why"
    return (0.35, "raised in torch's collectives") if in_collective else (0.8, "an exception of the program")


def _patterns(message: str) -> list[FailurePattern]:
    lines = (stated(line) for line in message.splitlines()[-MOST_LINES:])
    return [pattern for line in lines if line and (pattern := find(line)) is not None]


def _strength(pattern: FailurePattern) -> tuple[int, float]:
    return (LineRole.ECHO, LineRole.EITHER, LineRole.ROOT).index(pattern.role), pattern.sure


def _is_wrapped_echo(traceback: str) -> bool:
    """Return whether an error that reads like an echo was caught, and another one raised instead."""
    if "\nThe above exception" not in traceback and "\nDuring handling" not in traceback:
        return False
    raised = [pattern for line in _RAISED.findall(traceback)[:20] for pattern in _patterns(line)]
    return any(pattern.fault is FaultOf.PEER or pattern.role is LineRole.ECHO for pattern in raised)


def _in_collective(traceback: str) -> bool:
    frames = _FRAME.findall(traceback)
    return bool(frames) and _COLLECTIVES in frames[-1][0]
