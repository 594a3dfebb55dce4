"""A bucket of an S3-compatible store as a store of committed steps. It renames nothing: names are objects of their own.

    run/step-0000000100             a committed step: the name of its data, and its manifest; written last, if missing
    run/.staging-step-…             a save on its way: the name of its data
    run/data/<step>-<random>/       its files: node-0.h5 …, the notes of its writers
    run/.removed-<step>-<random>    these data are to be removed
    run/latest, run/epoch-fence     as in a file system

A commit is one conditional write (``If-None-Match: *``), so a step has one writer, and exists whole or not at all. What
is removed gets its ``.removed-`` object first, then loses its name. A writer looks for that object after its commit, and
a process that removes looks for the commit after it wrote that object: one of the two sees the other. Lists may be
old: steps in them are looked for by name, and so is the step of ``latest``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt.store.backend import EntryKind, Store, StoreEntry
from resilio_hpc.ckpt.store.s3_bucket import Bucket, Object
from resilio_hpc.ckpt.store.s3_files import S3File, S3NewFile, in_parallel
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.core.regular_file import NotRegular

_ENTRY = re.compile(r"step-(\d{10,18})|\.staging-step-(\d{10,18})-.*")
_REMOVED = re.compile(r"\.removed-((\d{10,18})-[0-9a-f]{16})")
_HEADER = re.compile(rb"resilio data ((\d{10,18})-[0-9a-f]{16})\n")
_MANIFEST = "manifest.json"
_POLL_S = 0.5
"""For how long a staging directory is taken to be there, and a note to be missing: both are polled."""
_NO_LIMIT = 1 << 62


class _Place(NamedTuple):
    """``key``: of the directory of checkpoints, ends with "/" where it is not empty; ``entry``: of a step, or ""."""

    key: str
    entry: str
    name: str


class _Entry(NamedTuple):
    """The object of a step's name."""

    data: str
    manifest: bytes
    found: Object


