"""A user's order to test the nodes of a run that trains (``resilio check-nodes --run``), in a file for its controller.

One small file of the run directory, replaced atomically. The controller's node sees it with its next status, and has
it removed before the test begins: an order is carried out once, or twice where the controller changes in between.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.json_fields import Fields


class TestOrder(Struct, frozen=True):
    """An order. ``mark`` tells it from others; ``replace``: nodes that fail are replaced; ``by``: the user."""

    __test__ = False  # pytest: no class of tests

    mark: str = ""
    replace: bool = False
    by: str = ""


def parse(data: object) -> TestOrder | None:
    """Return the order from the file's JSON; None where there is none. Pure."""
    fields = Fields.of(data)
    mark = fields.text("mark")
    return TestOrder(mark[:64], fields.data.get("replace") is True, fields.text("by")[:64]) if mark else None


def read_raw(run_path: Path) -> dict[str, Any] | None:
    """Return the file's JSON as it is, for ``parse``. Raises Untrusted."""
    return trusted_files.read_object(_file(run_path))


def write(run_path: Path, order: TestOrder) -> None:
    """Give the order, durably. Raises OSError."""
    write_atomic(_file(run_path), json.dumps({"v": 1, **to_builtins(order)}).encode())


def remove(run_path: Path, mark: str) -> bool:
    """Remove the order of this mark; return False where it is gone, or another one took its place."""
    order = parse(read_raw(run_path))
    if order is None or order.mark != mark:
        return False
    with contextlib.suppress(FileNotFoundError):
        _file(run_path).unlink()
    return True


def _file(run_path: Path) -> Path:
    return run_path / "links" / "test.json"
