"""What README.md shows works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from resilio_hpc.launch.allocation.placements import missing_survival_flags
from tests.support.environments import ROOT
from tests.support.train.programs import run_programs

README = (ROOT / "README.md").read_text()
SETTING = """
import torch
model = torch.nn.Linear(4, 1)
state, total = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, 250
"""


def test_the_training_scripts_lines_save_and_go_on(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scripts = [SETTING.replace("250", str(total)) + snippet + "print(start)" for total in (20, 30)]
    assert run_programs([(tmp_path, script) for script in scripts]) == [(0, "0\n"), (0, "20\n")]


def test_every_srun_that_pages_show_has_the_survival_flags() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    commands = [line for page in pages for line in page.read_text().splitlines() if re.match(r"srun .*resilio-l", line)]
    assert len(commands) >= 2
    assert [command for command in commands if missing_survival_flags(command.split())] == []
