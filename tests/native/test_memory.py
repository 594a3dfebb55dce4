"""Checksums against published vectors, and copies that change nothing but the target."""

from __future__ import annotations

import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc import native

VECTORS = [  # RFC 3720 appendix B.4, and the check value of CRC-32C
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_checksum_gives_the_published_values(data: bytes, expected: int) -> None:
    assert native.crc32c(data) == expected
    assert native.crc32c_portable(data) == expected
    assert native.copy_crc32c(bytearray(len(data)), data) == expected


@pytest.mark.parametrize("size", [1, 7, 8, 767, 768, 769, 12287, 12288, 12289, 300_001, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_hardware_and_portable_agree_and_the_copy_is_exact(size: int, offset: int) -> None:
    source = os.urandom(size + offset)
    target = bytearray(b"\xaa" * (size + offset + 16))
    with memoryview(source) as view, memoryview(target) as room:
        crc = native.copy_crc32c(room[offset : offset + size], view[offset:])
    assert crc == native.crc32c_portable(memoryview(source)[offset:]) == native.crc32c(memoryview(source)[offset:])
    assert target[offset : offset + size] == source[offset:]
    assert target[:offset] == b"\xaa" * offset
    assert target[offset + size :] == b"\xaa" * 16


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_a_checksum_continues_where_another_ended(data: bytes, cut: int) -> None:
    assert native.crc32c(data[cut:], native.crc32c(data[:cut])) == native.crc32c(data)


def test_sizes_that_differ_are_refused_and_nothing_is_written() -> None:
    target = bytearray(4)
    with pytest.raises(ValueError, match="target has 4 bytes, source has 5"):
        native.copy_crc32c(target, b"12345")
    assert target == bytes(4)


def test_a_read_only_target_is_refused() -> None:
    with pytest.raises(TypeError):
        native.copy_crc32c(b"1234", b"5678")


def test_populate_keeps_the_content() -> None:
    with mmap.mmap(-1, 1 << 20) as mapping:
        mapping[5000:5003] = b"abc"
        native.populate(mapping)
        assert mapping[5000:5003] == b"abc"
        assert mapping[:5000] == bytes(5000)
