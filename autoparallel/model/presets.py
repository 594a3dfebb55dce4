"""Well-known models by name (``presets.toml``)."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from resilio_hpc.autoparallel.model.huggingface_config import LARGEST_BYTES, from_huggingface, from_mapping
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError, os_error_text
from resilio_hpc.core.json_fields import printable


@dataclass(frozen=True)
class Preset:
    """A preset. ``published``: published parameters, exact (int), or rounded, in billions (str). ``source``: where."""

    model: TransformerModel
    published: int | str
    source: str


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return all, by name, in the table's order."""
    table = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    return {name: _preset(name, row) for name, row in table.items()}


def _preset(name: str, row: Mapping[str, object]) -> Preset:
    config, published = row["config"], row["published"]
    assert isinstance(config, dict) and isinstance(published, int | str)
    return Preset(replace(from_mapping(config, f"preset {name}"), name=name), published, str(row["source"]))


def preset(name: str) -> TransformerModel:
    """Return the model of that name. Raises UsageError with similar names."""
    known = presets()
    if name.lower() in known:
        return known[name.lower()].model
    near = difflib.get_close_matches(name.lower(), known, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the presets are {', '.join(known)}"
    raise UsageError(f"no model is named {printable(repr(name), 60)}, and there is no such file: {hint}")


def find_model(name: str) -> TransformerModel:
    """Return the model in a file of that name, or the shipped one. Raises UsageError."""
    path = Path(name)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            if path.suffix == ".json" or path.exists():
                raise UsageError(f"{path}: there is no such file")
            return preset(name)
        if path.suffix == ".py":
            raise UsageError(
                f"{path} is a program: which of its functions makes the model? --module {path}:NAME; or give a preset, "
                "a config.json or --megatron"
            )
        with path.open("rb") as file:
            return from_huggingface(file.read(LARGEST_BYTES + 1), str(path))
    except OSError as error:
        raise UsageError(os_error_text(error, str(path))) from error
    except ValueError as error:  # a null character in a name
        raise UsageError(f"{name!r} is neither a preset nor a file: {error}") from error
