"""Work on memory that Python is too slow for: copying with a checksum in one pass, without the GIL."""

from resilio_hpc.native._memory import copy_crc32c, crc32c, crc32c_portable, has_hardware, populate

__all__ = ["copy_crc32c", "crc32c", "crc32c_portable", "has_hardware", "populate"]
