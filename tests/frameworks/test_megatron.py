"""Megatron-core's own ranges and ShardedTensor, beside ours."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.environments import ROOT, SUPPORT, scrubbed
from tests.support.frameworks.runs import PYTHON, Framework
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_flat_shards_are_what_megatron_says() -> None:
    Framework("", ("megatron",)).need()
    script = SUPPORT / "frameworks" / "megatron_ranges.py"
    done = subprocess.run(
        [PYTHON, str(script)], env=scrubbed(PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore"), capture_output=True,
        text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300
