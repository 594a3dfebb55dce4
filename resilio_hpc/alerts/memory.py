"""What was reported of a run's alerts: a small file, so that each is reported once when it fires and when it clears.

The file is ``alerts.json`` in the run directory, or the one that the user names. Where the run directory cannot be
written (read-only, full), it is in the user's own state directory instead. One check of a run at a time holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from resilio_hpc.alerts.alert import Alert, Severity
from resilio_hpc.alerts.run_facts import StepSeen
from resilio_hpc.core import bounded, trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import ResilioError, Untrusted, os_error_text

FILE = "alerts.json"
VERSION = 1
LOCK_S = 30.0  # another check of the same run may hold the lock for so long
ANSWER_S = 20.0  # a file system that hangs
MOST_WAITING = 50  # messages that could not be delivered
_POLL_S = 0.1


class ReportedAlert(msgspec.Struct, frozen=True):
    """An alert that was reported. ``since``: Unix seconds, as it was reported first."""

    name: str
    severity: Severity
    since: float
    text: str
    about: str = ""


class UndeliveredMessage(msgspec.Struct, frozen=True):
    """A message and the targets that did not get it; each by a mark that shows nothing of it."""

    content: dict[str, object]
    targets: tuple[str, ...]


class AlertMemory(msgspec.Struct, frozen=True):
    """The file. ``time``: of the newest check, Unix seconds; ``reported``: by ``Alert.key``."""

    time: float = 0.0
    reported: dict[str, ReportedAlert] = {}
    step: StepSeen | None = None
    undelivered: tuple[UndeliveredMessage, ...] = ()
    v: int = VERSION


@dataclass(frozen=True)
class AlertChanges:
    """What is new since the check before: alerts that fire (or became critical), and those that do not any more."""

    fired: tuple[Alert, ...]
    cleared: tuple[ReportedAlert, ...]


def changes(before: AlertMemory, alerts: Sequence[Alert]) -> AlertChanges:
    """Return what is to be reported. Pure."""
    firing = {alert.key for alert in alerts}
    fired = tuple(alert for alert in alerts if _is_news(before.reported.get(alert.key), alert))
    return AlertChanges(fired, tuple(one for key, one in before.reported.items() if key not in firing))


def _is_news(known: ReportedAlert | None, alert: Alert) -> bool:
    worse = known is not None and known.severity is Severity.WARNING and alert.severity is Severity.CRITICAL
    return known is None or worse


def after(before: AlertMemory, alerts: Sequence[Alert], now: float, step: int | None) -> AlertMemory:
    """Return what is to be kept. Pure. ``step``: the run's furthest one."""
    reported = {
        alert.key: ReportedAlert(alert.name, _worst(before.reported.get(alert.key), alert),
                                 known.since if (known := before.reported.get(alert.key)) else alert.since, alert.text,
                                 alert.about)
        for alert in alerts
    }  # fmt: skip
    seen = before.step
    if step is not None and (seen is None or seen.step != step):
        seen = StepSeen(step, now)
    return AlertMemory(now, reported, seen, before.undelivered)


def _worst(known: ReportedAlert | None, alert: Alert) -> Severity:
    """Return the worst severity that was reported: one that goes up and down is no news each time."""
    was_critical = known is not None and known.severity is Severity.CRITICAL
    return Severity.CRITICAL if was_critical else alert.severity


class MemoryFile:
    """The file of one run. ``places``: where it may be, the best first."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = tuple(places)

    @contextlib.contextmanager
    def locked(self, wait_s: float = LOCK_S) -> Iterator[None]:
        """Hold the lock, on the first place that allows one. Raises ResilioError where another check has it."""
        fd = bounded.in_time(self._open_lock, ANSWER_S)
        try:
            deadline = time.monotonic() + wait_s
            while fd is not None and not _taken(fd):
                if time.monotonic() >= deadline:
                    raise ResilioError(f"another check of this run has not ended for {wait_s:g} s ({self.places[0]})")
                time.sleep(_POLL_S)
            yield
        finally:
            if fd is not None:
                os.close(fd)

    def _open_lock(self) -> int | None:
        for place in self.places:
            with contextlib.suppress(OSError):
                if place is not self.places[0]:
                    trusted_files.make_directory(place.parent)
                return trusted_files.open_file(place.with_name(f".{place.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        return None  # nothing can be written: the memory is not kept either

    def read(self) -> AlertMemory:
        """Return the newest memory; an empty one where there is none, or it is damaged. Raises Untrusted."""
        found = [one for place in self.places if (one := bounded.in_time(partial(_read, place), ANSWER_S)) is not None]
        return max(found, key=lambda memory: memory.time, default=AlertMemory())

    def write(self, memory: AlertMemory) -> str:
        """Replace the file. Return "", or why it could not be kept anywhere."""
        kept = memory.undelivered[-MOST_WAITING:]
        data = msgspec.json.encode(msgspec.structs.replace(memory, undelivered=kept))
        why = ""
        for place in self.places:
            try:
                bounded.in_time(partial(_write, place, data), ANSWER_S)
                return ""
            except (OSError, Untrusted) as error:
                why = why or (os_error_text(error, str(place)) if isinstance(error, OSError) else str(error))
        return why


def _read(place: Path) -> AlertMemory | None:
    try:
        memory = msgspec.json.decode(trusted_files.read(place), type=AlertMemory)
    except (OSError, msgspec.MsgspecError):
        return None
    return memory if memory.v == VERSION else None


def _write(place: Path, data: bytes) -> None:
    trusted_files.make_directory(place.parent)
    os.close(trusted_files.open_directory(place.parent))
    write_atomic(place, data, 0o600)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: two checks at once may both report
        return True


def places_of(run: Path, run_id: str, environment: dict[str, str]) -> list[Path]:
    """Return where a run's file may be: its directory, then the user's state directory. Pure."""
    home = environment.get("XDG_STATE_HOME") or f"{environment.get('HOME') or '/nonexistent'}/.local/state"
    name = "".join(one if one.isalnum() or one in "-_" else "_" for one in run_id) or "run"
    return [run / FILE, Path(home) / "resilio" / "alerts" / f"{name}.json"]
