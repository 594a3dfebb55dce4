"""What a run's ledger and status tell: faults, goodput, and how it stands now."""

from resilio_hpc.report.faults import RunFault, faults
from resilio_hpc.report.goodput import Goodput, goodput

__all__ = ["Goodput", "RunFault", "faults", "goodput"]
