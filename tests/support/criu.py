"""A CRIU that works here, for tests that dump and restore real processes."""

from __future__ import annotations

import os

import pytest

from resilio_hpc.core import criu


def real_criu() -> str:
    """Return the program of PATH; skip the test where there is none, or its check fails."""
    program = criu.find(os.environ)
    if not program:
        pytest.skip("no criu in PATH")
    if why := criu.why_not(program):
        pytest.skip(f"the check of {program} fails: {why}")
    return program
