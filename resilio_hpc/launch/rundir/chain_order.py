"""A user's orders for a run's chain: stop, or another limit on the number of its jobs (``resilio chain``).

One small file of the run directory, replaced atomically. The running job's supervisor sees it within a second; a job
that starts sees it before it does anything else. So an order holds although slurmctld is away, and one that comes while
a next job is being submitted is not lost: an order is written before the queue is looked at, and a submission looks for
an order afterwards.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import create_exclusive, write_atomic
from resilio_hpc.core.json_fields import Fields

NO_LIMIT = sys.maxsize


class ChainOrder(Struct, frozen=True):
    """The order that stands. ``stopped``: the chain ends.

    ``limit``: jobs at most, None: as ``--chain-max`` says. ``by``: the user who ordered it, ``time``: when, in Unix
    seconds.
    """

    stopped: bool = False
    limit: int | None = None
    by: str = ""
    time: float = 0.0

    def limit_of(self, chain_max: int) -> int:
        """Return how many jobs the chain may have."""
        return chain_max if self.limit is None else self.limit


def parse(data: object) -> ChainOrder:
    """Return the order from the file's JSON; no order where it is damaged. Pure."""
    fields = Fields.of(data)
    limit = fields.whole("limit")
    return ChainOrder(
        fields.data.get("stopped") is True,
        limit if limit is not None and limit > 0 else None,
        fields.text("by"),
        fields.time("time") or 0.0,
    )


def read(run_path: Path) -> ChainOrder:
    """Return the order that stands; no order where there is no file."""
    return parse(read_raw(run_path))


def read_raw(run_path: Path) -> dict[str, Any]:
    """Return the file's JSON as it is, for ``parse``."""
    return trusted_files.read_object(_file(run_path)) or {}


def write(run_path: Path, order: ChainOrder) -> None:
    """Replace the order, durably. Raises OSError."""
    write_atomic(_file(run_path), json.dumps({"v": 1, **to_builtins(order)}).encode())


def expect(run_path: Path) -> None:
    """Create the file, empty: an NFS client may hide a new name for a minute from a host that looked for it before."""
    create_exclusive(_file(run_path), b"{}", 0o644)


def _file(run_path: Path) -> Path:
    return run_path / "links" / "order.json"
