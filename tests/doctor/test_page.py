"""docs/doctor.md has the checks and settings of now."""

from __future__ import annotations

from resilio_hpc.doctor import registry
from tests.support.doctor import page


def test_the_tables_are_those_of_the_registry() -> None:
    text = page.PAGE.read_text()
    assert "<!-- checks -->" in text and "<!-- settings -->" in text
    assert page.written(text) == text, "python -m tests.support.doctor.page"
    assert all(f"`{one.name}`" in text for one in registry.CHECKS)
