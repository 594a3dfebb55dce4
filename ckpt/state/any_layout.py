"""The same tensors in several layouts, of which a step has one; a restore takes the one that the step has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilio_hpc.core.errors import LayoutMismatch, UsageError


@dataclass(frozen=True, eq=False)
class AnyLayout:
    """In a state, instead of a dict: ``layouts`` are dicts with the same tensors, described in other ways.

    ``save`` names the one that is saved. A restore fills the one that the step has, whichever that is. ``hints``: what
    to add to the message where that one does not fit. Raises UsageError.
    """

    layouts: Mapping[str, Any]
    save: str
    hints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.save not in self.layouts:
            raise UsageError(f"AnyLayout: there is no layout {self.save!r}, but {', '.join(self.layouts)}")

    @property
    def saved(self) -> dict[str, Any]:
        """Return what is saved."""
        return {self.save: self.layouts[self.save]}

    def as_in(self, saved: Any) -> dict[str, Any]:
        """Return the layout that ``saved``, the state of a step, has there. Raises LayoutMismatch."""
        names = list(saved) if isinstance(saved, dict) else []
        if len(names) != 1 or names[0] not in self.layouts:
            raise LayoutMismatch(
                f"the state has one of the layouts {', '.join(self.layouts)}, and the checkpoint none of them"
            )
        return {names[0]: self.layouts[names[0]]}

    def hint(self, name: str) -> str:
        """Return what to add to the message where the checkpoint has this layout, and it does not fit."""
        more = self.hints.get(name, "")
        return f" (saved as {name}{': ' if more else ''}{more})"
