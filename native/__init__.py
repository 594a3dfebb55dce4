"""What Python is too slow for, without the GIL: copies with a checksum in the same pass, and large files.

``direct_io``: see ``ckpt.bulk_io``, which is how it is used. Where the C extensions are missing, the same functions
come from ``native.portable``: files, checksums and the order of all writes are the same. ``why_portable`` says why. It
is "" with the extensions.
"""

import os
from importlib.util import find_spec

try:
    if os.environ.get("RESILIO_NO_NATIVE", "") not in ("", "0"):
        raise ImportError("RESILIO_NO_NATIVE is set")
    from resilio_hpc.native import _direct_io as direct_io
    from resilio_hpc.native._mapping import make_huge, map_shared
    from resilio_hpc.native._memory import (
        await_word,
        change_word,
        copy_blocks,
        copy_crc32c,
        crc32c,
        crc32c_portable,
        populate,
        populate_missing,
    )

    why_portable = ""
except ImportError as error:
    from resilio_hpc.native.portable import direct_io  # type: ignore[no-redef]
    from resilio_hpc.native.portable.checksum import crc32c, crc32c_portable
    from resilio_hpc.native.portable.mapping import make_huge, map_shared
    from resilio_hpc.native.portable.memory import (
        await_word,
        change_word,
        copy_blocks,
        copy_crc32c,
        populate,
        populate_missing,
    )

    is_built = find_spec("resilio_hpc.native._memory") is not None
    why_portable = str(error) if is_built else "they were not built when resilio_hpc was installed"

__all__ = [
    "await_word",
    "change_word",
    "copy_blocks",
    "copy_crc32c",
    "crc32c",
    "crc32c_portable",
    "direct_io",
    "make_huge",
    "map_shared",
    "populate",
    "populate_missing",
    "why_portable",
]
