"""Processes from proc(5): those in uninterruptible sleep or dead, which daemons run, and which jobs are here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.base.check import Fault, Former, Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles

_STEP = re.compile(r"slurmstepd: \[(\d+)\.")


@dataclass(frozen=True)
class Process:
    """A process. ``started``: in clock ticks since boot; with the pid it identifies a process for ever."""

    pid: int
    name: str
    state: str
    parent: int
    started: int

    @property
    def key(self) -> str:
        return f"{self.pid}:{self.started}"


def parse_stat(text: str) -> Process:
    """Parse one /proc/PID/stat; a name may hold spaces and parentheses. Raises Unreadable. Pure."""
    head, opening, rest = text.partition(" (")
    name, closing, tail = rest.rpartition(") ")
    fields = tail.split()
    try:
        if not opening or not closing or len(fields[0]) != 1:
            raise ValueError
        return Process(int(head), name, fields[0], int(fields[1]), int(fields[19]))
    except (ValueError, IndexError) as error:
        raise Unreadable(f"/proc/PID/stat: not that of a process: {text[:60]!r}") from error


def fetch(node: NodeView) -> list[Process]:
    """Return every process, without those that end meanwhile."""
    files = node.files
    found = []
    for pid in files.names("/proc", r"\d+"):
        text = files.optional(f"/proc/{pid}/stat")
        if text:
            found.append(parse_stat(text))
    if not found:
        raise Unreadable("/proc shows no process")
    return found


def jobs_here(files: NodeFiles) -> set[str]:
    """Return the jobs that have a step on this node now, by the titles of their slurmstepd. Raises Unreadable."""
    found = set()
    for pid in files.names("/proc", r"\d+"):
        if (files.optional(f"/proc/{pid}/comm") or "").strip() == "slurmstepd":
            title = _STEP.match(files.optional(f"/proc/{pid}/cmdline") or "")
            found.add(title[1] if title else "?")
    return found


def uninterruptible(processes: list[Process], limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
    """Yield processes that were in state D at every look for so long: what they wait for will not come."""
    before = former.kept if isinstance(former.kept, dict) else {}
    since = {}
    for process in processes:
        if process.state == "D":
            first = before.get(process.key)
            since[process.key] = first if isinstance(first, int | float) and first <= former.now_s else former.now_s
    longest = limits.number("longest_s")
    ignored = limits.texts("ignored")
    stuck = [
        (former.now_s - since[process.key], process)
        for process in processes
        if process.key in since and process.name not in ignored and former.now_s - since[process.key] >= longest
    ]
    if not stuck:
        return [], since
    seconds, process = max(stuck, key=lambda one: one[0])
    text = f"{len(stuck)} in state D, process {process.pid} ({process.name}) for {seconds:.0f} s"
    return [Fault(text)], since


def zombies(processes: list[Process], limits: Thresholds) -> Iterable[Fault]:
    """Yield dead processes that were not reaped, by the parent that should do it."""
    dead = [process for process in processes if process.state == "Z"]
    if len(dead) > limits.number("most"):
        parents = [process.parent for process in dead]
        worst = max(set(parents), key=parents.count)
        yield Fault(f"{len(dead)} zombies, {parents.count(worst)} of them of process {worst}")


def running(processes: list[Process], limits: Thresholds) -> Iterable[Fault]:
    """Yield daemons that must run and do not, by name (15 characters of it, as the kernel keeps them)."""
    alive = {process.name for process in processes if process.state not in ("Z", "X")}
    for name in limits.texts("daemons"):
        if name[:15] not in alive:
            yield Fault(f"no {name} is running")
