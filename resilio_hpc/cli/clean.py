"""``resilio clean [DIR …]``: removes what killed launches left on this node."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.restore import shared_blocks
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.common.steps import size_text
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.events.phrases import plural
from resilio_hpc.launch.rundir import node_directories, stale_directories
from resilio_hpc.launch.rundir.stale_directories import ABANDONED_S, IN_USE, DeadLaunch
from resilio_hpc.prolog_epilog.base.isolated import Child, Ended, Mark, gather
from resilio_hpc.prolog_epilog.hooks.process_cleanup import NOBODY, become

_EXAMPLES = """examples:
  resilio clean --dry-run            what is there, and what would go
  resilio clean                      remove it
  resilio clean /local/scratch       also where RESILIO_LOCAL_DIR was that directory
  resilio clean --older 0            at once, where the launch is known to be dead
  srun --ntasks-per-node=1 resilio clean        on all nodes of a job

exit codes: 0 done, or nothing to do; 1 something could not be removed; 2 a mistake in the command
"""
_NAME = re.compile(r"resilio-(?:blocks-)?(\d+)-.*")
_USER_S = 120.0  # for all that one other user left


class LeftLaunch(msgspec.Struct, frozen=True):
    """What one launch left, or still uses. ``kept``: why it stays, "" where it goes; ``idle_s``: since it last moved.

    ``directories`` and ``rings``: bytes by path; ``processes``: names by pid; ``failed``: what could not be removed.
    """

    user: int
    run_id: str = ""
    node: str = ""
    idle_s: float = 0.0
    kept: str = ""
    directories: dict[str, int] = {}
    rings: dict[str, int] = {}
    processes: dict[int, str] = {}
    segments: list[str] = []
    failed: list[str] = []

    @property
    def size_bytes(self) -> int:
        """Return what it takes."""
        return sum((*self.directories.values(), *self.rings.values()))


class CleanReport(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    dry_run: bool
    freed_bytes: int
    launches: list[LeftLaunch]
    v: int = 1


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the examples."""
    parser = Parser(
        prog="resilio clean",
        description="Removes what killed launches of yours left on this node: directories in /tmp (or "
        f"${node_directories.VARIABLE}) and /dev/shm, processes, segments of shared memory. A launch that runs, or is "
        "stopped, is left alone. Each new launch does the same for what is five minutes old.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("places", nargs="*", type=Path, metavar="DIR", help="other places of private directories")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and change nothing")
    parser.add_argument(
        "--older", type=_seconds, default=ABANDONED_S, metavar="S",
        help=f"what has not moved for so many seconds (default: {ABANDONED_S:g}); with less, only launches whose "
        "launcher ran on this machine and is dead",
    )  # fmt: skip
    parser.add_argument("--all-users", action="store_true", help="for root: what launches of all users left")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    if options.all_users and os.geteuid() != 0:
        raise UsageError("--all-users is for root")
    places = _places(options.places)

    def cleaned() -> list[LeftLaunch]:
        return _cleaned(places, options.older, options.dry_run)

    launches = cleaned()
    if options.all_users:
        for user in _other_users(places):
            launches += _as_user(user, cleaned)
    freed = sum(one.size_bytes for one in launches if not one.kept and not one.failed)
    report = CleanReport(options.dry_run, freed, launches)
    if options.json:
        print(msgspec.json.encode(report).decode(), flush=True)
    else:
        print("\n".join(lines(report)), flush=True)
    return 1 if any(one.failed for one in launches) else 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise UsageError(f"--older: {text!r} is not a number of seconds")
    return value


def _places(given: Sequence[Path]) -> list[Path]:
    """Return where to look, each once. Raises UsageError for one that is missing, or where others could play tricks."""
    usual = [node_directories.local_base(), Path("/tmp"), node_directories.SHARED_MEMORY]
    places: dict[Path, None] = {}
    for place in (*usual, *given):
        try:
            real = Path(os.path.realpath(place, strict=True))
        except OSError as error:
            if place in given:
                raise UsageError(f"{place}: {error.strerror}") from None
            continue  # $RESILIO_LOCAL_DIR was never used here
        if not real.is_dir():
            raise UsageError(f"{place} is not a directory")
        node_directories.check_existing_base(real, "it cannot be cleaned safely")
        places[real] = None
    return list(places)


