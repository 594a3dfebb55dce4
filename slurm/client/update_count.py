"""The count of orders to nodes that slurmctld has carried out, from ``sdiag``: it shows whether another order came."""

from __future__ import annotations

import re
from collections.abc import Callable

_SECTION = "Remote Procedure Call statistics by message type"
_UPDATES = re.compile(r"^\s*REQUEST_UPDATE_NODE\s.*?count:(\d{1,18})\s", re.MULTILINE)
_TRIES, _WAIT_S = 5, 0.05


def parse_update_count(output: str) -> int | None:
    """Return the count since slurmctld started or was reconfigured.

    0 when there was none; None when this is not sdiag's output.
    """
    if _SECTION not in output:
        return None
    found = _UPDATES.search(output)
    return int(found[1]) if found else 0


def came_alone(before: int | None, after: int | None) -> bool:
    """Return whether no other order came between two counts around one of this process's own.

    A count that began again tells nothing, so: not alone. Missing counts (None) tell nothing either; then this is True,
    as if they had not been asked for.
    """
    return before is None or after is None or after - before == 1


def count_with_ours(read: Callable[[], int | None], before: int | None, sleep: Callable[[float], None]) -> int | None:
    """Return the count after an own order: slurmctld counts an order a moment after it has carried it out."""
    count = read()
    for _ in range(_TRIES):
        if count is None or count != before:
            break
        sleep(_WAIT_S)
        count = read()
    return count
