"""Fixtures of the doctor's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def local() -> Iterator[Path]:
    """A local directory for one test; pytest's are too deep for sockets."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        yield Path(name)
