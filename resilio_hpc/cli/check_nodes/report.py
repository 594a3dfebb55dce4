"""The output of ``resilio check-nodes``: progress while it runs, a table, host lists, JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from resilio_hpc.core import terminal
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.diagnose import CheckResult
from resilio_hpc.diagnose.coordinator import Progress
from resilio_hpc.slurm.client.hostlist import compress

_STYLES = {"healthy": "green", "bad": "bold red", "slow": "yellow", "unsure": "magenta"}
_MANY = 40  # nodes; beyond that the healthy ones are only counted


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """Give a line that changes on a terminal, lines elsewhere; on standard error."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with terminal.console(sys.stderr).status("pair check") as status:
            yield lambda text: status.update(f"pair check: {text}")
    else:
        yield lambda text: print(f"resilio check-nodes: {text}", file=sys.stderr, flush=True)


def show(result: CheckResult, out: TextIO) -> None:
    """Print the report for people."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = [one for one in result.nodes if one.state != "healthy" or len(result.nodes) <= _MANY]
    if shown:
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("node", "state", "product", "all-reduce", "partners", "evidence"):
            table.add_column(name, no_wrap=name != "evidence", overflow="fold")
        for one in shown:
            table.add_row(
                Text(printable(one.node)), Text(one.state, _STYLES[one.state]), _time(one.compute_s, one.compute_ratio),
                _time(one.collective_s, one.collective_ratio), printable(", ".join(one.partners)),
                Text(printable(one.evidence, 400)),
            )  # fmt: skip
        terminal.console(out, width=None if out.isatty() else 140).print(table)
    for line in summary(result):
        print(line, file=out)
    out.flush()


def summary(result: CheckResult) -> list[str]:
    """Return the last lines: the conclusion, and host lists. Pure."""
    words = {"fine": "no node is named", "found": "named", "cannot_tell": "it cannot be told"}[result.outcome]
    first = f"{len(result.nodes)} nodes, {result.rounds} rounds, {result.seconds:.1f} s: {words}"
    lines = [first + (f": {result.why}" if result.why else "")]
    names = (("good", result.good), ("bad", result.bad), ("slow", result.slow), ("unsure", result.named("unsure")))
    return lines + [f"{name}: {compress(nodes)}" for name, nodes in names if nodes]


def host_list(result: CheckResult, which: str) -> str:
    """Return one of the lists in Slurm's notation; empty without nodes. Pure."""
    lists = {"good": ("healthy",), "bad": ("bad",), "slow": ("slow",), "named": ("bad", "slow")}
    return compress(result.named(*lists[which]))  # type: ignore[arg-type]


def as_json(result: CheckResult) -> str:
    """Return the whole result, with the host lists. Pure."""
    lists = {which: host_list(result, which) for which in ("good", "bad", "slow")}
    return msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(result), **lists}), indent=1).decode()


def write_exclude_file(path: Path, result: CheckResult) -> None:
    """Write the named nodes, for ``sbatch --exclude``; an empty file where there are none. Raises UsageError."""
    try:
        write_atomic(path, (host_list(result, "named") + "\n").encode())
    except OSError as error:
        raise UsageError(f"--exclude-file {path}: {error.strerror}") from None


def _time(value: float | None, ratio: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.3g} ms" + (f"  x{ratio:.2f}" if ratio is not None else "")
