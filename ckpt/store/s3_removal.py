"""Removing steps, and saves on their way, from an object store; and what tells a writer that its save was removed.

What is removed gets its ``.removed-`` object, the mark, first, and then loses its name. A process that removes a save
looks for its commit after both. A writer looks for its own name after its commit. So one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from resilio_hpc.ckpt.store.s3_bucket import S3Bucket
from resilio_hpc.ckpt.store.s3_files import in_parallel
from resilio_hpc.ckpt.store.s3_names import S3Names, S3Place

REMOVED = re.compile(r"\.removed-(\d{10,18}-[0-9a-f]{16})")


class S3Removal:
    """Takes names, and the data that they stand for, away."""

    def __init__(self, bucket: S3Bucket, names: S3Names) -> None:
        """Remove from this bucket."""
        self._bucket, self._names = bucket, names

    def mark(self, place: S3Place, data: str) -> None:
        """Mark data that no name stands for: a later save removes them."""
        self._bucket.put(_mark(place, data), b"")

    def was_taken_for_dead(self, here: S3Place, data: str) -> bool:
        """Return whether a save was taken for dead before its commit, which has just been.

        While its own name is there, a process that removes it looks for the commit once more before it touches a file.
        Later that process takes its mark away, so a writer that was stopped for long finds neither name nor mark. Then
        its files are gone, too, unless the commit was seen.
        """
        own = self._names.entry(here)
        if own is not None and own.data == data:
            return False
        if self._bucket.head(_mark(here, data)) is not None:
            return True
        files = [key for key, _ in self._bucket.listed(f"{here.key}data/{data}/")]
        return not any(in_parallel(self._bucket.head, files))

    def move_away(self, path: Path) -> Path:
        """See Store: let a step, or a save on its way, lose its name at once."""
        place = self._names.place(path)
        entry = self._names.entry(place) if place.entry and not place.name else None
        if entry is None:
            return path.with_name(f".removed-{path.name.lstrip('.')}")
        is_step = place.is_step
        if is_step or not self._names.stands_for(place.key, entry.data):
            self.mark(place, entry.data)
            if not is_step and self._names.stands_for(place.key, entry.data):
                self._bucket.delete(_mark(place, entry.data))
        self._names.remove(place)
        return path.with_name(f".removed-{entry.data}")

    def remove(self, path: Path) -> None:
        """Remove a file, a step, a save on its way, or what one of these left. Raises OSError."""
        place = self._names.place(path)
        removed = REMOVED.fullmatch(path.name)
        if place.entry and not place.name:
            self.remove(self.move_away(path))
        elif removed is None:
            with contextlib.suppress(FileNotFoundError):
                self._bucket.delete(self._names.file_key(path))
        else:
            root = f"{place.key[:-1].rpartition('/')[0]}/".lstrip("/")
            if not self._names.stands_for(root, removed[1]):
                self._remove_data(f"{root}data/{removed[1]}/")
            self._bucket.delete(f"{root}{path.name}")

    def _remove_data(self, prefix: str) -> None:
        """Abort the uploads, and remove the files. An upload may end between the two."""
        in_parallel(lambda one: self._bucket.abort_upload(*one), self._bucket.uploads(prefix))
        in_parallel(lambda one: self._bucket.delete(one[0]), self._bucket.listed(prefix))


def _mark(place: S3Place, data: str) -> str:
    return f"{place.key}.removed-{data}"
