"""Rooms: who may import whom, without circles, and the drawing of it in docs/architecture.md."""

from __future__ import annotations

import ast
import graphlib

import pytest

from tests.support import rooms
from tests.support.rooms import ALLOWED, FACE, allowed, arrows, imports, modules, room_of


@pytest.mark.parametrize("package", ALLOWED)
def test_every_room_is_in_the_table(package: str) -> None:
    known = modules(package)
    found = {
        room_of(package, name, known) for name, path in known.items() if path.stat().st_size or path.stem != "__init__"
    }
    assert found - {FACE} == set(ALLOWED[package]) - {FACE}


@pytest.mark.parametrize("package", ALLOWED)
def test_rooms_import_only_those_that_the_table_allows(package: str) -> None:
    found = arrows(package)
    assert {pair: why for pair, why in found.items() if pair not in allowed(package)} == {}


@pytest.mark.parametrize("package", ALLOWED)
def test_the_table_allows_nothing_that_is_not_needed(package: str) -> None:
    assert allowed(package) - set(arrows(package)) == set()


@pytest.mark.parametrize("package", ALLOWED)
def test_the_table_has_no_circle(package: str) -> None:
    graphlib.TopologicalSorter({room: set(others.split()) for room, others in ALLOWED[package].items()}).prepare()


@pytest.mark.parametrize("package", [*ALLOWED, "core", "diagnose", "doctor", "events", "report", "train"])
def test_modules_import_each_other_in_no_circle_for_types_either(package: str) -> None:
    graphlib.TopologicalSorter(imports(package)).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ALLOWED)
def test_every_room_says_what_lives_in_it(package: str) -> None:
    silent = [
        str(path) for path in modules(package).values() if path.name == "__init__.py" and not path.read_text().strip()
    ]
    assert silent == []


def test_the_drawing_is_that_of_the_table() -> None:
    text = rooms.PAGE.read_text()
    assert "<!-- rooms -->" in text
    assert rooms.written(text) == text, "python -m tests.support.rooms"


def test_an_import_is_seen_wherever_it_stands() -> None:
    source = (
        "def f():\n    from resilio_hpc.launch.agent import agent\n"
        "if TYPE_CHECKING:\n    import resilio_hpc.launch.cli.checks\n"
    )

    assert sorted(rooms._names(ast.parse(source))) == [
        "resilio_hpc.launch.agent.agent",
        "resilio_hpc.launch.cli.checks",
    ]
