"""A bucket of an S3-compatible store as a store of committed steps. It renames nothing: names are objects of their own.

    run/step-0000000100             a committed step: the name of its data, and its manifest; written last, if missing
    run/.staging-step-…             a save on its way: the name of its data
    run/data/<step>-<random>/       its files: node-0.h5 …, the notes of its writers
    run/.removed-<step>-<random>    these data are to be removed
    run/latest, run/epoch-fence     as in a file system

A commit is one conditional write (``If-None-Match: *``), so a step has one writer, and exists whole or not at all. See
``s3_removal`` for the end of a step. Lists may be old: steps in them are looked for by name, and so is the step of
``latest``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.store.backend import EntryKind, Store, StoreEntry
from resilio_hpc.ckpt.store.s3_bucket import S3Bucket
from resilio_hpc.ckpt.store.s3_files import S3File, S3NewFile, in_parallel
from resilio_hpc.ckpt.store.s3_names import MANIFEST, POLL_S, S3Entry, S3Names, S3Place, missing
from resilio_hpc.ckpt.store.s3_removal import REMOVED, S3Removal
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.core.standard_streams import say

_NO_LIMIT = 1 << 62


class S3Store(Store):
    """Directories of checkpoints in one bucket. ``prefix``: the path of the store, of which the rest are keys."""

    def __init__(self, bucket: S3Bucket, prefix: Path, key: str = "") -> None:
        """``key``: where in the bucket ``prefix`` is."""
        self._bucket, self._names = bucket, S3Names(bucket, prefix, key)
        self._removal = S3Removal(bucket, self._names)
        self._missing: dict[str, float] = {}
        self._manifests: dict[str, bytes] = {}  # of saves on their way
        self._is_checked = False

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """See Store. Each takes the way to the store and back: side by side they take it once."""
        return in_parallel(lambda call: call(), calls)

    def _url(self, key: str) -> str:
        return f"s3://{self._bucket.name}/{key}"

    def names(self, directory: Path, steps: bool = True) -> list[str]:
        """See Store."""
        place = self._names.place(directory)
        if place.entry:
            return sorted({*self._files(directory), *([MANIFEST] if place.is_step else [])})

        def listed() -> list[str]:
            return [key[len(place.key) :] for key, _ in self._bucket.listed(f"{place.key}{'' if steps else '.'}", "/")]

        def existing(name: str) -> str:
            return name if self._names.exists(place._replace(entry=name)) else ""

        if not steps:
            return listed()
        known = self._names.steps(place.key)  # which a list may not show yet
        looks = [partial(existing, name) for name in known]
        names, latest, *there = self.together(listed, partial(self._latest, place), *looks)
        new = {name for name in [*names, latest] if name.startswith("step-")}.difference(known)
        there += in_parallel(existing, new)
        return [name for name in names if name and not name.startswith("step-")] + sorted(filter(None, there))

    def _latest(self, place: S3Place) -> str:
        with contextlib.suppress(FileNotFoundError):
            text = self._bucket.get(f"{place.key}latest", 0, 40)[0]
            if text.strip().isdigit():
                return f"step-{int(text):010d}"
        return ""

    def _files(self, directory: Path) -> dict[str, int]:
        """Return the files of a step, or of a save, and their sizes. Raises OSError."""
        place = self._names.place(directory)
        data = self._names.data(place)
        if not data:
            raise missing(directory)
        prefix = f"{place.key}data/{data}/"
        return {key[len(prefix) :]: one.size_bytes for key, one in self._bucket.listed(prefix)}

    def sizes(self, directory: Path, names: Sequence[str], follow: bool = True) -> list[int]:
        """See Store. Of many files, those that a list does not show are looked for by their names."""
        listed: dict[str, int] = {}
        if len(names) > 1:
            with contextlib.suppress(OSError):
                listed = self._files(directory)
        return [listed[name] if name in listed else self.size_of(directory / name) for name in names]

    def look(self, path: Path, follow: bool = False) -> StoreEntry | None:
        """See Store. Above the steps every directory exists: the bucket has none."""
        place = self._names.place(path)
        if place.entry and not place.name:
            entry = self._names.entry(place, 0.0 if place.is_step else POLL_S)
            return None if entry is None else StoreEntry(EntryKind.DIRECTORY, 0, entry.found.changed_ns)
        try:
            if (committed := self._names.manifest(path)) is not None:
                return StoreEntry(EntryKind.FILE, len(committed.manifest), committed.found.changed_ns)
            key = self._names.file_key(path)
        except FileNotFoundError:
            return None
        found = self._bucket.head(key) if key else None
        if found is not None:
            return StoreEntry(EntryKind.FILE, found.size_bytes, found.changed_ns)
        return None if place.name or _is_file_name(path.name) else StoreEntry(EntryKind.DIRECTORY, 0, 0)

    def is_directory(self, path: Path, follow: bool = False) -> bool:
        """See Store. The first use of the bucket says what is wrong with it or with the credentials."""
        if not self._names.place(path).entry and not _is_file_name(path.name):
            return True
        return super().is_directory(path, follow)

    # -- files -----------------------------------------------------------------------------------------------------

    def read(self, path: Path, limit: int = -1, follow: bool = True) -> bytes:
        """See Store."""
        if (committed := self._names.manifest(path)) is not None:
            return committed.manifest if limit < 0 else committed.manifest[:limit]
        is_note = path.name.startswith(".shard-")
        key = self._names.file_key(path)
        if is_note and time.monotonic() < self._missing.get(key, 0.0):
            raise missing(path)
        try:
            return self._bucket.get(key, 0, limit)[0]
        except FileNotFoundError:
            if is_note:
                self._missing[key] = time.monotonic() + POLL_S
            raise

    def open(self, path: Path, follow: bool = True) -> S3File:
        """See Store."""
        key = self._names.file_key(path)
        found = self._bucket.head(key)
        if found is None:
            raise missing(path)
        return S3File(self._bucket, key, found)

    def write(self, path: Path, data: bytes, durable: bool = True) -> None:
        """See Store."""
        place = self._names.place(path)
        if place.name == MANIFEST and not place.is_step:
            self._manifests[place.entry_key] = data  # the commit writes it
        else:
            self._bucket.put(self._names.file_key(path), data)

    def create(self, path: Path, data: bytes = b"") -> bool:
        """See Store."""
        return self._bucket.put(self._names.file_key(path), data, former="")

    @contextlib.contextmanager
    def new_file(self, path: Path, mode: int = 0o666, former: Path | None = None) -> Iterator[S3NewFile]:
        """See Store. While it is on its way a small object beside it changes, as a sign of life."""
        key = self._names.file_key(path)
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
        if self._names.place(path).entry:
            with contextlib.suppress(FileExistsError):
                self.make_new_directory(path)

    def make_new_directory(self, path: Path) -> None:
        """See Store."""
        place = self._names.place(path)
        if not place.entry:
            return
        if not self._names.make(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._check_conditions(place)

    def _check_conditions(self, place: S3Place) -> None:
        """Tell once where the store ignores ``If-None-Match``: that write again must be refused."""
        if not self._is_checked:
            self._is_checked = True
            if self._names.give(place, S3Entry(self._names.data(place), b"twice"), None):
                say(
                    f"s3://{self._bucket.name}: this store ignores If-None-Match, so two jobs that write to "
                    "one directory of checkpoints may undo each other's steps"
                )  # fmt: skip

    def put_in_place(
        self, staging: Path, final: Path, check: Callable[[Path], None], last_look: Callable[[], object] = lambda: None
    ) -> None:
        """See Store. Of two writers that commit the same step at once, the second one is refused."""
        here, there = self._names.place(staging), self._names.place(final)
        former = self._names.last_seen(there)  # one that has changed since then is not replaced
        _, ours = self.together(last_look, partial(self._names.entry, here))
        if ours is None or ours.data != self._names.data(here):
            raise missing(staging)
        if former is None or former.data != ours.data:
            if former is not None:
                check(final)
            manifest = self._manifests.pop(here.entry_key, None)
            if manifest is None:
                raise missing(staging / MANIFEST)
            if not self._names.give(there, ours._replace(manifest=manifest), former):
                raise CheckpointError(
                    f"{self._url(there.key)}{there.entry}: another writer committed this step meanwhile; its step stays"
                )
            if self._removal.was_taken_for_dead(here, ours.data):
                self._removal.mark(here, ours.data)
                self._names.remove(there)
                raise CheckpointError(
                    f"{self._url(here.key)}{here.entry}: another process took this save for dead, and removed it"
                )
            if former is not None:
                self._removal.mark(there, former.data)
        self._names.remove(here)

    def move_away(self, path: Path, why: str) -> Path:
        """See Store."""
        return self._removal.move_away(path)

    def is_moved_away(self, name: str) -> bool:
        """See Store."""
        return bool(REMOVED.fullmatch(name))

    def remove(self, path: Path, ignore_errors: bool = True) -> None:
        """See Store."""
        try:
            self._removal.remove(path)
        except OSError:
            if not ignore_errors:
                raise

    def recycle(self, gone: Path, recycled: Path) -> None:
        """See Store: an object cannot be written over."""

    def sync(self, directory: Path) -> None:
        """See Store: every answer means that it is durable."""

    def refresh(self, directory: Path) -> None:
        """See Store."""
        self._names.forget()
        self._missing.clear()

    def free_bytes(self, directory: Path) -> int:
        """See Store."""
        return _NO_LIMIT

    def check_space(self, directory: Path, size_bytes: int, former: Path | None = None) -> None:
        """See Store: there is no limit."""


def _is_file_name(name: str) -> bool:
    """Return whether a name above the steps is one of a file: other names are those of directories."""
    return name.startswith(".") or name in ("latest", "epoch-fence", MANIFEST, "run.json", "damaged")
