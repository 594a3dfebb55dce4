"""The child that delivers notifications to one target. If it hangs, its agent kills it (``notify``).

On standard input come JSON lines: first the target, then one object per message; each message is answered with a line,
``{}`` or ``{"error": why}``. No answer holds any part of the target.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from resilio_hpc.core import process_title
from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run
from resilio_hpc.launch.process.process_tree import die_with_parent, outlive_warnings
from resilio_hpc.launch.rundir.notify_targets import Target, parse_target

SEND_TIMEOUT_S = 5.0
ATTEMPTS = 2
RETRY_AFTER_S = 1.0
NICENESS = 10  # ranks that restart come first
VARIABLES = ("event", "text", "run_id", "run_dir", "job", "node", "rank", "verdict", "alert", "severity")


class NotSent(Exception):
    """Raised when a message was not delivered; ``again``: another attempt may succeed."""

    def __init__(self, why: str, again: bool) -> None:
        super().__init__(why)
        self.again = again


def deliver(
    target: Target, message: dict[str, Any], timeout_s: float = SEND_TIMEOUT_S, retry_after_s: float = RETRY_AFTER_S
) -> str:
    """Send a message. Return "", or why it could not be sent. ``timeout_s``: of one attempt."""
    send = {"webhook": _post, "apprise": _by_apprise}.get(target.kind, _run)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            send(target, message, timeout_s)
            return ""
        except NotSent as error:
            if not error.again or attempt == ATTEMPTS:
                return str(error)
        time.sleep(retry_after_s)
    raise AssertionError("unreachable")


def _post(target: Target, message: dict[str, Any], timeout_s: float) -> None:
    """POST the message as JSON. Errors name their kind alone: urllib's texts may repeat the URL."""
    import http.client  # imported here: it takes half of this child's start, and a command does not need it
    import urllib.error
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """Refuses redirects: a redirected POST would become a GET, and seem to succeed."""

        def redirect_request(self, *_arguments: Any) -> None:
            return None

    request = urllib.request.Request(
        target.text, json.dumps(message).encode(), {"Content-Type": "application/json", "User-Agent": "resilio-launch"}
    )
    opener = urllib.request.build_opener(NoRedirect)  # with the proxies of the environment
    try:
        with opener.open(request, timeout=timeout_s) as response:
            response.read(1024)
    except urllib.error.HTTPError as error:
        raise NotSent(f"HTTP status {error.code}", error.code >= 500 or error.code == 429) from None
    except TimeoutError:
        raise NotSent(f"no answer within {timeout_s:g} s", False) from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            raise NotSent(f"no answer within {timeout_s:g} s", False) from None
        why = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
        raise NotSent(why, True) from None
    except (http.client.HTTPException, ValueError) as error:
        raise NotSent(f"not answered as HTTP requires ({type(error).__name__})", False) from None


def _by_apprise(target: Target, message: dict[str, Any], timeout_s: float) -> None:
    """Hand the message to Apprise, which makes the body that the service wants. Its own errors may show the URL."""
    import logging

    try:
        import apprise
    except ImportError:
        raise NotSent("Apprise is missing here: pip install 'resilio_hpc[notify]'", False) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL)
    service = apprise.Apprise.instantiate(target.text, suppress_exceptions=True)
    if service is None:
        raise NotSent("Apprise cannot read the URL", False)
    service.socket_connect_timeout = service.socket_read_timeout = timeout_s
    kind = _APPRISE_KINDS.get(str(message.get("severity") or message.get("event")), "warning")
    text = str(message.get("text", ""))
    title = f"resilio: {message.get('event', 'message')}".replace("_", " ")
    body = "\n".join([text, *(f"{name}: {message[name]}" for name in _TOLD if message.get(name))])
    began = time.monotonic()
    try:
        sent = service.notify(body=body, title=title, notify_type=apprise.NotifyType(kind), body_format="text")
    except (OSError, ValueError, TypeError) as error:
        raise NotSent(f"Apprise failed ({type(error).__name__})", True) from None
    if not sent:
        late = time.monotonic() - began >= timeout_s
        raise NotSent(f"no answer within {timeout_s:g} s" if late else "the service did not take it", not late)


_APPRISE_KINDS = {
    "critical": "failure", "failure": "failure", "node_lost": "failure", "clear": "success", "recovered": "success",
    "joined": "info", "left": "info", "summary": "info",
}  # fmt: skip
_TOLD = ("do", "node", "job", "run_dir")


def _run(target: Target, message: dict[str, Any], timeout_s: float) -> None:
    """Run the command with the message on its standard input."""
    variables = {f"RESILIO_{name.upper()}": str(message[name]) for name in VARIABLES if name in message}
    environment = {key: value for key, value in os.environ.items() if key != "RESILIO_PREDECESSOR"} | variables
    try:
        run(target.argv, timeout_s, env=environment, stdin=json.dumps(message) + "\n")
    except CommandError as error:
        raise NotSent(_command_error(target, error, timeout_s), False) from None
    except BrokenPipeError:  # it ended well, but read nothing
        return
    except ValueError:  # a NUL in the text
        raise NotSent("the message cannot be put into the environment", False) from None


def _command_error(target: Target, error: CommandError, timeout_s: float) -> str:
    """Return how the command ended and its last line, without its own words."""
    if error.returncode is None:
        return str(error).partition(": ")[2] if "cannot start" in str(error) else f"not done in {timeout_s:g} s"
    last = (error.stderr.strip().splitlines() or [""])[-1][:200]
    for word in sorted(target.argv[1:], key=len, reverse=True):
        if len(word) > 3:
            last = last.replace(word, "…")
    return f"exit code {error.returncode}{': ' if last else ''}{last}"


def main() -> int:
    """Serve until standard input ends."""
    process_title.show("sender")
    os.nice(NICENESS)
    die_with_parent(int(sys.argv[1]))
    outlive_warnings()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm may send it to the whole step; the agent decides
    target = parse_target(json.loads(sys.stdin.readline()))
    if sys.argv[2]:
        os.chdir(sys.argv[2])
    for line in sys.stdin:
        error = deliver(target, json.loads(line))
        print(json.dumps({"error": error} if error else {}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
