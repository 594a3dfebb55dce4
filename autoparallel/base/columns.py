"""Records of one kind as columns: one generic dataclass describes both the record and its columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

Column: TypeAlias = NDArray[np.float64]
"""One value per row (n,), or one for all rows (1,)."""
Rows: TypeAlias = NDArray[np.intp] | NDArray[np.bool_]
"""Indices of rows, or a mask."""


def default(value: Any, **metadata: str) -> Any:
    """Return a dataclass field with a record's default, whose type is a parameter.

    ``metadata``: see ``dataclasses.field``.
    """
    return field(default=value, metadata=metadata)


@dataclass(frozen=True)
class Columns:
    """The columns of records that have the same fields."""

    @classmethod
    def of(cls, records: Sequence[Any]) -> Self:
        """Return a row for each of the records."""
        return cls(**{f.name: np.array([getattr(one, f.name) for one in records], dtype=float) for f in fields(cls)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return all rows of the parts, which have one value per row; no rows without parts."""
        empty = [np.zeros(0)]
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts] or empty) for f in fields(cls)})

    def map(self, change: Callable[[Column], Column]) -> Self:
        """Return these records with each column changed."""
        return type(self)(**{f.name: change(getattr(self, f.name)) for f in fields(self)})

    def full(self, size: int) -> Self:
        """Return columns with one value per row."""
        return self.map(lambda column: np.broadcast_to(column, (size,)))

    def take(self, rows: Rows) -> Self:
        """Return these rows, of columns that have one value per row."""
        return self.map(lambda column: column[rows])
