"""Runs a command to which something is refused: ``python refusing.py WHAT COMMAND…``.

``io_uring``: io_uring_setup(2) fails with EPERM, by a seccomp filter, as in many containers. ``huge_pages``: by
prctl(2). ``port-NUMBER``: another listener has that port.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

_IO_URING_SETUP = 425
_PR_SET_SECCOMP, _MODE_FILTER, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 22, 2, 38, 41
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM = 1


class Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse(call: int) -> None:
    """Let a system call fail in this process and those that it starts."""
    lines = [(_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    program = Filter(len(lines), b"".join(struct.pack("HBBI", *line) for line in lines))
    control(_PR_SET_NO_NEW_PRIVS, 1)
    control(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))


def control(number: int, *words: object) -> None:
    """prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(number, *words, *([0] * (4 - len(words)))) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    what, *command = sys.argv[1:]
    if what == "io_uring":
        refuse(_IO_URING_SETUP)
    elif what == "huge_pages":
        control(_PR_SET_THP_DISABLE, 1)
    elif what.startswith("port-"):
        listener = socket.create_server(("", int(what.removeprefix("port-"))))
        listener.set_inheritable(True)
    else:
        sys.exit(f"nothing is known of {what}")
    os.execvp(command[0], command)
