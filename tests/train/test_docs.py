"""The snippets of docs/training-api.md and docs/resizing.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.environments import ROOT
from tests.support.train.programs import run_programs

DOCS = ROOT / "docs"
SNIPPETS = [
    snippet
    for page in ("training-api.md", "resizing.md")
    for snippet in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]


# what torchrun gives to the only rank
ALONE = "import os; os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')\n"

Ran = list[tuple[Path, int, str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """(directory, exit code, output) of each."""
    directories = [tmp_path_factory.mktemp(f"snippet{number}") for number in range(len(SNIPPETS))]
    programs = [ALONE + snippet if "init_process_group" in snippet else snippet for snippet in SNIPPETS]
    found = run_programs(list(zip(directories, programs, strict=True)))
    return [(directory, code, said) for directory, (code, said) in zip(directories, found, strict=True)]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number: int, ran: Ran) -> None:
    directory, code, said = ran[number]
    assert code == 0, said
    if "Checkpointer" in SNIPPETS[number]:
        assert (directory / "checkpoints" / "latest").read_text().strip() in SNIPPETS[number]
