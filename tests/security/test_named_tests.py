"""docs/security.md names a test for each line: they exist, and each line has one."""

from __future__ import annotations

import ast
import re

from tests.support.environments import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 20
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_line_of_a_table_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| What")]
    assert len(rows) > 20
    assert [row for row in rows if "`tests/" not in row] == []
