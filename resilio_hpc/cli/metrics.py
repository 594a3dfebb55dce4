"""``resilio metrics [RUN]``: the newest sample of each node, from the run directory alone."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.events.memory_text import size
from resilio_hpc.events.phrases import seconds
from resilio_hpc.launch.rundir.run_directory import read_run
from resilio_hpc.metrics.access import token
from resilio_hpc.metrics.latest import NodeSample, read_all
from resilio_hpc.report.overview import find_run, read_identity

HEAD = ("node", "age", "cpu", "memory", "gpu", "gpu memory", "largest rank", "step")
LEFT_OUT = ("largest rank", "cpu", "age", "gpu memory")  # in this order, where there is no room
LEAST_NAME, GAP = 8, 2
MOST_ENDPOINTS = 8
EXAMPLES = """examples:
  resilio metrics my-run                     the newest sample of each node
  resilio metrics my-run --json              all values, for programs
  resilio metrics my-run --token > token     what Prometheus sends to an endpoint that other machines reach
  resilio metrics --rules > resilio.rules.yml      alert rules for Prometheus
  resilio metrics --dashboard > resilio.json       a dashboard for Grafana
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0; 2 without a run, or without samples of it."""
    parser = Parser(
        prog="resilio metrics", epilog=EXAMPLES,
        description="What the nodes of a run use: the newest sample of each, and where Prometheus finds all of them. "
        "Needs the run directory only; a node writes a sample there every ten seconds, or less often in a large run.",
    )  # fmt: skip
    run_argument.add(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="all values: an object of JSON for each node, in a list")
    parser.add_argument("--token", action="store_true", help="print the token of the run's endpoints, and nothing else")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--rules", action="store_true", help="print alert rules for Prometheus, and nothing else")
    files.add_argument("--dashboard", action="store_true", help="print a dashboard for Grafana, and nothing else")
    options = parser.parse_args(argv)
    if options.rules or options.dashboard:
        print(shipped("alert_rules.yml" if options.rules else "dashboard.json"), end="", flush=True)
        return 0
    path = find_run(run_argument.run_of(options))
    read_identity(path)
    if options.token:
        print(token(read_run(path).secret))
        return 0
    samples = read_all(path)
    if options.json:
        print(json.dumps([asdict(sample) for sample in samples], indent=1))
        return 0
    if not samples:
        raise UsageError(f"{path} has no samples: its ranks have not run for long, or with --metrics-interval 0")
    for line in table(samples, time.time(), terminal.columns(80)):
        print(line)
    return 0


def shipped(name: str) -> str:
    """Return a file for Prometheus or Grafana that comes with the package."""
    return resources.files("resilio_hpc.metrics").joinpath("prometheus", name).read_text(encoding="utf-8")


def table(samples: Sequence[NodeSample], now: float, width: int) -> list[str]:
    """Return the lines of the table, and the endpoints below it. Pure."""
    rows = [HEAD, *(_row(sample, now) for sample in samples)]
    for column in LEFT_OUT:
        if sum(_widths(rows)) + LEAST_NAME + GAP * len(rows[0][1:]) > width:
            at = rows[0].index(column)
            rows = [row[:at] + row[at + 1 :] for row in rows]
    rest = _widths(rows)
    room = max(width - sum(rest) - GAP * len(rest), LEAST_NAME)
    widths = [-min(max(len(row[0]) for row in rows), room), *rest]
    lines = [(" " * GAP).join(_cell(text, wide) for text, wide in zip(row, widths, strict=True)) for row in rows]
    found = [f"{sample.node}: {sample.endpoint}" for sample in samples if sample.endpoint]
    more = [f"and {len(found) - MOST_ENDPOINTS} more"] if len(found) > MOST_ENDPOINTS else []
    return [*lines, *([""] if found else []), *(_cut(line, width) for line in found[:MOST_ENDPOINTS]), *more]


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the widths of all columns but the first."""
    return [max(len(row[column]) for row in rows) for column in range(1, len(rows[0]))]


def _row(sample: NodeSample, now: float) -> tuple[str, ...]:
    values = sample.values
    total, available = values.get("host_memory_total_bytes"), values.get("host_memory_available_bytes")
    shares = [_share(None if total is None or available is None else total - available, total)]
    shares.append(_share(values.get("job_memory_used_bytes"), values.get("job_memory_limit_bytes")))
    memory = max((share for share in shares if share is not None), default=None)
    busy, sizes = sample.each("gpu_utilization_ratio"), sample.each("rank_resident_bytes")
    gpus = zip(sample.each("gpu_memory_used_bytes"), sample.each("gpu_memory_total_bytes"), strict=False)
    full = [share for used, limit in gpus if (share := _share(used, limit)) is not None]
    steps = sample.each("rank_step")
    return (
        sample.node,
        seconds(max(now - sample.time, 0.0)),
        _percent(values.get("host_cpu_used_ratio")),
        _percent(memory),
        _percent(sum(busy) / len(busy) if busy else None),
        _percent(max(full, default=None)),
        size(max(sizes)) if sizes else "-",
        f"{min(steps):.0f}" if steps else "-",
    )


def _share(used: float | None, limit: float | None) -> float | None:
    return used / limit if used is not None and limit is not None and limit > 0 else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}".replace("%", " %")


def _cell(text: str, width: int) -> str:
    """Return a cell of that width; below 0: of a name, which is cut and stands on the left."""
    return text.rjust(width) if width > 0 else _cut(text, -width).ljust(-width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
