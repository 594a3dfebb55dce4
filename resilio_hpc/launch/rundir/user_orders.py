"""What a user orders of a run that trains: a test of its nodes, a checkpoint, a drill. Files for its controller.

Each kind of order is one small file of the run directory, replaced atomically. The controller's node sees it with its
next status, and has it removed before it is carried out: once, or twice where the controller changes in between.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct, to_builtins

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.json_fields import Fields

Kind = Literal["test", "checkpoint", "drill"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class UserOrder(Struct, frozen=True):
    """An order. ``mark`` tells it from others; ``replace``: nodes that fail a test are replaced; ``by``: the user.

    Of a drill: ``fault`` names what is done, and ``rank`` whom it meets; ``force``: also where that costs all steps.
    ``at``: when it was given, Unix seconds.
    """

    kind: Kind
    mark: str
    by: str = ""
    replace: bool = False
    fault: str = ""
    rank: int = -1
    force: bool = False
    at: float = 0.0


def parse(kind: Kind, data: object) -> UserOrder | None:
    """Return the order from its file's JSON; None where there is none. Pure."""
    fields = Fields.of(data)
    mark = fields.text("mark")
    replace = fields.data.get("replace") is True
    if not mark:
        return None
    rank = fields.whole("rank")
    return UserOrder(
        kind, mark[:64], fields.text("by")[:64], replace, fields.text("fault")[:64], -1 if rank is None else rank,
        fields.data.get("force") is True, fields.time("at") or 0.0,
    )  # fmt: skip


def read_raw(run_path: Path, kind: Kind) -> dict[str, Any] | None:
    """Return a file's JSON as it is, for ``parse``. Raises Untrusted."""
    return trusted_files.read_object(_file(run_path, kind))


def write(run_path: Path, order: UserOrder) -> None:
    """Give the order, durably. Raises OSError."""
    write_atomic(_file(run_path, order.kind), json.dumps({"v": 1, **to_builtins(order)}).encode())


def remove(run_path: Path, kind: Kind, mark: str) -> bool:
    """Remove the order of this mark; return False where it is gone, or another one took its place."""
    order = parse(kind, read_raw(run_path, kind))
    if order is None or order.mark != mark:
        return False
    with contextlib.suppress(FileNotFoundError):
        _file(run_path, kind).unlink()
    return True


def _file(run_path: Path, kind: Kind) -> Path:
    return run_path / "links" / f"{kind}.json"
