"""What a power cut may take away: everything that was not synced. No step counts before all of it is.

The recorded calls of whole saves are followed as a strict file system might: data of a file is safe after an fsync of
that file, a name after one of its directory, nothing else is.
Verified by taking syncs out of the product, one at a time: of the shard file, of its name, of what ``write_atomic``
writes, of its name, of the step's name, of new directories and of those that were found, of the file that is copied,
of the directory before a removed step's file is written over.
Each made this fail. (The names of copied files are synced twice, once more with the manifest.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash.harm import Call, Harmed, read_log

SCENARIOS = ("alone", "again", "prune", "after deaths", "two", "saver", "copy")
STEP = re.compile(r"step-\d+")
GOING = re.compile(r"\.removed-step-.*")
NOT_NEEDED = re.compile(r"\.shard-\d\.json|latest")


class Disk:
    """What is not safe yet: files whose data, directories whose names are not; what ``leaves`` a step may be its again,
    until that directory is synced."""

    def __init__(self) -> None:
        self.leaves: dict[Path, Path] = {}
        self.data: set[Path] = set()
        self.names: set[Path] = set()
        self.steps: set[Path] = set()

    def follow(self, call: Call) -> str:
        """What would be wrong after a power cut just after this call; "" when nothing would."""
        path = call.path
        if path.parent.name == "told":
            step = f"step-{int(path.name):010d}"
            return "".join(self.unsafe(found) for found in self.steps if found.name == step)
        if call.name == "persisted":
            return self.unsafe(path, its_name=False)
        if path.name.startswith(".latest."):  # then it counts as committed, whatever becomes of the rest
            return "".join(self.unsafe(found) for found in self.steps if found.parent == path.parent)
        if call.name == "fsync":
            self.data.discard(path)
            self.names = {name for name in self.names if name.parent != path}
            self.leaves = {left: where for left, where in self.leaves.items() if where != path}
        elif call.name in ("rename", "exchange"):
            return self.move(path, Path(call.more[0]), call.name == "exchange")
        elif call.name in ("unlink", "rmdir"):
            self.data.discard(path)
            self.names.discard(path)
            if GOING.fullmatch(path.parent.name) and path.parent in self.names:
                return f"{path.parent} may have its name back, without {path.name}"
        elif call.name in ("open", "mkdir", "link", "symlink"):
            self.names.add(path)
            if call.name == "open":
                self.data.add(path)
        elif call.name in ("write", "pwrite", "uring", "fallocate", "ftruncate", "truncate"):
            self.data.add(path)
            if any(path.is_relative_to(left) for left in self.leaves):
                return f"{path} may be a step's again, with other content"
        else:
            assert call.name in ("fchmod", "flock"), call
        return ""

    def move(self, old: Path, new: Path, exchanged: bool) -> str:
        def moved(path: Path) -> Path:
            if path.is_relative_to(old):
                return new / path.relative_to(old)
            return old / path.relative_to(new) if exchanged and path.is_relative_to(new) else path

        leaves = next((where for left, where in self.leaves.items() if old.is_relative_to(left)), None)
        if STEP.fullmatch(old.name) and not STEP.fullmatch(new.name):
            leaves = old.parent
        self.leaves = {moved(path): where for path, where in self.leaves.items()}
        if leaves is not None:
            self.leaves[new] = leaves
        self.data = {moved(path) for path in self.data}
        self.names = {moved(path) for path in self.names} | {new}
        if not STEP.fullmatch(new.name):
            return ""
        self.steps.add(new)
        return self.unsafe(new, its_name=False)

    def unsafe(self, step: Path, its_name: bool = True) -> str:
        """Of what is in a step, and above it."""
        inside = [path for path in self.data | self.names if path.is_relative_to(step) and path != step]
        above = [path for path in [step, *step.parents] if its_name and path in self.names]
        return ", ".join(f"{path} is not safe" for path in inside + above)


def wrong(calls: Sequence[Call]) -> str:
    """The first thing that a power cut could do."""
    disk = Disk()
    for call in calls:
        if why := disk.follow(call):
            return f"{call.name} {call.path}: {why}"
    assert disk.steps
    return ""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_counts_before_all_of_it_is_synced(scenario: str, harmed: Harmed, shm: Path) -> None:
    harmed("record_saves.py", scenario)
    calls = read_log(shm / "log")
    assert wrong(calls) == ""
    made = {call.path for call in calls if call.name == "open"}
    taken = {Path(call.more[0]) for call in calls if call.name == "rename" and call.path.parent.name == ".worn"}
    assert bool(taken - made) == (scenario == "prune")  # else what was to be written over was not there
    changed = {
        path for call in calls if call.name in ("open", "mkdir", "rename") for path in (call.path, call.path.parent)
    }
    for path in {call.path for call in calls if call.name == "fsync"} & changed:
        seen = wrong([call for call in calls if (call.name, call.path) != ("fsync", path)])
        assert seen or NOT_NEEDED.search(path.name), f"without a sync of {path} nothing is wrong"
