"""Which of several failures came first and caused the others (RES-3, DLR-4). Pure.

Errors spread: when one rank dies, its peers' collectives break within milliseconds, and clocks of different nodes
differ by about as much. So a failure that cannot be a consequence of another rank's end (a signal, a lost node) beats
one that can (a broken connection), and only then does time decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from resilio_hpc.launch.protocol.messages import RankFailure

LEFT_OUT = "exited with 0 without train.attach(), while other ranks train"
# Errors that a rank raises because a *peer* ended. Sources: torch 2.13 gloo and c10d, NCCL 2.2x; the last one is this
# package's (mpi_ranks): Slurm's PMIx ends the whole step when one rank fails.
CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket timeout",
    "timed out waiting",
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "nccl communicator was aborted",
    "store might have been closed",
    "killed together with its mpi step",
)


def is_consequence(failure: RankFailure) -> bool:
    """Return whether this failure reads like the consequence of another rank's end."""
    text = failure.message.lower()
    return failure.kind == "exit" and any(pattern in text for pattern in CONSEQUENCES)


def may_be_consequence(failure: RankFailure) -> bool:
    """Return whether it may be a consequence though it does not read like one: it was raised in torch's collectives."""
    frames = [line for line in failure.traceback.splitlines() if line.lstrip().startswith('File "')]
    return failure.kind == "exit" and (is_consequence(failure) or bool(frames and "torch/distributed/" in frames[-1]))


def origin(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure to blame.

    It is the earliest that is no consequence, if possible one that cannot be a consequence; otherwise the earliest.
    """
    return min(
        failures,
        key=lambda failure: (is_consequence(failure), may_be_consequence(failure), failure.time),
        default=None,
    )