class S3Store(Store):
    """Directories of checkpoints in one bucket. ``prefix``: the path of the store, of which the rest are keys."""

    def __init__(self, bucket: Bucket, prefix: Path, key: str = "") -> None:
        """``key``: where in the bucket ``prefix`` is."""
        self._bucket, self._prefix, self._key = bucket, prefix, key
        self._seen: dict[str, tuple[_Entry, float]] = {}
        self._missing: dict[str, float] = {}
        self._is_checked = False

    # -- names -----------------------------------------------------------------------------------------------------

    def _place(self, path: Path) -> _Place:
        parts = path.relative_to(self._prefix).parts
        at = next((at for at, part in enumerate(parts) if _ENTRY.fullmatch(part)), len(parts))
        root = "/".join(filter(None, [self._key, *parts[:at]]))
        return _Place(f"{root}/" if root else "", *(parts[at : at + 1] or [""]), "/".join(parts[at + 1 :]))

    def _entry(self, place: _Place, is_polled: bool = False) -> _Entry | None:
        """Return what the object of a name says, None where it is missing."""
        key = f"{place.key}{place.entry}"
        before, at = self._seen.get(key, (None, 0.0))
        if before is not None and is_polled and time.monotonic() < at + _POLL_S:
            return before
        self._seen.pop(key, None)
        try:
            data, found = self._bucket.get(key)
        except FileNotFoundError:
            return None
        header = _HEADER.match(data)
        if header is None:
            raise OSError(errno.EBADMSG, "it names no data of a checkpoint", self._url(key))
        entry = _Entry(header[1].decode(), data[header.end() :], found)
        self._seen[key] = entry, time.monotonic()
        return entry

    def _file_key(self, path: Path) -> str:
        """Return the key of a file. Raises FileNotFoundError where its directory is missing."""
        place = self._place(path)
        if not place.entry:
            return place.key[:-1]
        if not place.name:
            raise NotRegular(errno.EINVAL, "it is a directory, not a regular file", str(path))
        entry = self._entry(place, is_polled=True)
        if entry is None:
            raise _missing(path)
        return f"{place.key}data/{entry.data}/{place.name}"

    def _committed_manifest(self, path: Path) -> _Entry | None:
        """Return the entry of a committed step whose manifest this is, else None."""
        place = self._place(path)
        if place.name != _MANIFEST or not place.entry.startswith("step-"):
            return None
        entry = self._entry(place)
        if entry is None:
            raise _missing(path)
        return entry

    def _url(self, key: str) -> str:
        return f"s3://{self._bucket.name}/{key}"

    def names(self, directory: Path) -> list[str]:
        """See Store."""
        place = self._place(directory)
        if place.entry:
            entry = self._entry(place)
            if entry is None:
                raise _missing(directory)
            prefix = f"{place.key}data/{entry.data}/"
            listed = [key[len(prefix) :] for key, _ in self._bucket.list(prefix)]
            return [*listed, *([_MANIFEST] if place.entry.startswith("step-") else [])]
        listed = [key[len(place.key) :] for key, _ in self._bucket.list(place.key, "/")]
        steps = {name for name in listed if name.startswith("step-")} | set(self._latest(place))
        exists = in_parallel(lambda name: self._bucket.head(f"{place.key}{name}") is not None, sorted(steps))
        there = {name for name, is_there in zip(sorted(steps), exists, strict=True) if is_there}
        return [name for name in listed if name and name not in steps] + sorted(there)

    def _latest(self, place: _Place) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            text = self._bucket.get(f"{place.key}latest", 0, 40)[0]
            if text.strip().isdigit():
                yield f"step-{int(text):010d}"

    def look(self, path: Path, follow: bool = False) -> StoreEntry | None:
        """See Store. Above the steps every directory exists: the bucket has none."""
        place = self._place(path)
        if place.entry and not place.name:
            entry = self._entry(place, is_polled=place.entry.startswith("."))
            return None if entry is None else StoreEntry(EntryKind.DIRECTORY, 0, entry.found.changed_ns)
        try:
            if (committed := self._committed_manifest(path)) is not None:
                return StoreEntry(EntryKind.FILE, len(committed.manifest), committed.found.changed_ns)
            key = self._file_key(path)
        except FileNotFoundError:
            return None
        found = self._bucket.head(key) if key else None
        if found is not None:
            return StoreEntry(EntryKind.FILE, found.size_bytes, found.changed_ns)
        return None if place.name or _is_file_name(path.name) else StoreEntry(EntryKind.DIRECTORY, 0, 0)

    # -- files -----------------------------------------------------------------------------------------------------

    def read(self, path: Path, limit: int = -1, follow: bool = True) -> bytes:
        """See Store."""
        if (committed := self._committed_manifest(path)) is not None:
            return committed.manifest if limit < 0 else committed.manifest[:limit]
        is_note = path.name.startswith(".shard-")
        key = self._file_key(path)
        if is_note and time.monotonic() < self._missing.get(key, 0.0):
            raise _missing(path)
        try:
            return self._bucket.get(key, 0, limit)[0]
        except FileNotFoundError:
            if is_note:
                self._missing[key] = time.monotonic() + _POLL_S
            raise

    def open(self, path: Path, follow: bool = True) -> S3File:
        """See Store."""
        key = self._file_key(path)
        found = self._bucket.head(key)
        if found is None:
            raise _missing(path)
        return S3File(self._bucket, key, found)

    def write(self, path: Path, data: bytes, durable: bool = True) -> None:
        """See Store."""
        self._bucket.put(self._file_key(path), data)

    def create(self, path: Path, data: bytes = b"") -> bool:
        """See Store."""
        return self._bucket.put(self._file_key(path), data, former="")

    @contextlib.contextmanager
    def new_file(self, path: Path, mode: int = 0o666, former: Path | None = None) -> Iterator[S3NewFile]:
        """See Store. While it is on its way a small object beside it changes, as a sign of life."""
        key = self._file_key(path)
        head, _, name = key.rpartition("/")
        sign, signed = f"{head}/.uploading-{name}", []

        def tell(sent: int) -> None:
            self._bucket.put(sign, b"%d\n" % sent)
            signed.append(sent)

        file = S3NewFile(self._bucket, key, tell)
        try:
            yield file
            file.finish()
        except BaseException:
            file.give_up()
            raise
        if signed:
            self._bucket.delete(sign)

    # -- directories -----------------------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """See Store. Only that of a save is an object."""
        if self._place(path).entry:
            with contextlib.suppress(FileExistsError):
                self.make_new_directory(path)

    def make_new_directory(self, path: Path) -> None:
        """See Store."""
        place = self._place(path)
        if not place.entry:
            return
        data = f"{_step_of(place.entry)}-{os.urandom(8).hex()}"
        body = f"resilio data {data}\n".encode()
        if not self._bucket.put(f"{place.key}{place.entry}", body, former=""):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._check_conditions(f"{place.key}{place.entry}", body)

    def _check_conditions(self, key: str, body: bytes) -> None:
        """Tell once where the store ignores ``If-None-Match``: that write again must be refused."""
        if not self._is_checked:
            self._is_checked = True
            if self._bucket.put(key, body, former=""):
                print(
                    f"resilio: s3://{self._bucket.name}: this store ignores If-None-Match, so two jobs that write to "
                    "one directory of checkpoints may undo each other's steps",
                    file=sys.stderr, flush=True,
                )  # fmt: skip

    def put_in_place(self, staging: Path, final: Path, check: Callable[[Path], None]) -> None:
        """See Store. Of two writers that commit the same step at once, the second one is refused."""
        here, there = self._place(staging), self._place(final)
        ours = self._entry(here)
        if ours is None:
            raise _missing(staging)
        former = self._entry(there)
        if former is None or former.data != ours.data:
            if former is not None:
                check(final)
            manifest = self._bucket.get(f"{here.key}data/{ours.data}/{_MANIFEST}")[0]
            body = f"resilio data {ours.data}\n".encode() + manifest
            if not self._bucket.put(f"{there.key}{there.entry}", body, former.found.tag if former else ""):
                raise CheckpointError(
                    f"{self._url(there.key)}{there.entry}: another writer committed this step meanwhile; its step stays"
                )
            self._seen.pop(f"{there.key}{there.entry}", None)
            if self._bucket.head(f"{here.key}.removed-{ours.data}") is not None:
                self._bucket.delete(f"{there.key}{there.entry}")
                raise CheckpointError(
                    f"{self._url(here.key)}{here.entry}: another process took this save for dead, and removed it"
                )
            if former is not None:
                self._bucket.put(f"{there.key}.removed-{former.data}", b"")
        self._forget(here)

    def _forget(self, place: _Place) -> None:
        """Remove the object of a name."""
        self._seen.pop(f"{place.key}{place.entry}", None)
        self._bucket.delete(f"{place.key}{place.entry}")

    def move_away(self, path: Path, why: str) -> Path:
        """See Store."""
        place = self._place(path)
        entry = self._entry(place) if place.entry and not place.name else None
        if entry is None:
            return path.with_name(f".removed-{path.name.lstrip('.')}")
        mark = f"{place.key}.removed-{entry.data}"
        is_step = place.entry.startswith("step-")
        if is_step or not self._is_committed(place.key, entry.data):
            self._bucket.put(mark, b"")
            if not is_step and self._is_committed(place.key, entry.data):
                self._bucket.delete(mark)
        self._forget(place)
        return path.with_name(f".removed-{entry.data}")

    def _is_committed(self, key: str, data: str) -> bool:
        """Return whether a step's name is that of these data."""
        step = _Place(key, f"step-{data.partition('-')[0]}", "")
        entry = self._entry(step)
        return entry is not None and entry.data == data

    def is_moved_away(self, name: str) -> bool:
        """See Store."""
        return bool(_REMOVED.fullmatch(name))

    def remove(self, path: Path, ignore_errors: bool = True) -> None:
        """See Store."""
        try:
            self._remove(path)
        except OSError:
            if not ignore_errors:
                raise

    def _remove(self, path: Path) -> None:
        place = self._place(path)
        removed = _REMOVED.fullmatch(path.name)
        if place.entry and not place.name:
            self._remove(self.move_away(path, "removed"))
        elif removed is None:
            with contextlib.suppress(FileNotFoundError):
                self._bucket.delete(self._file_key(path))
        else:
            root = f"{place.key[:-1].rpartition('/')[0]}/".lstrip("/")
            if not self._is_committed(root, removed[1]):
                self._remove_data(f"{root}data/{removed[1]}/")
            self._bucket.delete(f"{root}{path.name}")

    def _remove_data(self, prefix: str) -> None:
        """Abort the uploads, and remove the files. An upload may end between the two."""
        in_parallel(lambda one: self._bucket.abort_upload(*one), self._bucket.uploads(prefix))
        in_parallel(lambda one: self._bucket.delete(one[0]), self._bucket.list(prefix))

    def recycle(self, gone: Path, recycled: Path) -> None:
        """See Store: an object cannot be written over."""

    def sync(self, directory: Path) -> None:
        """See Store: every answer means that it is durable."""

    def refresh(self, directory: Path) -> None:
        """See Store."""
        self._seen.clear()
        self._missing.clear()

    def free_bytes(self, directory: Path) -> int:
        """See Store."""
        return _NO_LIMIT


def _step_of(entry: str) -> str:
    found = _ENTRY.fullmatch(entry)
    assert found
    return found[1] or found[2]


def _is_file_name(name: str) -> bool:
    """Return whether a name above the steps is one of a file: other names are those of directories."""
    return name.startswith(".") or name in ("latest", "epoch-fence", _MANIFEST, "run.json", "damaged")


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
