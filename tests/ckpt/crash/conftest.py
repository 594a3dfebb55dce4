"""For the tests that harm a process at its I/O calls."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.process import run
from tests.support.crash.harm import Harmed, build, plain_environment
from tests.support.environments import SUPPORT


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to be preloaded."""
    return build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def shm() -> Iterator[Path]:
    """Where a sync costs nothing: a killed process leaves the same as on a disk."""
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def harmed(shim: Path, shm: Path, tmp_path_factory: pytest.TempPathFactory) -> Harmed:
    """Run a script of this folder under the shim, in a directory of its own: the JSON that it prints."""

    def act(script: str, *args: str, prefix: tuple[str, ...] = (), **environment: str) -> Any:
        states = f"SHIM_STATES={tmp_path_factory.mktemp('states')}"
        argv = [
            *prefix,
            "env",
            f"LD_PRELOAD={shim}",
            states,
            sys.executable,
            str(SUPPORT / "crash" / script),
            *args,
            str(shm),
        ]
        done = run(argv, 280, env={**plain_environment(), **environment}, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return act
