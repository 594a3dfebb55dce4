"""Check an installed resilio_hpc without its checkout: extensions, checksums, and checkpoints that others can read.

    python scripts/wheel_check.py [--portable] [--save DIRECTORY] [--restore DIRECTORY ...]

Needs numpy, and no torch. ``--portable``: the installation has no extensions. ``--save``: leave a checkpoint there,
for another installation. ``--restore``: read the checkpoint that another one left. Prints one line; exits with 1 at the
first thing that is wrong.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

import resilio_hpc
from resilio_hpc import native
from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.native.portable import checksum as portable

PATTERN = (np.arange(3_000_017, dtype=np.uint64) * 0x9E3779B97F4A7C15 >> 29).astype("<u2").tobytes()
PATTERN_CRC32C = 0x6367BEFD
"""Of PATTERN, on every processor."""
VECTORS = {b"": 0, b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43}  # RFC 3720 appendix B.4
WAYS = ("tables", "CRC32C instruction", "carry-less products")


def check(is_so: bool, what: str) -> None:
    """End the program if that is not so."""
    if not is_so:
        sys.exit(f"wheel_check: {what}")


def state() -> dict[str, object]:
    """Return what is saved: more than one block, less than one, odd sizes, and values."""
    large = np.frombuffer(PATTERN, dtype="<u2").astype("<f4")
    return {"large": large, "odd": large[: 3 * 7 * 11].reshape(3, 7, 11).astype("<i2"), "small": large[:3], "step": 7}


def compare(restored: object) -> bool:
    """Return whether it is ``state()``, to the bit."""
    wanted = state()
    if not isinstance(restored, dict) or restored.keys() != wanted.keys() or restored["step"] != wanted["step"]:
        return False
    arrays = [name for name, value in wanted.items() if isinstance(value, np.ndarray)]
    return all(
        np.asarray(restored[name]).dtype == wanted[name].dtype and np.array_equal(restored[name], wanted[name])  # type: ignore[attr-defined]
        for name in arrays
    )


def checksums() -> str:
    """Return the fastest way of this processor, after all ways gave the published checksums."""
    from resilio_hpc.native import _memory

    for way in range(_memory.available + 1):
        _memory.use(way)
        check(native.crc32c(PATTERN) == PATTERN_CRC32C, f"checksum by {WAYS[way]}")
        room = bytearray(len(PATTERN))
        check(native.copy_crc32c(room, PATTERN) == PATTERN_CRC32C and room == PATTERN, f"copy by {WAYS[way]}")
    return WAYS[_memory.available]


def main() -> None:
    """Check everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--portable", action="store_true", help="the installation has no extensions")
    parser.add_argument("--save", type=Path, metavar="DIRECTORY", help="leave a checkpoint there")
    parser.add_argument("--restore", type=Path, nargs="*", default=[], metavar="DIRECTORY", help="read these")
    options = parser.parse_args()
    check("torch" not in sys.modules, "torch was imported")
    check(bool(native.why_portable) == options.portable, f"extensions: {native.why_portable or 'they are there'}")
    for data, crc in VECTORS.items():
        check(native.crc32c(data) == portable.crc32c(data) == crc, f"checksum of {data!r}")
    check(native.crc32c(PATTERN) == portable.crc32c(PATTERN) == PATTERN_CRC32C, "checksum of the pattern")
    way = "Python" if options.portable else checksums()
    with tempfile.TemporaryDirectory() as own:
        directory = options.save or Path(own)
        Checkpointer(directory).save(7, state()).wait()
        for place in [directory, *options.restore]:
            restored = Checkpointer(place, memory=False).restore()
            check(restored is not None and restored[0] == 7 and compare(restored[1]), f"restored from {place}")
    concurrent = "io_uring" if native.direct_io.is_concurrent() else "one transfer at a time"
    version = f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}"
    print(f"resilio_hpc {resilio_hpc.__version__}, {version}: checksums by {way}, {concurrent}, checkpoints right")


if __name__ == "__main__":
    main()
