"""The commands' connection to the rack: start it, ask it, see the processes of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import resilio_hpc
from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.devtools.devcluster.messages import MachineState, Reply, Request
from resilio_hpc.devtools.devcluster.spec import ClusterPaths

_REQUEST_TIMEOUT_S = 15.0
_START_TIMEOUT_S = 60.0  # a new interpreter, on a machine that may be busy
_POLL_S = 0.01


def ask(layout: ClusterPaths, action: str, machine: str = "") -> list[MachineState]:
    """Send one request to the rack and return its machines; raises SlurmError when refused or without a rack."""
    request = msgspec.convert({"action": action, "machine": machine}, Request)
    directory = os.open(layout.state, os.O_RDONLY | os.O_DIRECTORY) if layout.state.is_dir() else -1
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_REQUEST_TIMEOUT_S)
            connection.connect(f"/proc/self/fd/{directory}/{layout.control.name}")  # paths are limited to 107 bytes
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = connection.makefile("rb").readline()
    except TimeoutError:
        raise SlurmError(f"dev cluster {layout.state.name}: no answer within {_REQUEST_TIMEOUT_S:g} s") from None
    except OSError:
        raise SlurmError(f"dev cluster {layout.state.name} is not up; start it with: resilio devcluster up") from None
    finally:
        if directory >= 0:
            os.close(directory)
    if not line:  # only ``stop`` ends without an answer
        return []
    reply = msgspec.json.decode(line, type=Reply)
    if reply.error:
        raise SlurmError(reply.error)
    return reply.machines


@contextlib.contextmanager
def claimed(layout: ClusterPaths, wait_s: float = 0.0) -> Iterator[int]:
    """Own a cluster's name: yield the lock's descriptor; raises UsageError while a rack or a command holds it."""
    layout.state.mkdir(parents=True, exist_ok=True)
    layout.state.chmod(0o711)
    deadline = time.monotonic() + wait_s
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    name = layout.state.name
                    raise UsageError(
                        f"dev cluster {name} is already up (or just starting); end it with: "
                        f"resilio devcluster down --name {name}"
                    ) from None
                time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def sweep(layout: ClusterPaths) -> None:
    """Remove a claimed cluster's files, whatever left them; its processes and mounts died with its rack."""
    for entry in layout.state.iterdir() if layout.state.is_dir() else ():
        if entry == layout.lock:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def start_rack(layout: ClusterPaths, lock: int) -> socket.socket:
    """Start the rack, which keeps ``lock`` held; return the leash: send ``keep`` or close it."""
    leash, theirs = socket.socketpair()
    project = str(Path(resilio_hpc.__file__).parent.parent)
    search = os.pathsep.join([project, *filter(None, [os.environ.get("PYTHONPATH")])])
    with theirs, layout.rack_log.open("ab") as log:
        command = [
            sys.executable,
            "-m",
            "resilio_hpc.devtools.devcluster.rack",
            str(layout.state),
            str(theirs.fileno()),
        ]
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": search},
            pass_fds=(theirs.fileno(), lock),
        )
    leash.settimeout(_START_TIMEOUT_S)
    try:
        answer = leash.recv(4096).decode(errors="replace").strip()
    except TimeoutError:
        answer = f"no answer within {_START_TIMEOUT_S:g} s"
    starter.wait(timeout=_START_TIMEOUT_S)
    if answer != "started":
        leash.close()
        lines = layout.rack_log.read_text(errors="replace").strip().splitlines()
        raise SlurmError(f"dev cluster {layout.state.name} did not start: {answer or (lines or ['it died'])[-1]}")
    return leash
