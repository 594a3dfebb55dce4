"""A checker with a fault: ``faulty_checker.py FAULT``, or ``FAULT@NODE`` for a fault of that node alone.

``faulty_checker.py FAULT SOCKET``: its probers are forked (forked_probers.py); the fault may be ``none``.
``dead``: ends when it gets an order; ``silent``: stops for ever then; all others are its prober's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from resilio_hpc.diagnose import checker
from resilio_hpc.diagnose.messages import Order

PROBER = str(Path(__file__).with_name("faulty_prober.py"))
FORKED = str(Path(__file__).with_name("forked_probers.py"))


def _plant(fault: str) -> None:
    own = checker.Checker._heard

    def heard(self: Any, message: Any) -> None:
        if isinstance(message, Order):
            if fault == "dead":
                sys.exit("killed by a fault")
            os.kill(os.getpid(), signal.SIGSTOP)
        own(self, message)

    checker.Checker._heard = heard  # type: ignore[method-assign]


if __name__ == "__main__":
    planted, _, node = sys.argv[1].partition("@")
    if node and os.environ.get("SLURMD_NODENAME") != node:
        checker.main()
    own = planted in ("dead", "silent")
    if own:
        _plant(planted)
    if len(sys.argv) > 2 and planted != "no-torch":
        checker.main((sys.executable, "-S", "-E", FORKED, sys.argv[2], "none" if own else planted))
    if own:
        checker.main()
    checker.main((sys.executable, "-P", PROBER, planted))
