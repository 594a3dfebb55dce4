"""One fault of a node as it is remembered: a line of JSON. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from resilio_hpc.core.errors import WireError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.json_lines import LineDecoder

FORGOTTEN = "forgotten"  # kind of a line that forgets all earlier faults of a node
_EVIDENCE_LETTERS = 300
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")]
Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:/-]{0,128}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=1000)]
Unix = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class NodeFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``kind``: a row of policy.toml, or FORGOTTEN; ``time``: Unix seconds, of the fault itself.

    ``run``: the id of the run that saw it, "" when no run did; ``check``: the id of a health check; ``cluster``:
    Slurm's name of it, since one ledger may serve several clusters with equal node names ("": any).
    """

    time: Unix
    node: Name
    kind: Word
    device: Text = ""
    check: Word = ""
    run: Word = ""
    job: Word = ""
    cluster: Word = ""
    evidence: Text = ""
    v: int = 1

    @property
    def key(self) -> tuple[str, ...]:
        """Return a key that is the same for the same fault, whichever writer recorded it, and however often."""
        return (self.cluster, self.node, self.kind, self.check, self.run, self.device, f"{self.time:.1f}")


def evidence(text: str) -> str:
    """Return the evidence on one line, shortened."""
    return printable(" ".join(text.split()), _EVIDENCE_LETTERS)


_lines = LineDecoder[NodeFault](NodeFault, "a fault")


def encode(fault: NodeFault) -> bytes:
    """Return the line, with its newline. Raises ValueError for a fault that ``decode`` would refuse."""
    line = _lines.encode(fault)
    if decode(line) != fault:
        raise ValueError(f"not a fault that can be remembered: {printable(repr(fault))}")
    return line


def decode(line: bytes) -> NodeFault | None:
    """Return the fault; None for any other line: torn, of another program, out of bounds."""
    try:
        return _lines.decode(line)
    except WireError:
        return None
