"""``checkpoint.h5``: a committed step as one HDF5 file, for people and their tools. Made on demand, never restored.

It holds no tensor, but links and virtual datasets over the shard files beside it (``view_image``). Its first 512 bytes,
which HDF5 programs skip, name its step, and the hash of the rest.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.manifest import Manifest, sha256
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.regular_file import NotRegular

SEAL_BYTES = 512
_FORMAT = "resilio-checkpoint-view"
_PIECE_BYTES = 1 << 20


class _Seal(msgspec.Struct, frozen=True):
    """The first bytes.

    ``step_sha256``: of the manifest without its order of commits and its writer, which a copy changes.
    """

    format: str
    step_sha256: str
    sha256: str


def write_view(directory: Path, manifest: Manifest) -> list[str]:
    """Write the file, durable on return; return the paths of tensors that are shown in parts only.

    ``directory``: of the checkpoints. Raises UsageError for a step that is a link, CorruptCheckpoint for bad tables,
    OSError.
    """
    from resilio_hpc.ckpt.store.view_image import view_image

    step = checkpoint_index.step_directory(directory, manifest.step)
    if not store_of(step).is_directory(step):
        raise UsageError(f"{step} is a link, and nothing is written behind links; copy the step, and show the copy")
    image, in_parts = view_image(step, manifest, SEAL_BYTES)
    seal = _Seal(_FORMAT, _hash_of(manifest), sha256(image[SEAL_BYTES:]))
    store_of(step).write(step / checkpoint_index.VIEW, msgspec.json.encode(seal).ljust(SEAL_BYTES) + image[SEAL_BYTES:])
    return in_parts


def why_wrong(step: Path, manifest: Manifest) -> str:
    """Return why the file in the directory ``step`` does not match; "" when it does, or is missing.

    Raises OSError.
    """
    try:
        file = store_of(step).open(step / checkpoint_index.VIEW)
    except FileNotFoundError:
        return ""
    except NotRegular as error:
        return error.strerror or ""
    with closing(file):
        try:
            seal = msgspec.json.decode(file.pread(SEAL_BYTES, 0), type=_Seal)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"its first {SEAL_BYTES} bytes cannot be read: {error}"
        if seal.format != _FORMAT:
            return f"its format is {seal.format!r}"
        if seal.step_sha256 != _hash_of(manifest):
            return "it was made for another step, or for this one before it was saved again"
        digest, at = hashlib.sha256(), SEAL_BYTES
        while data := file.pread(_PIECE_BYTES, at):
            digest.update(data)
            at += len(data)
    return "" if seal.sha256 == digest.hexdigest() else "it does not match its checksum"


def _hash_of(manifest: Manifest) -> str:
    return sha256(msgspec.json.encode(msgspec.structs.replace(manifest, order=0, writer=msgspec.UNSET)))
