"""What Python is too slow for, without the GIL: copies with a checksum in the same pass, and large files.

``direct_io``: see ``ckpt.bulk_io``, which is how it is used.
"""

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
]
