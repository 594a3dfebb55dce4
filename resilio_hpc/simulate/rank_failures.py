"""How a fault shows itself to the controller: the failures of ranks, whose texts the real diagnosis reads. Pure."""

from __future__ import annotations

from resilio_hpc.launch.protocol.message_parts import RankFailure
from resilio_hpc.simulate.fleets import FaultKind

# kind, exit code, signal, message, traceback, line of the log
_TEXTS = {
    FaultKind.PROCESS: (
        "exit", 1, None, "RuntimeError: a bug of the program", '  File "train.py", line 88, in step\n', ""
    ),
    FaultKind.DEVICE: (
        "signal", None, 6, "", "", "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, GPU has fallen off the bus."
    ),
    FaultKind.NETWORK: (
        "signal", None, 6, "", "", "mlx5_core 0000:1b:00.0 ib0: Port 1 link down"
    ),
    FaultKind.HANG: ("hang", None, None, "did not enter the collective that all others wait in", "", ""),
}  # fmt: skip


def rank_failure(kind: FaultKind, node: str, rank: int, unix: float, number: int) -> RankFailure:
    """Return what an agent would say of a rank. ``number``: of the fault, since each bug is at another place."""
    what, code, signal, message, traceback, log = _TEXTS[kind]
    traceback = traceback.replace("line 88", f"line {number}")
    return RankFailure(node, rank, 0, what, unix, code, signal, message, traceback, log=log)
