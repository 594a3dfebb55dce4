"""Methods of one object of a framework, called through an adapter's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_through(owner: Any, name: str, through: Callable[..., Any]) -> None:
    """Have ``owner.name(…)`` call ``through(owner.name, …)``."""
    own = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **words: through(own, *arguments, **words))
