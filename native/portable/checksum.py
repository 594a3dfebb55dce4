"""CRC32C by exclusive-ors of large arrays.

The CRC of a message is its remainder by a polynomial of degree 32. A multiple of that polynomial has four terms only:
it takes the front of a message off with three exclusive-ors, and the rest has the same remainder. The square of a
multiple has four terms, too, twice as far apart. The 8th power moves whole bytes, the 256th power arrays of a hundred
thousand. The rest in the end is short enough for a table with a word for each of its bits.
Multiples with few terms for CRCs: Russell, "Chorba: A novel CRC32 implementation", arXiv:2412.16398.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from resilio_hpc.native.portable.buffers import Bytes, bytes_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected; RFC 3720 appendix B.4
_TERMS = (5685, 1362, 426, 0)
"""x^5685 + x^1362 + x^426 + 1 is a multiple; the distance between its first two terms is long for one of four terms."""
_DISTANCES = tuple(_TERMS[0] - term for term in _TERMS[1:])
_SCALES = (32, 4, 1)
"""Powers of the 8th power, so distances in bytes. A larger one has longer arrays, and leaves more."""
_PIECE_BYTES = 4 << 20


def _table_of_bytes() -> tuple[int, ...]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ _POLYNOMIAL if crc & 1 else crc >> 1
        table.append(crc)
    return tuple(table)


def _powers_of_x() -> npt.NDArray[np.uint32]:
    """Return the remainder of each bit of what is left in the end, whose last bit is followed by 32 zeros."""
    powers = np.empty(_TERMS[0] * 8, dtype=np.uint32)
    power = 0x80000000
    for bit in range(-32, len(powers)):
        if bit >= 0:
            powers[-1 - bit] = power
        power = power >> 1 ^ _POLYNOMIAL if power & 1 else power >> 1
    return powers


_TABLE = _table_of_bytes()
_POWERS = _powers_of_x()


def crc32c(data: Buffer, start: int = 0, /) -> int:
    """Return the CRC32C of the data, or of what had ``start`` with the data behind it."""
    left = bytes_of(data)
    crc = start & 0xFFFFFFFF
    for at in range(0, left.size, _PIECE_BYTES):
        crc = _remainder(left[at : at + _PIECE_BYTES], crc)
    return crc


def _remainder(data: Bytes, start: int) -> int:
    if data.size < 4:
        return crc32c_portable(data.data, start)
    work = data.copy()
    work[:4] ^= np.frombuffer((start ^ 0xFFFFFFFF).to_bytes(4, "little"), dtype=np.uint8)
    for scale in _SCALES:
        if work.size > _TERMS[0] * scale:
            work = _without_front(work, [distance * scale for distance in _DISTANCES])
    bits = np.unpackbits(work, bitorder="little")
    return int(np.bitwise_xor.reduce(_POWERS[_POWERS.size - bits.size :] * bits)) ^ 0xFFFFFFFF


def _without_front(work: Bytes, distances: list[int]) -> Bytes:
    """Return the end of the array, as long as the last distance, after the bytes before it went into it."""
    end = work.size - distances[-1]
    for at in range(0, end, distances[0]):
        front = work[at : min(at + distances[0], end)]
        for distance in distances:
            later = work[at + distance : at + distance + front.size]
            np.bitwise_xor(later, front, out=later)
    return work[end:]


def crc32c_portable(data: Buffer, start: int = 0, /) -> int:
    """Return the same, byte by byte from a table."""
    crc = start & 0xFFFFFFFF ^ 0xFFFFFFFF
    for byte in bytes_of(data).tobytes():
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
