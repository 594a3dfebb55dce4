"""Answers in Slurm's JSON: whether they are valid, and their records. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.slurm_errors import Unanswered

Record = TypeVar("Record")
_NOT_THERE = re.compile(r"Invalid (?:job id|node name)|Node \S+ not found")


class Garbled(SlurmError):
    """Raised when a Slurm command printed something else than expected (torn, or of an unknown version)."""


class AnswerDecoder(Generic[Record]):
    """Reads the list ``key`` ("nodes", "jobs") of an answer.

    ``kind``: a struct of the fields that are used, all of type Any with a default: other fields are skipped without
    being decoded, which saves most of the time that reading 10,000 nodes takes.
    """

    def __init__(self, key: str, kind: type[Record]) -> None:
        self._key = key
        self._kind = kind
        fields = [(key, list[kind], msgspec.UNSET), ("errors", Any, None)]  # type: ignore[valid-type]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Answer", fields))

    def records(self, output: str) -> list[Record]:
        """Return the records; none where Slurm knows none.

        Raises Garbled when this is no such answer, and Unanswered when it names errors: 22.05 answers for a slurmctld
        that is away with exit code 0, no records and an error.
        """
        try:
            answer: Any = self._decoder.decode(output)
            found, errors = getattr(answer, self._key), answer.errors
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            found, errors = self._leniently(output)
        if errors:
            said = printable(_said(errors))
            if _NOT_THERE.search(said):
                return []
            raise Unanswered(f"Slurm did not tell its {self._key}: {said}")
        if not isinstance(found, list):
            raise Garbled(f"Slurm's answer has no list of {self._key}")
        return found

    def _leniently(self, output: str) -> tuple[list[Record] | None, Any]:
        """Decode without records that are invalid, and with NaN and Infinity, which Slurm prints for odd loads."""
        try:
            answer = json.loads(output)
        except (ValueError, RecursionError) as error:
            raise Garbled(f"Slurm's answer is not JSON: {error}; it begins {printable(output, 60)!r}") from error
        if not isinstance(answer, dict):
            raise Garbled(f"Slurm's answer is not a JSON object: {printable(output, 60)!r}")
        found = answer.get(self._key)
        if not isinstance(found, list):
            return None, answer.get("errors")
        return [msgspec.convert(one, self._kind) for one in found if isinstance(one, dict)], answer.get("errors")


def _said(errors: Any) -> str:
    entries: Sequence[Any] = errors if isinstance(errors, list) else [errors]
    words = [entry.get("description") or entry.get("error") if isinstance(entry, dict) else entry for entry in entries]
    return "; ".join(str(word) for word in words if word) or "an error without words"
