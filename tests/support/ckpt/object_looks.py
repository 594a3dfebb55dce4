"""A look at an object store beside what is tested, and a fresh start of what is."""

from __future__ import annotations

from typing import Any

from resilio_hpc.ckpt.store import mounts, s3_client
from tests.support.ckpt.object_server import client_of
from tests.support.ckpt.stores import Place

BUCKET = "training"


def url_of(place: Place) -> str:
    """The URL of a directory of checkpoints."""
    return f"s3://{'/'.join(place.directory.parts[2:])}"


def forget() -> None:
    """Let this process read its environment again."""
    s3_client.new_client.cache_clear()
    mounts._object_store.cache_clear()


def keys_of(server: str, place: Place) -> list[str]:
    """Names below the directory of checkpoints, as they are in the store."""
    prefix = f"{'/'.join(place.directory.parts[3:])}/"
    answer = client_of(server).list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return sorted(str(one["Key"]).removeprefix(prefix) for one in answer.get("Contents", ()))


def uploads_of(server: str, place: Place) -> list[Any]:
    prefix = "/".join(place.directory.parts[3:])
    return list(client_of(server).list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", ()))


def data_of(keys: list[str]) -> set[str]:
    return {key.split("/")[1] for key in keys if key.startswith("data/")}
