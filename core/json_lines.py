"""Messages between a process and its helper: msgspec structs as lines of JSON."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from resilio_hpc.core.errors import WireError

Message = TypeVar("Message")
_encoder = msgspec.json.Encoder()


def encode_line(message: Any) -> bytes:
    """One line, with its newline."""
    return _encoder.encode(message) + b"\n"


class LineDecoder(Generic[Message]):
    """Of one union of message structs."""

    def __init__(self, union: Any, what: str) -> None:
        """Read lines; ``what``: their name in errors, such as "a request to the saver"."""
        self._decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(union)
        self._what = what

    def decode(self, line: bytes) -> Message:
        """Return the message of a line. Raises WireError."""
        try:
            return self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not {self._what}: {error}") from error
