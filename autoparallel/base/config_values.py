"""Values of a model's configuration, each checked when it is read; errors name the key and its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable


@dataclass(frozen=True)
class ConfigValues:
    """Configuration values. ``where``: the file or preset, for errors. A key with null counts as missing."""

    where: str
    data: Mapping[str, object]

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number >= 0. Without a default the key must exist."""
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise UsageError(f"{self.where}: {key} is missing")
            return default
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.wrong(key, "a whole number, 0 or more")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def must_be(self, key: str, *allowed: object, why: str) -> None:
        """Refuse a key whose value changes the model in a way that is not described here."""
        value = self.data.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise self.wrong(key, " or ".join(map(repr, allowed)), f": {why}")

    def wrong(self, key: str, wanted: str, why: str = "") -> UsageError:
        value = self.data.get(key)
        huge = isinstance(value, int) and value.bit_length() > 256
        shown = "a number of many digits" if huge else printable(repr(value), 60)
        return UsageError(f"{self.where}: {key} is {shown}, not {wanted}{why}")
