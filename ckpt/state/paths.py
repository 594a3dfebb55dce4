"""Paths within a state: tuples of keys and positions, as names in a checkpoint and as text for people."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any
from urllib.parse import quote

LEFT_OUT = {"$left out": 0}
"""In an outline, the place of a tensor or of one of torch's objects."""


def component(key: Any) -> str:
    """Return one component of a path, unique among the keys of one dict; a legal name of an HDF5 link."""
    if type(key) is str:
        return _text_component(key)
    if type(key) is int:
        return str(key)
    return f"${type(key).__name__}:" + quote(repr(key), safe="")


@lru_cache(1 << 16)  # every save asks for the same ones
def _text_component(key: str) -> str:
    if key == "":
        return "$empty"
    if re.fullmatch(r"-?[0-9]+|\.\.?", key):  # the int 0 and the string "0" must differ; . is no name in HDF5
        return f"%{ord(key[0]):02X}" + key[1:]
    return quote(key, safe=" .:,;+=@()[]{}<>!#&'*-_~^|", errors="surrogatepass")


def joined(path: tuple[Any, ...]) -> str:
    """Return a path as the name of a tensor in a checkpoint."""
    # every save asks for those of all tensors: the call of ``component`` is left out for text
    return "/".join([_text_component(key) if type(key) is str else component(key) for key in path]) or "value"


def place(path: tuple[Any, ...]) -> str:
    """Return a path as people read it in a message."""
    return "state" + "".join(f"[{key!r}]" for key in path)
