"""The verdict on this node where a prolog finds it: two files in a directory of root's in memory.

    /run/resilio/health/        0755, root's: no other user can put anything here
      verdict                   text, one line per word, for sh; whole only with its last line ``end``
      verdict.json              the same with every result, for people and programs
      memory.json               what checks keep from run to run
      wanted                    made by who finds no fresh verdict; the node daemon removes it and looks anew
      refused                   made by a prolog that fails: when (uptime), the job, the check, what it found
      lock                      held while checks run

A reader checks that directory and file are its own (root's), no links, and not open to others, since a verdict decides
where jobs run. Ages are counted in seconds since boot, so a clock that jumps makes none stale or fresh.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import HealthError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.prolog_epilog.base import trusted
from resilio_hpc.prolog_epilog.base.check import NodeVerdict
from resilio_hpc.prolog_epilog.run.runner import RunMemory

T = TypeVar("T")
DIRECTORY = Path("/run/resilio/health")
HEADER = "resilio-verdict 1"
_MOST_BYTES = 8 << 20
_MOST_FINDINGS = 20
_CHECK = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class NoVerdict(HealthError):
    """Raised where no verdict can be trusted; its text says why."""


@dataclass(frozen=True)
class Refusal:
    """A prolog of this package failed, at ``uptime_s`` since boot, for a finding of ``check``."""

    uptime_s: float
    job: str
    check: str
    evidence: str


@dataclass(frozen=True)
class VerdictCache:
    """The files in ``directory``. The calling user reads and writes them, in production root."""

    directory: Path = DIRECTORY

    def prepare(self) -> None:
        """Make the directory. Raises HealthError where it is another user's, or open to others."""
        try:
            for path in (self.directory.parent, self.directory):
                path.mkdir(0o755, exist_ok=True)
            trusted.own_directory(self.directory)
        except OSError as error:
            raise HealthError(f"cannot keep a verdict in {self.directory}: {error.strerror}") from error

    def write(self, verdict: NodeVerdict) -> None:
        """Replace the verdict. Raises HealthError, for instance when memory is full; the old one stays."""
        self.prepare()
        try:
            write_atomic(self.directory / "verdict.json", msgspec.json.encode(verdict), durable=False)
            write_atomic(self.directory / "verdict", render(verdict).encode(), durable=False)
        except OSError as error:
            raise HealthError(f"cannot keep a verdict in {self.directory}: {error.strerror}") from error

    def read(self, now_s: float, ttl_s: float, boot: str) -> NodeVerdict:
        """Return the verdict, if it is trusted. Raises NoVerdict."""
        verdict = self._decoded("verdict.json", NodeVerdict)
        if verdict is None:
            raise NoVerdict("the verdict is damaged")
        if verdict.boot != boot:
            raise NoVerdict("the verdict is from before the node was started")
        if not -1 <= now_s - verdict.uptime_s <= ttl_s:
            raise NoVerdict(f"the verdict is {now_s - verdict.uptime_s:.0f} s old")
        return verdict

    def memory(self, boot: str) -> RunMemory:
        """Return what checks kept since this boot; nothing where it is not this user's or damaged."""
        with contextlib.suppress(NoVerdict):
            kept = self._decoded("memory.json", _Kept)
            if kept is not None and kept.boot == boot:
                return kept.memory
        return RunMemory()

    def keep(self, memory: RunMemory, boot: str) -> None:
        """Write what the checks keep. Raises HealthError."""
        self.prepare()
        try:
            encoded = msgspec.json.encode(_Kept(boot=boot, memory=memory))
            write_atomic(self.directory / "memory.json", encoded, mode=0o600, durable=False)
        except OSError as error:
            raise HealthError(f"cannot keep the checks' memory in {self.directory}: {error.strerror}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Give whether no other process runs the checks, and lock them out. The kernel unlocks at the process's end."""
        self.prepare()
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def take_request(self) -> bool:
        """Return whether a prolog or a command asks for a new verdict, and take that request."""
        try:
            (self.directory / "wanted").unlink()
        except OSError:
            return False
        return True

    def refusal(self) -> Refusal | None:
        """Return the last failure of this package's prolog; None where none is trusted."""
        try:
            words = self._trusted("refused").decode(errors="replace").split(maxsplit=3)
        except NoVerdict:
            return None
        if len(words) < 3 or not (words[0].isascii() and words[0].isdecimal() and _CHECK.fullmatch(words[2])):
            return None
        return Refusal(float(words[0]), printable(words[1], 40), words[2], printable("".join(words[3:]).strip(), 200))

    def _decoded(self, name: str, type_: type[T]) -> T | None:
        try:
            return msgspec.json.decode(self._trusted(name), type=type_)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None

    def _trusted(self, name: str) -> bytes:
        """Return a file's content, if no other user can have written it. Raises NoVerdict."""
        try:
            return trusted.read(self.directory, name, _MOST_BYTES)
        except FileNotFoundError as error:
            raise NoVerdict("there is no verdict yet") from error
        except (OSError, HealthError) as error:
            raise NoVerdict(f"the verdict cannot be trusted: {error}") from error


class _Kept(msgspec.Struct, frozen=True):
    boot: str
    memory: RunMemory


def render(verdict: NodeVerdict) -> str:
    """Return the verdict for sh: words before free text, whole numbers, lines that fit a terminal. Pure."""
    lines = [
        HEADER,
        f"node {printable(verdict.node, 80)}",
        f"boot {printable(verdict.boot, 80)}",
        f"uptime {int(verdict.uptime_s)}",
        f"gpus {verdict.gpus}",
        f"action {verdict.action}",
    ]
    findings = verdict.findings
    evicted = [one for one in findings if one.action == "evict" and not verdict.withheld]  # the prolog compares each
    others = [one for one in findings if one not in evicted][:_MOST_FINDINGS]
    lines += [f"withheld {printable(verdict.withheld, 200)}"] if verdict.withheld else []
    lines += [f"leave {int(verdict.leave_until_s)}"] if verdict.leave_until_s > 0 and not verdict.withheld else []
    lines += [f"evict {one.index} {one.device.replace(' ', '_') or '-'} {one.check}: {one.evidence}" for one in evicted]
    lines += [f"because {one.action} {one.check}: {one.evidence}" for one in others]
    return "\n".join([*lines, "end", ""])
