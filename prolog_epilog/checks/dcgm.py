"""The findings of NVIDIA's DCGM in the background, where its host engine runs: ``dcgmi health --check``.

No diagnostics are run. Forms: dcgmi's JSON is a tree of ``children``, ``value`` and ``overflow`` (dcgmi/Health.cpp and
DcgmiOutput.cpp of NVIDIA's public source); DCGM's own numbers of GPUs are mapped by ``dcgmi discovery --list``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run
from resilio_hpc.prolog_epilog.base.check import Absent, Fault, Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles

HEALTH = ("dcgmi", "health", "--check", "--group", "0", "--json")  # group 0: all GPUs
DISCOVERY = ("dcgmi", "discovery", "--list")
CAPTURED = {HEALTH: "/.dcgmi-health", DISCOVERY: "/.dcgmi-discovery"}  # in captured trees of tests
WITHIN_S = 10.0
_NUMBER = re.compile(r"^\|\s*(\d{1,4})\s*\|")
_UUID = re.compile(r"Device UUID:\s*(GPU-[0-9a-fA-F-]+)")
_NOT_WATCHING = "Health watches not enabled"
_RESULTS = ("Healthy", "Warning", "Failure")


class _Entry(msgspec.Struct, frozen=True):
    """An entry of the tree; every part may be missing."""

    value: str = ""
    overflow: tuple[str, ...] = ()
    children: dict[str, _Entry] = {}


class _Tree(msgspec.Struct, frozen=True):
    body: dict[str, _Entry]


@dataclass(frozen=True)
class Incident:
    """DCGM's result for one system of one GPU. ``result``: Warning or Failure."""

    gpu: int
    system: str
    result: str
    text: str


@dataclass(frozen=True)
class Reading:
    """The results. ``uuids``: by DCGM's numbers."""

    incidents: tuple[Incident, ...]
    uuids: Mapping[int, str]


def fetch(node: NodeView) -> Reading:
    """Read DCGM. Raises Absent where it is not installed or watches nothing; Unreadable where its engine is silent."""
    health = _said(node, HEALTH)
    incidents = parse_health(health)
    return Reading(incidents, parse_discovery(_said(node, DISCOVERY)) if incidents else {})


def _said(node: NodeView, command: tuple[str, ...]) -> str:
    captured = _captured(node.files, command)
    if captured is not None:
        return captured
    if shutil.which(command[0]) is None:
        raise Absent("DCGM is not installed")
    node.mark(" ".join(command))
    try:
        done = run(command, WITHIN_S, check=False)
    except CommandError as error:
        raise Unreadable(str(error)) from error
    if done.returncode != 0 and _NOT_WATCHING not in done.stdout:
        raise Unreadable(f"dcgmi {command[1]}: {(done.stdout + done.stderr).strip()[:200]}")
    return done.stdout


def _captured(files: NodeFiles, command: tuple[str, ...]) -> str | None:
    return files.optional(CAPTURED[command]) if str(files.root) != "/" else None


def parse_health(text: str) -> tuple[Incident, ...]:
    """Parse ``dcgmi health --check --json``. Raises Absent where no watch is set, Unreadable for other text. Pure."""
    if _NOT_WATCHING in text:
        raise Absent("DCGM watches nothing here: dcgmi health --set a")
    try:
        body = msgspec.json.decode(text[max(0, text.find("{")) :], type=_Tree).body
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unreadable(f"dcgmi health: {text.strip()[:80]!r}") from error
    overall = body.get("Overall Health", _Entry()).value
    if overall not in _RESULTS:
        raise Unreadable(f"dcgmi health: its overall health is {overall!r}")
    found = []
    for number, gpu in body.get("GPU", _Entry()).children.items():
        if not number.isdecimal():
            raise Unreadable(f"dcgmi health: {number!r} is no number of a GPU")
        for system, entry in gpu.children.get("Errors", _Entry()).children.items():
            if entry.value not in _RESULTS:
                raise Unreadable(f"dcgmi health: {system} of GPU {number} is {entry.value!r}")
            if entry.value != "Healthy":
                found.append(Incident(int(number), system, entry.value, " ".join(entry.overflow)))
    return tuple(found)


def parse_discovery(text: str) -> Mapping[int, str]:
    """Parse ``dcgmi discovery --list``: UUIDs by DCGM's numbers. Pure."""
    found: dict[int, str] = {}
    number = -1
    for line in text.splitlines():
        if (begins := _NUMBER.match(line)) is not None:
            number = int(begins[1])
        if (uuid := _UUID.search(line)) is not None and number >= 0:
            found.setdefault(number, uuid[1])
    return found


def failures(reading: Reading, limits: Thresholds) -> Iterable[Fault]:
    """Yield DCGM's failures, of the systems that the site acts on."""
    return _faults(reading, "Failure", limits)


def warnings(reading: Reading, limits: Thresholds) -> Iterable[Fault]:
    """Yield DCGM's warnings."""
    return _faults(reading, "Warning", limits)


def _faults(reading: Reading, result: str, limits: Thresholds) -> Iterable[Fault]:
    systems = limits.texts("systems")
    for one in reading.incidents:
        if one.result == result and (not systems or one.system.removesuffix(" system") in systems):
            name = reading.uuids.get(one.gpu, "")
            yield Fault(f"DCGM's GPU {one.gpu}{f' ({name})' if name else ''}: {one.system}: {one.text}", name)
