"""Private directories of a node: those that cannot be are told in one line."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.rundir import node_directories


@pytest.mark.parametrize(
    ("base", "why"),
    [
        ("/tmp/" + 90 * "l", "bytes too long for a socket in it: choose a shorter one"),
        ("s3://bucket", "mount what is behind that URL"),
        ("/proc/nowhere", "RESILIO_LOCAL_DIR: .*No such file or directory"),
    ],
)
def test_a_local_directory_that_cannot_be_is_a_line(base: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIO_LOCAL_DIR", base)
    with pytest.raises(UsageError, match=why):
        node_directories.local("run", "n1")