def _cleaned(places: Sequence[Path], older_s: float, dry_run: bool) -> list[LeftLaunch]:
    """Clean up after this process's user."""
    user = os.geteuid()
    found = [_told(one, user) for one in stale_directories.clean(places, older_s, dry_run)]
    rings = shared_blocks.sweep(dry_run=dry_run)
    if rings:
        found.append(LeftLaunch(user, rings={str(path): size for path, size in rings}))
    return found


def _told(one: DeadLaunch, user: int) -> LeftLaunch:
    return LeftLaunch(
        user, one.claim.run_id, one.claim.node, round(max(0.0, one.idle_s), 1), one.kept,
        {str(each.path): each.size_bytes for each in one.directories}, {},
        {process.pid: process.name for process in one.processes}, [str(path) for path in one.segments], one.failed,
    )  # fmt: skip


# -- other users -------------------------------------------------------------------------------------------------------


def _other_users(places: Sequence[Path]) -> list[int]:
    """Return users who have an entry of our names, which is theirs."""
    users = set()
    for place in places:
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                named = _NAME.fullmatch(entry.name)
                if named and entry.stat(follow_symlinks=False).st_uid == int(named[1]):
                    users.add(int(named[1]))
    return sorted(users - {os.geteuid()})


def _as_user(user: int, act: Callable[[], list[LeftLaunch]]) -> list[LeftLaunch]:
    """Act in a child that has become the user, so root removes nothing that the user could not."""

    def work(mark: Mark) -> bytes:
        mark(f"what user {user} left")
        try:
            group = pwd.getpwuid(user).pw_gid
        except KeyError:
            group = NOBODY
        become(user, group)
        return msgspec.json.encode(act())

    found: list[LeftLaunch] = []

    def each(_: Child, ended: Ended) -> None:
        if ended.answer is None:
            found.append(LeftLaunch(user, failed=[f"{ended.touched or 'its cleaning'}: no answer in {_USER_S:g} s"]))
        else:
            found.extend(msgspec.json.decode(ended.answer, type=list[LeftLaunch]))

    sys.stdout.flush()
    gather([Child(work, _USER_S)], each)
    return found


# -- what is said ------------------------------------------------------------------------------------------------------


def lines(report: CleanReport) -> list[str]:
    """Return the text for a person. Pure."""
    told: list[str] = []
    users = {one.user for one in report.launches}
    for one in report.launches:
        if one.kept == IN_USE:
            continue
        whose = f"user {one.user}, " if len(users) > 1 else ""
        told.append(f"{whose}{_head(one)}: {_outcome(one, report.dry_run)}")
        told += [f"  {printable(one.kept, 200)}"] if one.kept else []
        told += [
            f"  {size_text(size):>9}  {printable(path, 500)}" for path, size in (one.directories | one.rings).items()
        ]
        told += [f"    process  {pid} ({printable(name, 30)})" for pid, name in one.processes.items()]
        told += [f"    segment  {printable(path, 500)}" for path in one.segments]
        told += [f"  not removed: {printable(text, 500)}" for text in one.failed]
    return [*told, _sum(report)]


def _head(one: LeftLaunch) -> str:
    if one.rings and not one.directories:
        return "shared blocks of killed processes"
    whose = f"run {printable(one.run_id, 40)}" if one.run_id else "a launch"
    where = f" on {printable(one.node, 60)}" if one.node else ""
    return f"{whose}{where}, silent for {one.idle_s:.0f} s"


def _outcome(one: LeftLaunch, dry_run: bool) -> str:
    if one.kept:
        return "stays"
    return "would be removed" if dry_run else "removed"


def _sum(report: CleanReport) -> str:
    gone = [one for one in report.launches if not one.kept and not one.failed]
    used = sum(len(one.directories) for one in report.launches if one.kept == IN_USE)
    running = f"; {plural(used, 'folder')} in use" if used else ""
    counts = {
        "folder": sum(len(one.directories) for one in gone), "ring": sum(len(one.rings) for one in gone),
        "process": sum(len(one.processes) for one in gone), "segment": sum(len(one.segments) for one in gone),
    }  # fmt: skip
    parts = [plural(count, noun) for noun, count in counts.items() if count]
    if not parts:
        return f"nothing to remove{running}"
    return f"{'would free' if report.dry_run else 'freed'} {size_text(report.freed_bytes)}: {', '.join(parts)}{running}"
