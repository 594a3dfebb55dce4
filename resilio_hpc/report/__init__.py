"""What a run's ledger and status show: faults, goodput, and its present state."""

from resilio_hpc.report.faults import RunFault, faults
from resilio_hpc.report.goodput import Goodput, goodput

__all__ = ["Goodput", "RunFault", "faults", "goodput"]
