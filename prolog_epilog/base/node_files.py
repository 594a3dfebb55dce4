"""The files of a node below any root, for fetchers; a captured tree works like /."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from resilio_hpc.prolog_epilog.base.check import Unreadable
from resilio_hpc.prolog_epilog.base.isolated import Mark

_MOST_BYTES = 4 << 20
_MOST_NAMES = 100_000
_MOST_LINKS = 40  # the kernel's limit


class NodeFiles:
    """Reads below ``root``. Every path is marked before it is touched. Never blocks on a named pipe."""

    def __init__(self, root: Path = Path("/"), mark: Mark = lambda _: None) -> None:
        self.root = root
        self._mark = mark

    def path(self, name: str) -> Path:
        """Return the path of a file of the node, and mark it."""
        self._mark(name)
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's content. Raises Unreadable, also where it is missing."""
        content = self.optional(name)
        if content is None:
            raise Unreadable(f"{name} is not there")
        return content

    def optional(self, name: str) -> str | None:
        """Return a file's content; None where it is missing.

        Raises Unreadable where it exists and cannot be read.
        """
        path = self.path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Unreadable(f"{name}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Unreadable(f"{name} is no regular file")
            content = _read(fd)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.ENODEV):  # a process that ended, a device that was removed
                return None
            raise Unreadable(f"{name}: {error.strerror}") from error
        finally:
            os.close(fd)
        if len(content) > _MOST_BYTES:
            raise Unreadable(f"{name} has more than {_MOST_BYTES} bytes")
        return content.decode(errors="replace")

    def number(self, name: str) -> int:
        """Return the whole number in a file, decimal or 0x…. Raises Unreadable."""
        return whole_number(self.text(name), name)

    def number_or_why(self, name: str) -> int | Unreadable:
        """Return the number in a file, or why it cannot be read: for one of many counters."""
        try:
            return self.number(name)
        except Unreadable as error:
            return error

    def optional_number(self, name: str) -> int | None:
        """Return the number; None where the file is missing, or has no value (sysfs answers EINVAL).

        Raises Unreadable.
        """
        try:
            text = self.optional(name)
        except Unreadable as error:
            if no_value(error):
                return None
            raise
        return None if text is None else whole_number(text, name)

    def names(self, name: str, pattern: str = "") -> list[str]:
        """Return the sorted names in a directory that match ``pattern`` wholly; none where the directory is missing."""
        path = self.path(name)
        try:
            found = sorted(os.listdir(path))  # noqa: PTH208 - names alone
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise Unreadable(f"{name}: {error.strerror}") from error
        if len(found) > _MOST_NAMES:
            raise Unreadable(f"{name} has more than {_MOST_NAMES} names")
        return [one for one in found if not pattern or re.fullmatch(pattern, one)]

    def real(self, name: str) -> str:
        """Return the target of a path, with links followed below ``root``. An unreadable part is taken unchanged."""
        done, left, links = "", name.split("/"), 0
        while left:
            part = left.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            try:
                target = str(self.path(f"{done}/{part}").readlink())
            except OSError:
                done = f"{done}/{part}"
                continue
            links += 1
            if links > _MOST_LINKS:
                return name
            done = "" if target.startswith("/") else done
            left = [*target.split("/"), *left]
        return done or "/"

    def exists(self, name: str) -> bool:
        """Return whether it exists, as a link without target too, which a captured tree may have."""
        return os.path.lexists(self.path(name))


def no_value(error: Unreadable) -> bool:
    """Return whether sysfs says that there is no value."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def whole_number(text: str, name: str) -> int:
    """Return the number in a text. Raises Unreadable, which names the place. Pure."""
    word = text.strip()
    if re.fullmatch(r"-?\d{1,20}", word, re.ASCII):
        return int(word)
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", word):
        return int(word, 16)
    raise Unreadable(f"{name}: no number: {word[:40]!r}")


def _read(fd: int) -> bytes:
    content = bytearray()
    while len(content) <= _MOST_BYTES:
        data = os.read(fd, 65536)
        if not data:
            break
        content += data
    return bytes(content)
