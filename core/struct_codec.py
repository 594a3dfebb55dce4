"""Messages as bytes: msgspec structs of one union, as JSON or msgpack, within a bound of size. Data, never code."""

from __future__ import annotations

import sys
from typing import Any, Generic, TypeVar

import msgspec

from resilio_hpc.core.errors import WireError

Message = TypeVar("Message")


class StructCodec(Generic[Message]):
    """Encodes and decodes one union of message structs.

    ``what``: its name in errors, such as "a command to the spawner". ``form``: msgspec.json or msgspec.msgpack.
    ``head`` and ``tail`` stand before and after each message.
    """

    def __init__(
        self,
        union: Any,
        what: str,
        max_bytes: int = sys.maxsize,
        form: Any = msgspec.json,
        head: bytes = b"",
        tail: bytes = b"",
    ) -> None:
        self._what = what
        self._max_bytes = max_bytes
        self._head, self._tail = head, tail
        self._encoder = form.Encoder()
        self._decoder = form.Decoder(union)

    def encode(self, message: Message) -> bytes:
        """Return a message as bytes.

        Raises WireError for one that is too long, or has a value that no message can hold.
        """
        try:
            data: bytes = self._head + self._encoder.encode(message) + self._tail
        except (OverflowError, RecursionError, TypeError) as error:  # the peer's text, to be passed on
            raise WireError(f"cannot be a message: {error}") from error
        if len(data) > self._max_bytes:
            raise WireError(f"{type(message).__name__} of {len(data)} bytes exceeds the bound of {self._max_bytes}")
        return data

    def decode(self, data: bytes) -> Message:
        """Return the message. Raises WireError for anything else: another head, unknown types or fields, garbage."""
        if not data.startswith(self._head) or len(data) > self._max_bytes:
            raise WireError(f"not {self._what}")
        try:
            message: Message = self._decoder.decode(data[len(self._head) :])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not {self._what}: {error}") from error
        return message
