"""What a run's ledger and status tell: faults, goodput, and how it stands now."""

from resilio_hpc.report.faults import Fault, faults
from resilio_hpc.report.goodput import Goodput, goodput

__all__ = ["Fault", "Goodput", "faults", "goodput"]
