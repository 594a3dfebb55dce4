"""The pages are true where a machine can tell: commands, events, modules, the index. Links: test_layout.py."""

from __future__ import annotations

import ast
import graphlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.event_words import KINDS
from resilio_hpc.launch.option_values import Caller
from resilio_hpc.launch.options_parser import parse, parse_join
from tests.support.environments import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LAUNCH = ROOT / "resilio_hpc" / "launch"
MODULES = sorted(path.stem for path in LAUNCH.glob("*.py") if path.stem != "__init__")


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


def on_the_map() -> dict[str, set[str]]:
    """Names in the tables of the map, by the heading of the section."""
    sections = re.split(r"^## ", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE)
    tables = {section.partition("\n")[0]: re.findall(r"^\| .*", section, re.MULTILINE) for section in sections}
    return {heading: set(re.findall(r"`(\w+)`", "\n".join(rows))) for heading, rows in tables.items()}


@pytest.mark.parametrize("folder", ["ckpt", "prolog_epilog", "resilio_hpc/diagnose", "resilio_hpc/launch"])
def test_every_module_is_on_the_map(folder: str) -> None:
    modules = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert sorted(modules - set().union(*on_the_map().values())) == [], "give it a row in docs/architecture.md"


def test_every_module_on_the_map_exists() -> None:
    names = {path.stem for path in [*ROOT.glob("*/*.py"), *ROOT.glob("resilio_hpc/*/*.py"), *ROOT.glob("ckpt/*")]}
    maps = {
        heading: found for heading, found in on_the_map().items() if re.match("The modules|Where decisions", heading)
    }
    assert len(maps) >= 6
    assert sorted(set().union(*maps.values()) - names) == []


def imports(path: Path) -> Iterator[str]:
    """The launcher's modules that one of them imports, but for those that only types need."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("resilio_hpc.launch"):
            parts = str(node.module).split(".")
            yield from [parts[2]] if len(parts) > 2 else [alias.name for alias in node.names]
        pending += ast.iter_child_nodes(node)


def test_imports_within_the_launcher_go_one_way() -> None:
    graph = {module: set(imports(LAUNCH / f"{module}.py")) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
