"""Which of several failures came first and caused the others (RES-3, DLR-4). Pure.

Errors spread: when one rank dies, its peers' collectives break within milliseconds, and clocks of different nodes
differ by about as much. So a failure that cannot be a consequence of another rank's end (a signal, a lost node) beats
one that can (a broken connection), and only then does time decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from resilio_hpc.launch.protocol.messages import RankFailure

LEFT_OUT = "exited with 0 without train.attach(), while other ranks train"
# Texts of errors that a rank raises because a *peer* went away. Sources: torch 2.13 gloo and c10d, NCCL 2.2x; the last
# one is ours (mpi_ranks): Slurm's PMIx ends the whole step when one rank does not end as it should.
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
    """Whether this failure reads like the echo of another rank's end."""
    text = failure.message.lower()
    return failure.kind == "exit" and any(pattern in text for pattern in CONSEQUENCES)


def may_be_consequence(failure: RankFailure) -> bool:
    """Whether it may be an echo, though it does not read like one: it was raised within torch's collectives."""
    frames = [line for line in failure.traceback.splitlines() if line.lstrip().startswith('File "')]
    return failure.kind == "exit" and (is_consequence(failure) or bool(frames and "torch/distributed/" in frames[-1]))


def origin(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure to blame.

    The earliest that is not an echo, best of those that cannot be one; else the earliest.
    """
    return min(
        failures,
        key=lambda failure: (is_consequence(failure), may_be_consequence(failure), failure.time),
        default=None,
    )
