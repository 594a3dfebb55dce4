"""The decoders against what nobody in his right mind sends. ``benchmarks/wire_fuzz.py`` is the same with a million."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.core import rank_link, wire
from resilio_hpc.core.errors import WireError
from wire_fuzz import CODECS, UNIONS, Outcome, fuzz_frames, rss_mb
from wire_fuzz_values import Values

QUICK = 20_000
FULL = 1_000_000
GROWTH_MB = 64  # what caches and the allocator may keep, however many messages come


def check(outcome: Outcome, count: int) -> None:
    assert outcome.broke == []
    assert outcome.frames == count
    assert outcome.decoded > count // 50  # else nothing gets past the first byte
    assert set(outcome.refused) >= {"bits", "spliced", "nested", "lying", "truncated", "version", "wrong fields"}


def test_frames_are_decoded_or_refused() -> None:
    check(fuzz_frames(QUICK, seed=1), QUICK)


@pytest.mark.slow
def test_a_million_frames_are_decoded_or_refused_and_memory_does_not_grow() -> None:
    fuzz_frames(QUICK, seed=2)
    before = rss_mb()
    check(fuzz_frames(FULL, seed=3), FULL)
    assert rss_mb() - before < GROWTH_MB


@pytest.mark.parametrize("name", CODECS)
@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=300)
def test_any_bytes_are_decoded_or_refused(name: str, data: bytes, versioned: bool) -> None:
    try:
        CODECS[name].decode(bytes([wire.VERSION]) + data if versioned else data)
    except WireError:
        pass


@pytest.mark.parametrize("name", CODECS)
@given(st.integers(0, 1 << 32))
@settings(max_examples=200)
def test_what_is_encoded_is_decoded_the_same(name: str, seed: int) -> None:
    message = Values(Random(seed)).message(UNIONS[name])
    try:
        frame = CODECS[name].encode(message)
    except WireError:
        return
    assert CODECS[name].encode(CODECS[name].decode(frame)) == frame  # not the messages: some numbers are NaN


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_packet_of_a_rank_is_decoded_or_refused(packet: bytes) -> None:
    for decode in (rank_link.to_agent.decode, rank_link.to_rank.decode):
        try:
            decode(packet)
        except WireError:
            pass


@given(st.integers(0, 1 << 32))
@settings(max_examples=200)
def test_broken_packets_of_a_rank_are_refused(seed: int) -> None:
    rng = Random(seed)
    packet = bytearray(rank_link.to_agent.encode(rank_link.RestoreFailed(1, "memory", "é\n\0" * 3)))
    for _ in range(rng.randint(1, 4)):
        packet[rng.randrange(len(packet))] ^= 1 << rng.randrange(8)
    try:
        rank_link.to_agent.decode(bytes(packet))
    except WireError:
        pass
