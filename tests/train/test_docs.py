"""The snippets of docs/training-api.md and docs/resizing.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import scrubbed

DOCS = Path(__file__).resolve().parents[2] / "docs"
SNIPPETS = [
    snippet
    for page in ("training-api.md", "resizing.md")
    for snippet in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]


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
    if "Checkpointer" in SNIPPETS[number]:
        assert (tmp_path / "checkpoints" / "latest").read_text().strip() in SNIPPETS[number]
