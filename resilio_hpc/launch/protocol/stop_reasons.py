"""Why a run stops in good order: verdict and exit code for each signal of Slurm or of the user."""

from __future__ import annotations

STOP_REASONS = {"USR2": "time_limit", "TERM": "terminated", "INT": "interrupted"}
STOP_EXIT_CODES = {"time_limit": 75, "terminated": 143, "interrupted": 130}
