"""For all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from resilio_hpc.core.file_system import is_in_memory

# A shell starts what runs in its background with SIGINT ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What an example may take says nothing on a machine that others use, too.
hypothesis.settings.register_profile("resilio", deadline=None)
hypothesis.settings.load_profile("resilio")


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A directory whose files are not in memory, as those of tmp_path may be."""
    fd = os.open(tmp_path, os.O_RDONLY)
    in_memory = is_in_memory(fd)
    os.close(fd)
    if not in_memory:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix=".disk-", dir=Path(__file__).parent) as name:
        yield Path(name)
