"""Probers that are forked from one process, which has imported torch: a node of a test then starts at once.

python forked_probers.py SOCKET                                        the process that forks; prints a line when ready
python forked_probers.py SOCKET FAULT PARENT THREADS POLICY            stands for a prober, as a checker starts it

The stand-in hands its outputs over, passes its input and SIGUSR1 on, and ends as the prober does. A stand-in that is
killed takes the prober with it. The input goes through it so that a signal cannot come after an order that was sent
later: it would end the wrong child.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

_LARGEST = 1 << 20


def stand_in(path: str, fault: str, threads: str, policy: str) -> NoReturn:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(path)
    wish = {"fault": fault, "threads": threads, "policy": policy, "environment": dict(os.environ)}
    theirs, ours = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    socket.send_fds(link, [json.dumps(wish).encode()], [theirs, 1, 2])
    pid = int(link.recv(_LARGEST))
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(pid, number))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    os.close(theirs)
    os.closerange(1, 3)  # the checker is to see when the prober closes them
    awaited: list[Any] = [link, 0]
    while link not in (ready := select.select(awaited, [], [])[0]):
        data = os.read(0, _LARGEST) if ready else b""
        if not data:
            awaited.remove(0)
            os.close(ours)
        else:
            with contextlib.suppress(BrokenPipeError):  # it is dead: the link tells
                os.write(ours, data)
    status = link.recv(_LARGEST)
    os._exit(os.waitstatus_to_exitcode(int(status)) & 0xFF if status else 1)


def serve(path: str) -> NoReturn:
    import torch  # noqa: F401

    from resilio_hpc.diagnose import prober, work  # noqa: F401

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)  # the test has ended
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keep(link)
        link.close()


def keep(link: socket.socket) -> NoReturn:
    """Fork a prober and wait until it ends, or is wanted no more."""
    wish, pipes, _, _ = socket.recv_fds(link, _LARGEST, 3)
    pid = os.fork()
    if pid == 0:
        link.close()
        os.setsid()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
            os.close(pipe)
        be_a_prober(json.loads(wish))
    for pipe in (0, 1, 2, *pipes):
        os.close(pipe)
    link.send(str(pid).encode())
    if link in select.select([link, os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    try:
        link.send(str(status).encode(), socket.MSG_NOSIGNAL)
    finally:
        os._exit(0)


def be_a_prober(wish: dict[str, Any]) -> NoReturn:
    from resilio_hpc.diagnose import prober
    from tests.support.diagnose.faulty_prober import plant

    os.environ.update(wish["environment"])
    try:
        plant(wish["fault"])
        sys.argv = ["prober", str(os.getppid()), wish["threads"], wish["policy"]]
        prober.main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    stand_in(sys.argv[1], sys.argv[2], sys.argv[4], sys.argv[5])
