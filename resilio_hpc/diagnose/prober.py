"""The process that does a pair check's work on a node, for a checker that may end it at any time.

It imports torch once and forks a child for each order, so that whatever an order leaves behind ends with its child, and
the next one begins at once. Orders and values for the process group come on standard input, a line of JSON each;
answers go to standard output: ``ready``; of the child ``phase``, ``put``, ``want``, ``measured``, ``failed``; and
``ended`` with its exit code. SIGUSR1 kills the child.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


class CheckerLink:
    """The checker's end of both pipes. Output of libraries goes to standard error."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._read = b""

    def tell(self, **fields: Any) -> None:
        """Send one line to the checker."""
        data = json.dumps(fields).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]

    def hear(self) -> dict[str, Any]:
        """Return the next line. Ends the process when the checker is gone."""
        while b"\n" not in self._read:
            data = os.read(0, 1 << 16)
            if not data:
                os._exit(0)
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def put(self, key: str, value: bytes) -> None:
        """Store a value for the other half."""
        self.tell(put=key, value=base64.b64encode(value).decode())

    def fetch(self, key: str) -> bytes:
        """Wait for the other half's value."""
        self.tell(want=key)
        while True:
            heard = self.hear()
            if heard.get("key") == key:
                return base64.b64decode(heard["value"])


def main() -> NoReturn:
    """Run the prober, ``prober PARENT THREADS POLICY``, until standard input ends."""
    parent, threads = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    link = CheckerLink()
    import msgspec
    import torch

    from resilio_hpc.diagnose import work  # noqa: F401 - so that children have it
    from resilio_hpc.diagnose.policy import PairPolicy

    policy = msgspec.json.decode(sys.argv[3], type=PairPolicy)
    child = 0
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(child, signal.SIGKILL) if child else None)
    link.tell(ready=True)
    while True:
        order = link.hear()
        if "order" not in order:
            continue  # for a child that has ended
        prober = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            die_with(prober)
            if threads:
                torch.set_num_threads(threads)
            _carry_out(link, order, policy)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # not reaped yet: SIGUSR1 may still be for it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        _, status = os.waitpid(child, 0)
        child = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        link.tell(ended=os.waitstatus_to_exitcode(status))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` dies; end where it is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _carry_out(link: CheckerLink, order: dict[str, Any], policy: Any) -> NoReturn:
    from resilio_hpc.diagnose import work
    from resilio_hpc.diagnose.work import PipeStore

    rank, paired = int(order["rank"]), bool(order["paired"])
    done: dict[str, Any] = {"device": "", "compute": (), "collective": (), "delays": (), "waited": 0.0}
    try:
        link.tell(phase="computing")
        done["device"], done["compute"], done["waited"] = work.compute(policy)
        if paired:
            link.tell(phase="joining", **done)
            group = work.join(PipeStore(link.put, link.fetch), rank, policy)
            link.tell(phase="communicating")
            done["collective"], done["delays"] = work.communicate(group, rank, policy)
    except work.WrongResult as error:
        link.tell(failed="wrong_result", detail=str(error)[:500], **done)
    except Exception as error:  # noqa: BLE001 - whatever the device, driver or network brings up is the finding
        hung = "timed out" in str(error).lower()
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        link.tell(failed="hung" if hung else "failed", detail=detail[:500], **done)
    else:
        link.tell(measured=True, **done)
    os._exit(0)  # torch's process groups may deadlock in their destructors


if __name__ == "__main__":
    main()
