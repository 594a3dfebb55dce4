"""What is normal on a node: learned once by ``resilio health baseline``, kept across reboots.

    /var/lib/resilio/baseline/NODE.json     0644, root's: by check and device

Checks that compare a device with its own past take the baseline's word for it: a port that was DOWN then is meant to
be, one that was ACTIVE is not to be DOWN. Only root may write it, since it decides where jobs run. The directory may be
shared by all nodes: it is read once a boot, in a child that is given up when it hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import HealthError
from resilio_hpc.prolog_epilog.base import trusted
from resilio_hpc.prolog_epilog.base.check import Value
from resilio_hpc.prolog_epilog.base.isolated import OneAtATime

Values = dict[str, dict[str, Value]]
"""By check, then by device."""

BUDGET_S = 5.0
_MOST_BYTES = 1 << 20
_SUFFIX = ".json"


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The values that were normal on ``node`` at ``unix_s``."""

    node: str
    unix_s: float
    checks: Values
    v: int = 1


def read(directory: Path, node: str) -> Baseline | None:
    """Return the node's baseline, None where none was taken. Raises HealthError where it is not trusted."""
    path = directory / f"{node}{_SUFFIX}"
    try:
        return msgspec.json.decode(trusted.read(directory, path.name, _MOST_BYTES), type=Baseline)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HealthError(
            f"the baseline {path} is damaged: take it again (resilio health baseline): {error}"
        ) from error
    except OSError as error:
        raise HealthError(f"the baseline {path} cannot be read: {error.strerror}") from error
    except HealthError as error:
        raise HealthError(f"the baseline is not believed: {error}") from error


def write(directory: Path, baseline: Baseline) -> Path:
    """Write it; return the file. Raises HealthError."""
    path = directory / f"{baseline.node}{_SUFFIX}"
    try:
        directory.mkdir(0o755, parents=True, exist_ok=True)
        trusted.own_directory(directory)
        write_atomic(path, msgspec.json.format(msgspec.json.encode(baseline), indent=1))
    except OSError as error:
        raise HealthError(f"cannot keep a baseline in {directory}: {error.strerror}") from error
    return path


def load(
    directory: Path,
    node: str,
    budget_s: float = BUDGET_S,
    reads: Callable[[Path, str], Baseline | None] = read,
) -> tuple[Values, str]:
    """Return the baseline's values, and "" or why there are none. Bounded: the disk may hang."""

    def work() -> bytes:
        try:
            found = reads(directory, node)
        except HealthError as error:
            return msgspec.json.encode(str(error))
        return msgspec.json.encode({} if found is None else found.checks)

    answer = OneAtATime(budget_s).answer(directory, work)
    if answer is None:
        return {}, f"{directory} does not answer: checks go without a baseline"
    said = msgspec.json.decode(answer, type=Values | str)
    return ({}, said) if isinstance(said, str) else (said, "")


def read_all(directory: Path) -> list[Baseline]:
    """Return those of all nodes in a directory. Raises HealthError."""
    try:
        names = sorted(path.name.removesuffix(_SUFFIX) for path in directory.iterdir() if path.suffix == _SUFFIX)
    except OSError as error:
        raise HealthError(f"cannot read {directory}: {error.strerror}") from error
    return [found for name in names if (found := read(directory, name)) is not None]


@dataclass(frozen=True)
class BaselineDifference:
    """One device of one check: ``before`` or ``now`` is None where it is not known there."""

    check: str
    device: str
    before: Value | None
    now: Value | None

    def __str__(self) -> str:
        return f"{self.check} {self.device}: {spelled(self.now)}, was {spelled(self.before)}"


def differences(before: Values, now: Values) -> list[BaselineDifference]:
    """Return the differences. Pure."""
    found = []
    for check in sorted({*before, *now}):
        old, new = before.get(check, {}), now.get(check, {})
        for device in sorted({*old, *new}):
            if old.get(device) != new.get(device):
                found.append(BaselineDifference(check, device, old.get(device), new.get(device)))
    return found


@dataclass(frozen=True)
class Alike:
    """Nodes with the same baseline. ``unlike``: how it differs from the nearest larger group, ``nearest``."""

    nodes: tuple[str, ...]
    nearest: tuple[str, ...] = ()
    unlike: tuple[BaselineDifference, ...] = ()


def alike(baselines: Iterable[Baseline]) -> list[Alike]:
    """Return the nodes in groups, the largest first; a node whose baseline was taken during a fault stands out.

    Pure.
    """
    groups: dict[bytes, list[Baseline]] = {}
    for one in baselines:
        groups.setdefault(msgspec.json.encode(one.checks, order="deterministic"), []).append(one)
    found: list[Alike] = []
    larger: list[tuple[tuple[str, ...], Values]] = []
    for members in sorted(groups.values(), key=len, reverse=True):
        nodes, values = tuple(one.node for one in members), members[0].checks
        near = min(((differences(other, values), names) for names, other in larger), key=lambda one: len(one[0]),
                   default=([], ()))  # fmt: skip
        found.append(Alike(nodes, near[1], tuple(near[0])))
        larger.append((nodes, values))
    return found


def summary(values: Mapping[str, Value]) -> str:
    """Return ``yes: mlx5_0/1 (8); no: mlx5_9/1``: the devices by value, the most common first. Pure."""
    by_value: dict[Value, list[str]] = {}
    for device, value in values.items():
        by_value.setdefault(value, []).append(device)
    groups = sorted(by_value.items(), key=lambda one: -len(one[1]))
    return "; ".join(f"{spelled(value)}: {_some(devices)}" for value, devices in groups)


def spelled(value: Value | None) -> str:
    """Return a value for people. Pure."""
    if value is None:
        return "not there"
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:g}"


def _some(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 4 else f"{', '.join(devices[:3])} … ({len(devices)})"
