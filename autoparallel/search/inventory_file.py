"""An inventory as a file, JSON or TOML: for a cluster that cannot be asked, or does not exist yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from resilio_hpc.autoparallel.search.inventory import Inventory, Pool
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.hostlist import expand

MOST_NODES = 1_000_000
_KEYS = ("partition", "gpu", "gpus_per_node", "nodes", "idle", "max_nodes", "max_time_s", "shared", "preemptible")


def read_inventory(text: str, name: str) -> Inventory:
    """Read ``[[pool]]`` tables: partition, gpu, gpus_per_node, nodes, idle (numbers, or host lists).

    Raises UsageError.
    """
    try:
        content = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: {printable(str(error), 200)}") from None
    rows = content.get("pool") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{name}: no pool: write [[pool]] with partition, gpu, gpus_per_node, nodes and idle")
    return Inventory(tuple(_pool(row, f"{name}, pool {number}") for number, row in enumerate(rows, 1)))


def assumed(gpus: int, per_node: int, gpu: str) -> Inventory:
    """Return a cluster of only these GPUs, all idle."""
    nodes = _names(-(-gpus // per_node), "")
    return Inventory((Pool("", gpu, per_node, nodes, nodes, unused=(per_node,) * len(nodes)),))


def _pool(row: Any, where: str) -> Pool:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where} is no table")
    unknown = sorted(set(row) - set(_KEYS))
    if unknown:
        raise UsageError(f"{where}: unknown key {printable(repr(unknown[0]), 60)}; known are {', '.join(_KEYS)}")
    partition, gpu = _text(row, "partition", where), _text(row, "gpu", where)
    each = _whole(row.get("gpus_per_node"), 1, 1024, f"{where}: gpus_per_node")
    nodes = _nodes(row.get("nodes"), f"{where}: nodes", partition)
    idle = _nodes(row.get("idle", len(nodes)), f"{where}: idle", partition)
    if not set(idle) <= set(nodes):
        raise UsageError(f"{where}: there are {len(idle)} idle nodes, which are not all among its {len(nodes)} nodes")
    most = row.get("max_nodes")
    limit = row.get("max_time_s")
    if limit is not None and (not isinstance(limit, int | float) or isinstance(limit, bool) or limit <= 0):
        raise UsageError(f"{where}: max_time_s = {printable(repr(limit), 40)} is no number of seconds")
    flags = {key: row.get(key, False) for key in ("shared", "preemptible")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {key} = {printable(repr(value), 40)} is neither true nor false")
    return Pool(
        partition, gpu, each, nodes, idle,
        max_nodes=None if most is None else _whole(most, 1, MOST_NODES, f"{where}: max_nodes"),
        max_time_s=limit, unused=(each,) * len(idle), **flags,
    )  # fmt: skip


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.isprintable():
        raise UsageError(f"{where}: {key} = {printable(repr(value), 60)} is no name")
    return value


def _whole(value: Any, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{what} = {printable(repr(value), 40)} is no whole number from {least} to {most}")
    return value


def _names(count: int, partition: str) -> tuple[str, ...]:
    return tuple(f"{partition or 'node'}-{number}" for number in range(1, count + 1))


def _nodes(value: Any, what: str, partition: str) -> tuple[str, ...]:
    """Return a number of nodes, or a host list."""
    if isinstance(value, str):
        return tuple(dict.fromkeys(expand(value)))
    return _names(_whole(value, 0, MOST_NODES, what), partition)
