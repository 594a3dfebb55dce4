"""A model as a user names it: a preset, or a config.json (the file, or the folder that it is in)."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.autoparallel.model.huggingface_config import LARGEST_BYTES, from_huggingface
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.core.errors import UsageError, os_error_text


def find_model(name: str) -> TransformerModel:
    """A file is read where there is one. Raises UsageError."""
    path = Path(name)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            if path.suffix == ".json" or path.exists():
                raise UsageError(f"{path}: there is no such file")
            return preset(name)
        if path.suffix == ".py":
            raise UsageError(
                f"{path} is a program: a search needs numbers, by a preset, a config.json or --megatron (resilio plan "
                "model --module FILE.py:NAME counts any module)"
            )
        with path.open("rb") as file:
            return from_huggingface(file.read(LARGEST_BYTES + 1), str(path))
    except OSError as error:
        raise UsageError(os_error_text(error, str(path))) from error
    except ValueError as error:  # a null character in a name
        raise UsageError(f"{name!r} is neither a preset nor a file: {error}") from error
