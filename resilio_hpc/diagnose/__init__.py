"""Diagnosis: the pair check names nodes that are bad or slow before ranks start on them."""

from resilio_hpc.diagnose.check import check
from resilio_hpc.diagnose.policy import CheckRequest
from resilio_hpc.diagnose.result import CheckResult, NodeResult

__all__ = ["CheckRequest", "CheckResult", "NodeResult", "check"]
