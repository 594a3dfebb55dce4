"""Examples of plain-tensor layouts and FSDP2 under the real launcher: a killed rank, a stop, the same bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.environments import ROOT
from tests.support.frameworks.runs import FrameworkRun

pytestmark = pytest.mark.slow


class Example(NamedTuple):
    """A script, its words, and the number of its ranks.

    ``restored``: the step that is restored after 13 steps of the optimizer (with a scaler it leaves two out).
    """

    script: str
    words: tuple[str, ...]
    ranks: int
    restored: int


EXAMPLES = {
    "tensor and data parallel": Example("train_megatron_style.py", ("--tensor", "2"), 4, 10),
    "tensor and pipeline parallel": Example("train_megatron_style.py", ("--tensor", "2", "--pipeline", "2"), 4, 10),
    "FSDP2, dcp": Example("train_torchtitan_style.py", (), 3, -1),
    "FSDP2, Checkpointer": Example("train_torchtitan_style.py", ("--checkpointer",), 3, 15),
}


def run(path: Path, example: Example, *words: str) -> FrameworkRun:
    script = [str(ROOT / "examples" / example.script), "--steps", "24"]
    return FrameworkRun(path, example.ranks, [*script, *example.words, *words], Path(sys.executable))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_end_has_the_bits_of_an_undisturbed_run(tmp_path: Path, name: str) -> None:
    """A rank is killed some steps after a save; a run is stopped, and goes on. Torch's dcp restores by itself."""
    whole, killed, stopped = (run(tmp_path / one, EXAMPLES[name]) for one in ("whole", "killed", "stopped"))
    whole.launch()
    killed.launch("13", "1", "kill")
    assert killed.restored() == [-1, EXAMPLES[name].restored]
    assert killed.end == whole.end
    stopped.stop_and_go_on(11)
    assert len(stopped.events("first_step")) >= 2
    assert stopped.end == whole.end
