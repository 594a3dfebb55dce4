"""The newest sample of each node in the run directory: ``metrics/NODE.json``, replaced every few samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.metrics.sheet import Sheet, series

FOLDER = "metrics"
NODES_AT_10_S = 64  # of larger runs each node writes less often
MOST_NODES = 100_000
VERSION = 1


@dataclass(frozen=True)
class NodeSample:
    """A node's newest sample. ``values``: by series, such as ``rank_step{rank=3}``."""

    node: str
    time: float
    endpoint: str
    values: Mapping[str, float]

    def each(self, name: str) -> list[float]:
        """Return the values of all series of a metric."""
        return [value for key, value in self.values.items() if key.partition("{")[0] == name]


def every_s(interval_s: float, nodes: int) -> float:
    """Return how often a node writes its file: a shared file system serves all of them."""
    return interval_s * max(1.0, nodes / NODES_AT_10_S)


def write(run_path: Path, node: str, sheet: Sheet, at: float, endpoint: str) -> None:
    """Replace a node's file. Raises OSError; it may hang with the file system."""
    folder = run_path / FOLDER
    folder.mkdir(0o700, exist_ok=True)  # not the run directory: one that was removed stays so
    content = {
        "v": VERSION, "time": at, "node": node, "endpoint": endpoint,
        "values": {series(key): value for key, value in sheet.items()},
    }  # fmt: skip
    write_atomic(folder / f"{node}.json", msgspec.json.encode(content), 0o600, durable=False)


def read_all(run_path: Path) -> list[NodeSample]:
    """Return the newest samples of all nodes, by name. What is damaged is left out. Raises Untrusted."""
    found = []
    try:
        paths = sorted((run_path / FOLDER).glob("[!.]*.json"))[:MOST_NODES]
    except OSError:
        return []
    for path in paths:
        try:
            f = Fields.of(trusted_files.read_object(path))
        except (OSError, ResilioError):
            continue
        at, values = f.time("time"), f.inner("values")
        if at is not None:
            known = {printable(key, 120): number for key in values.data if (number := values.number(key)) is not None}
            found.append(NodeSample(printable(f.text("node", "?"), 60), at, printable(f.text("endpoint"), 120), known))
    return found
