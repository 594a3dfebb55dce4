"""The process that does the work on a node, for a checker that may kill it at any time.

It imports torch once and then takes orders from standard input, a line of JSON each, and answers on standard output:
``ready``, ``phase``, ``put``, ``want``, ``measured``, ``failed``.
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


class Link:
    """The checker's end of both pipes. What libraries print goes to standard error."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)

    def tell(self, **fields: Any) -> None:
        """One line to the checker."""
        data = json.dumps(fields).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]

    def hear(self) -> dict[str, Any]:
        """The next line. Ends the process where the checker has gone."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        heard: dict[str, Any] = json.loads(line)
        return heard

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for the other half."""
        self.tell(put=key, value=base64.b64encode(value).decode())

    def fetch(self, key: str) -> bytes:
        """Wait for the other half's value."""
        self.tell(want=key)
        while True:
            heard = self.hear()
            if heard.get("key") == key:
                return base64.b64decode(heard["value"])


def main() -> NoReturn:
    """``prober PARENT THREADS POLICY``: work until standard input ends."""
    parent, threads = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    link = Link()
    import msgspec

    from resilio_hpc.diagnose.policy import PairPolicy

    policy = msgspec.json.decode(sys.argv[3], type=PairPolicy)
    import torch

    if threads:
        torch.set_num_threads(threads)
    from resilio_hpc.diagnose import work

    link.tell(ready=work.name_of(work.devices()[0]))
    while True:
        _carry_out(link, link.hear(), policy)


def _carry_out(link: Link, order: dict[str, Any], policy: Any) -> None:
    from resilio_hpc.diagnose import work
    from resilio_hpc.diagnose.pipe_store import PipeStore

    if "order" not in order:
        return
    rank, paired = int(order["rank"]), bool(order["paired"])
    done: dict[str, Any] = {"device": "", "compute": (), "collective": ()}
    try:
        link.tell(phase="computing")
        done["device"], done["compute"] = work.compute(policy)
        if paired:
            link.tell(phase="joining", **done)
            group = work.join(PipeStore(link.put, link.fetch), rank, policy)
            link.tell(phase="communicating")
            done["collective"] = work.communicate(group, rank, policy)
    except work.WrongResult as error:
        link.tell(failed="wrong_result", detail=str(error)[:500], **done)
    except Exception as error:  # noqa: BLE001 - whatever the device, driver or network brings up is the finding
        hung = "timed out" in str(error).lower()
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        link.tell(failed="hung" if hung else "failed", detail=detail[:500], **done)
    else:
        link.tell(measured=True, **done)


if __name__ == "__main__":
    main()
