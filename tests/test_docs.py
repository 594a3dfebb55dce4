"""The pages are true where a machine can tell: commands, events, modules, the index. Links: test_layout.py."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from resilio_hpc.events.event_text import KINDS
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import parse, parse_join
from tests.support.environments import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (DOCS / "README.md").read_text()))
    assert listed == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_events_that_a_page_asks_for_exist(page: Path) -> None:
    assert set(re.findall(r"--event (\w+)", page.read_text())) - KINDS - {"KIND"} == set()


def commands(page: Path) -> list[list[str]]:
    """The arguments of every whole resilio-launch command that a page shows."""
    found = re.findall(r"resilio-launch (-[^`\n]*\.py[^`\n]*|--join [^`\n]+)", page.read_text())
    variable = re.compile(r'"\$\w+"')  # of a job script
    return [shlex.split(variable.sub("8", line), comments=True) for line in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_are_understood(page: Path) -> None:
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "9", "SLURM_NNODES": "9", "SLURMD_NODENAME": "n1"}
    caller = Caller(allocation, Path("/home/me"), 0.0, 1)
    for command in commands(page):
        assert parse_join(command, caller) or parse(command, caller).options.script  # raises UsageError


def test_the_pages_show_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 7


def test_the_reference_is_that_of_the_code() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["page"]()
    assert (DOCS / "reference.md").read_text() == made, "run scripts/reference.py"
