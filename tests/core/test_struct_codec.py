"""What is no message is refused, in either form, whatever stands around it."""

from __future__ import annotations

import msgspec
import pytest

from resilio_hpc.core.errors import WireError
from resilio_hpc.core.struct_codec import StructCodec


class Say(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    text: str


class Count(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    number: int


CODECS: dict[str, StructCodec[Say | Count]] = {
    "packets": StructCodec(Say | Count, "a word", 100),
    "lines": StructCodec(Say | Count, "a word", 100, tail=b"\n"),
    "frames": StructCodec(Say | Count, "a word", 100, msgspec.msgpack, b"v1"),
}


@pytest.mark.parametrize("name", CODECS)
def test_what_was_encoded_is_decoded(name: str) -> None:
    for message in (Say("a\nb"), Count(-7)):
        assert CODECS[name].decode(CODECS[name].encode(message)) == message


@pytest.mark.parametrize("name", CODECS)
def test_a_message_beyond_the_bound_is_refused_on_both_sides(name: str) -> None:
    with pytest.raises(WireError, match=r"Say of 1[0-9]{2} bytes exceeds the bound of 100"):
        CODECS[name].encode(Say("x" * 90))
    with pytest.raises(WireError, match="not a word"):
        CODECS[name].decode(CODECS[name].encode(Say("")) + b" " * 100)


@pytest.mark.parametrize("name", CODECS)
def test_anything_else_is_refused(name: str) -> None:
    whole = CODECS[name].encode(Say("x"))
    for data in (b"", whole[:-3], whole[1:], whole.replace(b"Say", b"Cry"), whole.replace(b"text", b"tent")):
        with pytest.raises(WireError, match="not a word"):
            CODECS[name].decode(data)


def test_what_no_message_can_hold_is_refused() -> None:
    with pytest.raises(WireError, match="cannot be a message"):
        CODECS["frames"].encode(Count(1 << 64))
