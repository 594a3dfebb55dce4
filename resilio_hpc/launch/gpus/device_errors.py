"""Whether a rank's error reads like one of its device's hardware."""

from __future__ import annotations

from resilio_hpc.diagnose.causes.known_faults import fault_in
from resilio_hpc.diagnose.causes.pattern_table import FaultOf

TEXT_CHARACTERS = 160


def hardware_error(text: str) -> str:
    """Return what a rank's error says of its device, in one line; "" where it says nothing of the kind."""
    found = fault_in(text, FaultOf.DEVICE)
    return "" if found is None else f"{found[0].says}: {found[1]}"[:TEXT_CHARACTERS]
