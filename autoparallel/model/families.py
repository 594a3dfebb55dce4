"""Facts of model families that tables of layouts do not state (``families.toml``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from resilio_hpc.core.compat import tomllib


@cache
def _families() -> tuple[Mapping[str, Any], ...]:
    text = files("resilio_hpc.autoparallel.model").joinpath("families.toml").read_text()
    return tuple(tomllib.loads(text)["family"])


def family(name: str) -> dict[str, Any]:
    """Return fields of a ``Transformer`` that follow from the model's name."""
    for row in _families():
        if re.search(row["pattern"], name, re.IGNORECASE):
            return {key: value for key, value in row.items() if key not in ("pattern", "source")}
    return {}
