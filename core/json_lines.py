"""Messages between a process and its helper: msgspec structs as lines of JSON."""

from __future__ import annotations

from typing import Any

from resilio_hpc.core.struct_codec import Message, StructCodec


class LineDecoder(StructCodec[Message]):
    """Splits lines and decodes them as one union of message structs."""

    def __init__(self, union: Any, what: str) -> None:
        super().__init__(union, what, tail=b"\n")


encode_line = LineDecoder[Any](Any, "a message").encode
