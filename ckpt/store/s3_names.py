"""Names in an object store: what a path means there, and which data a step's name stands for. See ``s3_store``."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt.store.s3_bucket import Object, S3Bucket
from resilio_hpc.core.regular_file import NotRegular

MANIFEST = "manifest.json"
_ENTRY = re.compile(r"step-(\d{10,18})|\.staging-step-(\d{10,18})-.*")
_HEADER = re.compile(rb"resilio data (\d{10,18}-[0-9a-f]{16})\n")
POLL_S = 0.5
"""For how long a name is taken to say the same to calls that poll it, or that ask for a file behind it."""


class S3Place(NamedTuple):
    """Where a path is. ``key``: of the directory of checkpoints, ends with "/" where it is not empty.

    ``entry``: the name of a step, or of a save on its way, or "". ``name``: of a file in it, or "".
    """

    key: str
    entry: str
    name: str

    @property
    def entry_key(self) -> str:
        """The key of the object with the entry's name."""
        return f"{self.key}{self.entry}"

    @property
    def is_step(self) -> bool:
        """Whether it is a committed step, or in one."""
        return self.entry.startswith("step-")


class S3Entry(NamedTuple):
    """What the object of a name says: the name of its data, and for a committed step its manifest."""

    data: str
    manifest: bytes = b""
    found: Object = Object(0, 0, "")

    def content(self) -> bytes:
        """Return the object's content."""
        return b"resilio data %s\n%s" % (self.data.encode(), self.manifest)


class S3Names:
    """The names of one store: ``prefix`` is the path of what has the key ``key``."""

    def __init__(self, bucket: S3Bucket, prefix: Path, key: str) -> None:
        """Look at nothing yet."""
        self._bucket, self._prefix, self._key = bucket, prefix, key
        self._seen: dict[str, tuple[S3Entry | None, float]] = {}
        self._made: dict[str, str] = {}
        self._steps: set[str] = set()

    def place(self, path: Path) -> S3Place:
        """Return where a path is."""
        parts = path.relative_to(self._prefix).parts
        at = next((at for at, part in enumerate(parts) if _ENTRY.fullmatch(part)), len(parts))
        root = "/".join(filter(None, [self._key, *parts[:at]]))
        return S3Place(f"{root}/" if root else "", "".join(parts[at : at + 1]), "/".join(parts[at + 1 :]))

    def entry(self, place: S3Place, age_s: float = 0.0) -> S3Entry | None:
        """Return what a name says, None where it is missing. ``age_s``: what it said may be as old as this."""
        key = place.entry_key
        before, at = self._seen.get(key, (None, 0.0))
        if before is not None and time.monotonic() < at + age_s:
            return before
        self._seen.pop(key, None)
        try:
            data, found = self._bucket.get(key)
        except FileNotFoundError:
            self._steps.discard(key)
            self._seen[key] = None, time.monotonic()
            return None
        if place.is_step:
            self._steps.add(key)
        header = _HEADER.match(data)
        if header is None:
            raise OSError(errno.EBADMSG, "it names no data of a checkpoint", f"s3://{self._bucket.name}/{key}")
        entry = S3Entry(header[1].decode(), data[header.end() :], found)
        self._seen[key] = entry, time.monotonic()
        return entry

    def last_seen(self, place: S3Place) -> S3Entry | None:
        """Return what a name said when it was last looked at, None where it was missing."""
        if place.entry_key not in self._seen:
            return self.entry(place)
        return self._seen[place.entry_key][0]

    def data(self, place: S3Place) -> str:
        """Return the name of the data that a name stands for, "" where it is missing.

        A save on its way that this process began is not looked at: ``put_in_place`` does that.
        """
        if made := self._made.get(place.entry_key):
            return made
        entry = self.entry(place, POLL_S)
        return "" if entry is None else entry.data

    def make(self, place: S3Place) -> bool:
        """Begin a save: make its name; return False where it exists."""
        data = f"{step_of(place.entry)}-{os.urandom(8).hex()}"
        self._made.pop(place.entry_key, None)
        if not self.give(place, S3Entry(data), None):
            return False
        self._made[place.entry_key] = data
        return True

    def give(self, place: S3Place, entry: S3Entry, former: S3Entry | None) -> bool:
        """Let a name say this, where it says what ``former`` does; return False where it does not.

        A write may be repeated after its answer was lost, here or by a proxy, and then be refused. So what is there is
        compared: the names of data are random.
        """
        self._seen.pop(place.entry_key, None)
        if not self._bucket.put(place.entry_key, entry.content(), former.found.tag if former else ""):
            found = self.entry(place)
            return found is not None and found.content() == entry.content()
        if place.is_step:
            self._steps.add(place.entry_key)
        return True

    def exists(self, place: S3Place) -> bool:
        """Return whether a name exists. What it says is asked for, too, unless it is known: next it is wanted."""
        key = place.entry_key
        before = self._seen.get(key, (None, 0.0))[0]
        if before is None:
            try:
                return self.entry(place) is not None
            except OSError as error:
                if error.errno != errno.EBADMSG:
                    raise
                return True
        found = self._bucket.head(key)
        if found is not None and before.found.tag == found.tag:
            self._seen[key] = before, time.monotonic()
        else:
            self._seen.pop(key, None)
        if found is None:
            self._steps.discard(key)
        return found is not None

    def steps(self, key: str) -> list[str]:
        """Return the names of the steps below ``key`` that were there when they were last looked for."""
        return [known[len(key) :] for known in list(self._steps) if known.startswith(f"{key}step-")]

    def file_key(self, path: Path) -> str:
        """Return the key of a file. Raises FileNotFoundError where its directory is missing."""
        place = self.place(path)
        if not place.entry:
            return place.key[:-1]
        if not place.name:
            raise NotRegular(errno.EINVAL, "it is a directory, not a regular file", str(path))
        data = self.data(place)
        if not data:
            raise missing(path)
        return f"{place.key}data/{data}/{place.name}"

    def manifest(self, path: Path) -> S3Entry | None:
        """Return the entry of the committed step whose manifest this is; None for another file."""
        place = self.place(path)
        if place.name != MANIFEST or not place.is_step:
            return None
        entry = self.entry(place, POLL_S)
        if entry is None:
            raise missing(path)
        return entry

    def stands_for(self, key: str, data: str) -> bool:
        """Return whether the name of a committed step below ``key`` stands for these data."""
        entry = self.entry(S3Place(key, f"step-{data.partition('-')[0]}", ""))
        return entry is not None and entry.data == data

    def remove(self, place: S3Place) -> None:
        """Remove a name."""
        self._steps.discard(place.entry_key)
        self._seen.pop(place.entry_key, None)
        self._made.pop(place.entry_key, None)
        self._bucket.delete(place.entry_key)

    def forget(self) -> None:
        """Ask for every name again."""
        self._seen.clear()
        self._made.clear()


def step_of(entry: str) -> str:
    """Return the number of the step in an entry's name, as it is written there."""
    found = _ENTRY.fullmatch(entry)
    assert found
    return found[1] or found[2]


def missing(path: Path) -> FileNotFoundError:
    """Return the error of a name that does not exist."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
