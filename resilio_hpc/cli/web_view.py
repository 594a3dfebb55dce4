"""``resilio view --web``: the report's page, live, for this machine's browser: read-only, behind a token."""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from resilio_hpc.core import bounded
from resilio_hpc.core.errors import ResilioError, UsageError, os_error_text

HOST = "127.0.0.1"
READ_S = 10.0  # between two pieces of a request
WHOLE_S = 30.0  # for a request and its answer
MAKE_S = 20.0  # for the page: a file system may hang
FRESH_S = 2.0  # a younger page is sent again
MOST_REQUESTS = 16  # at once
_HEADERS = {
    "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip


def serve(path: Path, port: int = 0, every_s: float | None = None) -> int:
    """Serve the page of a run until the command is ended. Raises UsageError where the port is taken."""
    from resilio_hpc.report.overview import find_run, read_identity

    read_identity(find_run(path))  # a mistake is said before anything is served
    try:
        server = PageServer(partial(_made, path, every_s), port)
    except OSError as error:
        raise UsageError(f"--port {port}: {os_error_text(error, 'the port')}: give another one, or none") from None
    print(f"the page of this run, until Ctrl-C: {server.url}", flush=True)
    number = server.server_address[1]
    print(f"from another machine: ssh -L {number}:{HOST}:{number} {socket.gethostname()}", file=sys.stderr, flush=True)
    with server:
        server.serve_forever(poll_interval=0.2)
    return 0


def _made(path: Path, every_s: float | None) -> bytes:
    from resilio_hpc.report.chain.run_report import read_report
    from resilio_hpc.report.page.live_page import EVERY_S, live_page

    return live_page(read_report(path, time.time()), every_s or EVERY_S).encode(errors="replace")


class PageServer(ThreadingHTTPServer):
    """Serves one page at one address. ``make``: returns the page's bytes; called by one request at a time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, make: Callable[[], bytes], port: int = 0, whole_s: float = WHOLE_S, make_s: float = MAKE_S,
        fresh_s: float = FRESH_S,
    ) -> None:  # fmt: skip
        super().__init__((HOST, port), _Handler)
        self._make, self._make_s, self._fresh_s, self.whole_s = make, make_s, fresh_s, whole_s
        self._lock = threading.Lock()
        self._page, self._made_at = b"", float("-inf")
        self._making: Future[bytes] | None = None
        self.token = secrets.token_urlsafe(24)
        self.requests = threading.BoundedSemaphore(MOST_REQUESTS)

    @property
    def url(self) -> str:
        """Return the page's address, with its token."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def page(self) -> bytes:
        """Return the page, made again where it is old. Raises TimeoutError, ResilioError, OSError."""
        if not self._lock.acquire(timeout=self._make_s):
            raise TimeoutError("the page is being made")
        try:
            if time.monotonic() - self._made_at >= self._fresh_s:
                self._making = self._making or bounded.begin(self._make)  # one at a time, be it hung
                wait([self._making], self._make_s)
                if not self._making.done():
                    raise TimeoutError("the run directory does not answer")
                made, self._making = self._making, None
                self._page = made.result()
                self._made_at = time.monotonic()
            return self._page
        finally:
            self._lock.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = READ_S
    server_version = "resilio"
    sys_version = ""

    def handle(self) -> None:
        """Answer one request, within its time."""
        if not self.server.requests.acquire(blocking=False):
            return  # the connection is closed
        late = threading.Timer(self.server.whole_s, partial(_cut, self.connection))
        late.daemon = True
        late.start()
        try:
            self.handle_one_request()
        except OSError:
            return
        finally:
            late.cancel()
            self.server.requests.release()

    def do_GET(self) -> None:
        """Send the page."""
        self._answer(True)

    def do_HEAD(self) -> None:
        """Send the headers of the page."""
        self._answer(False)

    def _answer(self, whole: bool) -> None:
        if not self._is_for_us():
            self._send(404, b"There is nothing here.\n", "text/plain; charset=utf-8", whole)
            return
        try:
            content = self.server.page()
        except TimeoutError:
            self._send(503, b"The run directory does not answer.\n", "text/plain; charset=utf-8", whole)
        except (ResilioError, OSError) as error:
            self._send(503, f"{error}\n".encode(errors="replace"), "text/plain; charset=utf-8", whole)
        else:
            self._send(200, content, "text/html; charset=utf-8", whole)

    def _is_for_us(self) -> bool:
        """Return whether the token is right, and the address is this machine's: another site's name may lead here."""
        port = self.server.server_address[1]
        host = self.headers.get("Host", "")
        wanted = f"/{self.server.token}/".encode()
        right = hmac.compare_digest(self.path.encode(errors="replace"), wanted)
        return right and host in (f"{HOST}:{port}", f"localhost:{port}")

    def _send(self, code: int, content: bytes, kind: str, whole: bool) -> None:
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if whole:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep the terminal quiet."""


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
