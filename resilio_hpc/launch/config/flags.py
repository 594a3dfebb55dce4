"""The flags of ``resilio-launch`` as rows of data, most of them the metadata of a field of ``LaunchOptions``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from resilio_hpc.core.compat import StrEnum


class FlagGroup(StrEnum):
    """The groups of ``--help``, in its order."""

    WORLD = "the world"
    PROGRAM = "the program"
    FAILURES = "failures"
    RUN = "the run"
    OUTPUT = "output"
    TORCHRUN = "accepted for torchrun's sake"


@dataclass(frozen=True)
class Flag:
    """One flag. ``names`` hold the hyphen spelling; the parser adds the underscore spelling.

    ``default``, and the values that ``type`` gives, are raw ones: torchrun's types, None where it was not given.
    """

    names: tuple[str, ...]
    help: str
    type: Callable[[str], Any] | None = str  # None: a switch
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    pet: bool = False  # torchrun reads its default from PET_<NAME>
    no_effect: str = ""  # why giving it changes nothing here
    repeatable: bool = False  # every use adds to a list
    least: float | None = None  # a number below it is refused
    above: float | None = None  # a number must be above it
    reads: Callable[[Any], Any] | None = None  # raw value → the field's; None: it depends on more than this flag

    @property
    def dest(self) -> str:
        """Return the attribute in the parsed namespace, as argparse (and torchrun) derive it."""
        return self.names[-1].lstrip("-").replace("-", "_")

    def refuses(self, value: float | None) -> str:
        """Return what a number must be that is not ``value``; "" where it may be."""
        if value is None:
            return ""
        if self.above is not None and value <= self.above:
            return f"above {self.above:g}"
        return f"{self.least:g} or more" if self.least is not None and value < self.least else ""


def same(value: Any) -> Any:
    """Return a raw value that is the field's, too."""
    return value


_GIVEN_BY_DEFAULT = object()


def flag(
    group: FlagGroup,
    help: str,
    default: Any,
    type: Callable[[str], Any] | None = str,
    *,
    names: str = "",
    raw: Any = _GIVEN_BY_DEFAULT,
    reads: Callable[[Any], Any] | None = same,
    **rest: Any,
) -> Any:
    """Return a dataclass field that is a flag.

    ``default``: MISSING for one that must be given; ``names``: if not the field's, separated by spaces; ``raw``: the
    raw default, if another one; ``rest``: of ``Flag``.
    """
    raw = default if raw is _GIVEN_BY_DEFAULT else raw
    return dataclasses.field(
        default=default,
        metadata={FlagGroup: group, Flag: Flag(tuple(names.split()), help, type, raw, reads=reads, **rest)},
    )


world_flag = partial(flag, FlagGroup.WORLD)
program_flag = partial(flag, FlagGroup.PROGRAM)
failures_flag = partial(flag, FlagGroup.FAILURES)
run_flag = partial(flag, FlagGroup.RUN)
output_flag = partial(flag, FlagGroup.OUTPUT)
torchrun_flag = partial(flag, FlagGroup.TORCHRUN)


def own_rows(options: type) -> dict[str, Flag]:
    """Return field → flag of a dataclass, in its order.

    A field without names has its own name, without the unit ``_s``.
    """
    return {field.name: _row(field) for field in dataclasses.fields(options) if Flag in field.metadata}


def rows(options: type, group: FlagGroup) -> Iterator[Flag]:
    """Yield the flags of one group in the order of a dataclass's fields, those of options that it holds included."""
    for field in dataclasses.fields(options):
        part: Any = field.default_factory
        if field.metadata.get(FlagGroup) == group:
            yield _row(field)
        elif part is not dataclasses.MISSING:
            yield from rows(part, group)


def _row(field: dataclasses.Field[Any]) -> Flag:
    row: Flag = field.metadata[Flag]
    name = "--" + field.name.removesuffix("_s").replace("_", "-")
    return row if row.names else dataclasses.replace(row, names=(name,))


def whole_number(text: str) -> int:
    """Return an int; the error is in this package's words."""
    try:
        return int(text)
    except ValueError:
        raise _not_possible(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """Return a finite float; the error is in this package's words."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _not_possible(f"{text!r} is not a number")
    return value


def comma_separated(text: str) -> list[str]:
    """Return the items of a list: ``a,b`` → [a, b]; ``,,`` is a comma inside an item (torchrun's rule)."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


def _not_possible(message: str) -> Exception:
    import argparse  # here, since agents read no command line

    return argparse.ArgumentTypeError(message)
