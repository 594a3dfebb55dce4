"""URLs of stores other than the file system, and the paths that stand for them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import UsageError

_S3_URL = re.compile(r"/?s3:/{1,2}([a-z0-9][a-z0-9.-]{1,62})(?:/(.*))?")
S3 = "s3:"
"""A path with this part is one of an object store: ``/s3:/bucket/prefix`` stands for ``s3://bucket/prefix``."""


def store_url(text: str) -> str:
    """Return ``s3://bucket/prefix`` as it is written, or as a path has it; "" for what is no such URL."""
    found = _S3_URL.fullmatch(text)
    if found is None:
        return ""
    prefix = "/".join(part for part in (found[2] or "").split("/") if part not in ("", "."))
    return "" if ".." in prefix.split("/") else f"s3://{found[1]}/{prefix}".rstrip("/")


def checkpoints_path(given: str | os.PathLike[str], name: str) -> Path:
    """Return the absolute path of a directory of checkpoints, which may be in an object store. Raises UsageError."""
    if url := store_url(str(given)):
        return Path("/", S3, *url.removeprefix("s3://").split("/"))
    try:
        return directory_path(given, name)
    except UsageError as error:
        if ":/" not in str(given):
            raise
        raise UsageError(f"{error}. Checkpoints may also go to s3://BUCKET/PREFIX") from None
