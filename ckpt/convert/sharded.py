"""Models in several files with an index beside them, as Hugging Face's libraries write them.

``model.safetensors.index.json`` (or ``pytorch_model.bin.index.json``) names the file of each tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from resilio_hpc.ckpt.convert.imported import Imported
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError
from resilio_hpc.core.regular_file import NotRegular, read_file

INDEX = ".index.json"
_LIMIT = 1 << 28


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def index_in(folder: Path) -> Path | None:
    """Return the index of a folder; of several, that of safetensors. Raises UsageError where that is not clear."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith(INDEX))
    preferred = [path for path in found if path.name.endswith(f".safetensors{INDEX}")] or found
    if len(preferred) > 1:
        names = ", ".join(path.name for path in preferred)
        raise UsageError(f"{folder} holds several models ({names}); give the index of one")
    return preferred[0] if preferred else None


def read(index: Path, read_one: Callable[[Path], Imported]) -> Imported:
    """Return all tensors by name, mapped. ``read_one``: reads one of the files, which lie beside the index.

    Raises UsageError, CorruptCheckpoint for files that do not hold what the index says, OSError.
    """
    try:
        data = read_file(index, _LIMIT)
        weight_map = msgspec.json.decode(data, type=_Index).weight_map
    except NotRegular as error:
        raise UsageError(f"{index}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{index} is no index of a model in several files: {error}") from error
    names: dict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        if "/" in file or "\0" in file or file in ("", ".", ".."):
            raise CorruptCheckpoint(f"{index} names a file that does not lie beside it: {file!r}")
        names[file].append(name)
    state: dict[str, Any] = {}
    for file, wanted in names.items():
        path = index.parent / file
        if not path.exists():
            raise CorruptCheckpoint(f"{path}, which {index.name} names, is missing")
        held = read_one(path).state
        missing = [name for name in wanted if not isinstance(held, dict) or name not in held]
        if missing:
            raise CorruptCheckpoint(f"{path} does not hold {missing[0]}, which {index.name} says")
        state.update({name: held[name] for name in wanted})
    return Imported({name: state[name] for name in weight_map})
