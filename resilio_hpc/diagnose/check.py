"""A pair check from its request to its result; as a process of its own for callers that cannot wait for it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable

import msgspec

from resilio_hpc.core.errors import HealthError
from resilio_hpc.diagnose.coordinator import CheckCoordinator, Progress, Starter
from resilio_hpc.diagnose.policy import CheckRequest
from resilio_hpc.diagnose.result import CheckResult
from resilio_hpc.diagnose.starters import LocalStarter, SrunStarter


def check(
    request: CheckRequest, progress: Progress = lambda _: None, starter: Callable[[CheckRequest], Starter] | None = None
) -> CheckResult:
    """Pair the nodes; return which are bad or slow. Takes no longer than the policy's budget and a few seconds.

    Raises HealthError where the check cannot begin.
    """
    starts = starter or (LocalStarter if request.place == "local" else SrunStarter)
    host = "127.0.0.1" if request.place == "local" else "*"
    try:
        return CheckCoordinator(request.nodes, request.policy, starts(request), host, progress).run()
    except OSError as error:
        raise HealthError(f"the pair check cannot begin: {error}") from error


def main() -> None:
    """Take a request on standard input; print progress on standard error, the result on standard output.

    All are JSON lines.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the checkers
    request = msgspec.json.decode(sys.stdin.readline(), type=CheckRequest)

    def progress(text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    try:
        result = check(request, progress)
    except HealthError as error:
        sys.exit(str(error))
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
