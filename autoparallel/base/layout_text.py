"""A layout as text: what ``str(layout)`` prints, read again."""

from __future__ import annotations

import re

from resilio_hpc.autoparallel.base.layout import Layout, Recompute
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

_NAMES = {"tp": "tp", "pp": "pp", "dp": "dp", "mb": "micro_batch", "cp": "cp", "ep": "ep", "vpp": "vpp", "zero": "zero"}
_NUMBER = re.compile(r"([a-z]+)=?(\d{1,9})")
EXAMPLE = "tp8-pp4-dp2-mb1-sp-zero1-recompute-full"


def parse_layout(text: str, global_batch: int) -> Layout:
    """``tp8-pp4-dp2-mb1-vpp2-sp-zero1-zb-recompute-full``, or with commas and ``=``. Raises UsageError."""
    values: dict[str, int] = {}
    recompute, flags = Recompute.NONE, set[str]()
    words = [word for word in re.split(r"[-,\s]+", text.strip().lower()) if word]
    for place, word in enumerate(words):
        number = _NUMBER.fullmatch(word)
        if word in ("sp", "zb", "recompute"):
            flags.add(word)
        elif place and words[place - 1] == "recompute" and word.upper() in Recompute.__members__:
            recompute = Recompute[word.upper()]
        elif number and number[1] in _NAMES and number[1] not in values:
            values[number[1]] = int(number[2])
        else:
            raise UsageError(
                f"layout {printable(repr(text), 80)}: {printable(repr(word), 40)} is no part of one such as {EXAMPLE}"
            )
    if any(value < 1 for name, value in values.items() if name != "zero") or values.get("zero", 0) > 3:
        raise UsageError(f"layout {printable(repr(text), 80)}: degrees are 1 or more, zero is 0 to 3")
    numbers = {_NAMES[name]: value for name, value in values.items()}
    return Layout(
        **numbers, global_batch=global_batch, sequence_parallel="sp" in flags, zero_bubble="zb" in flags,
        recompute=recompute,
    )  # fmt: skip
