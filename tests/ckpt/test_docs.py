"""The snippets of docs/checkpoints.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import scrubbed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == 9


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SNIPPETS[number]],
        cwd=tmp_path,
        env=scrubbed(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "latest").exists()
