"""The lines that an adapter needs in a script: as many as the page says, and marked in the example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.environments import ROOT

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
ROWS = {name: int(lines) for lines, name in re.findall(r"^\| .* \| (\d) \| `examples/(train_\w+\.py)`", PAGE, re.M)}


def lines_of_ours(tree: ast.Module) -> Iterator[int]:
    """The lines with an import of the package, with a name that it brings, or with what such a name has made."""
    names = set()
    for one in tree.body:
        if isinstance(one, ast.ImportFrom) and str(one.module).startswith("resilio_hpc"):
            yield one.lineno
            names |= {alias.name for alias in one.names}
    for one in ast.walk(tree):
        if (
            isinstance(one, ast.Assign)
            and isinstance(one.value, ast.Call)
            and getattr(one.value.func, "id", "") in names
        ):
            names |= {target.id for target in one.targets if isinstance(target, ast.Name)}
    yield from (one.lineno for one in ast.walk(tree) if isinstance(one, ast.Name) and one.id in names)


@pytest.mark.parametrize("name", ROWS)
def test_a_script_gets_as_many_lines_as_the_page_says_and_they_are_marked(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    marked = {number for number, line in enumerate(text.splitlines(), 1) if "# <-" in line}
    assert set(lines_of_ours(ast.parse(text))) == marked
    assert len(marked) == ROWS[name] <= 3


def test_the_page_has_a_row_for_each_adapter() -> None:
    examples = {f"train_{path.stem}.py" for path in (ROOT / "resilio_hpc" / "frameworks").glob("*.py")}
    assert set(ROWS) == {name for name in examples if (ROOT / "examples" / name).exists()}
