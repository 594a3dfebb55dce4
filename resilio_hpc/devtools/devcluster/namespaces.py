"""The few Linux calls that Python 3.11 lacks: namespaces, mounts, network links. Linux only; errors are OSError.

Sources: unshare(2), mount(2), pivot_root(2), netdevice(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

NEW_MOUNT = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_PID = 0x20000000
NEW_NETWORK = 0x40000000

_MS_RDONLY = 1
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2

_SIOCSIFFLAGS = 0x8914
_SIOCGIFFLAGS = 0x8913
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def stay_on_one_cpu(number: int) -> None:
    """Keep this process, and its later children, on one CPU: the ``number``-th that it may use, round and round.

    Linux 6.18 numbers namespaces per CPU, and binds a mount namespace (/proc/PID/ns/mnt), as job_container/tmpfs does,
    only inside one with a lower number: else EINVAL, seen where the two were made on different CPUs.
    """
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {usable[number % len(usable)]})


def unshare(flags: int) -> None:
    """Give this process its own namespaces; NEW_PID takes effect for its next child."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    encoded = name.encode()
    _check(_libc.sethostname(encoded, len(encoded)), f"sethostname {name}")


def make_mounts_private() -> None:
    """Keep mounts made here out of the parent namespace."""
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")


def mount(kind: str, target: Path, options: str = "") -> None:
    """Mount a file system that needs no device (``tmpfs``, ``proc``, ``sysfs``, ``devpts``, ``overlay``)."""
    target.mkdir(parents=True, exist_ok=True)
    result = _libc.mount(kind.encode(), os.fsencode(target), kind.encode(), 0, options.encode())
    _check(result, f"mount {kind} on {target}")


def bind(source: Path, target: Path) -> None:
    """Show ``source`` (file, directory, device) at ``target`` too, with whatever is mounted below it."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    result = _libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
    _check(result, f"bind {source} on {target}")


def make_root(new_root: Path) -> None:
    """Make ``new_root`` (a mount point) the root directory of this mount namespace and drop the old one."""
    os.chdir(new_root)
    if _libc.pivot_root(b".", b".") == 0:  # puts the old root over the new one, from where it is detached
        _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
        os.chdir("/")
    else:  # inside a plain chroot the old root is no mount point, and pivot_root refuses
        os.chroot(".")
        os.chdir("/")


def set_link(name: str, up: bool) -> None:
    """Switch a network interface of this network namespace on or off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", name.encode(), 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(handle, _SIOCGIFFLAGS, request), 16)
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags))


def set_address(name: str, address: str, netmask: str) -> None:
    """Give a network interface of this network namespace its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for operation, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, netmask)):
            packed = struct.pack("16sH2x4s8x", name.encode(), socket.AF_INET, socket.inet_aton(value))
            fcntl.ioctl(handle, operation, packed)
