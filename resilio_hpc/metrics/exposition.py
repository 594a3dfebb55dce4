"""Samples for Prometheus: its text, and an HTTP endpoint.

The text is made once per sample, so a scrape reads no device, and many scrapes cost no more than one. The endpoint
takes a few callers at a time, and none for long.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from resilio_hpc.metrics.schema import ALWAYS, METRICS
from resilio_hpc.metrics.sheet import Sheet, neutral

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

MOST_CALLERS = 16
CALLER_S = 5.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
Family = CounterMetricFamily | GaugeMetricFamily


class _Samples(Collector):
    """Samples as prometheus_client takes them. ``sheets``: by the values of the labels that every series has."""

    def __init__(self, sheets: Mapping[tuple[str, ...], Sheet]) -> None:
        self._sheets = sheets

    def collect(self) -> Iterator[Family]:
        """Yield the metrics that have a value."""
        families: dict[str, Family] = {}
        for always, sheet in self._sheets.items():
            for (name, labels), value in sheet.items():
                if name not in families:
                    metric = METRICS[name]
                    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                    families[name] = kind(metric.full_name, metric.help, labels=(*ALWAYS, *metric.labels))
                families[name].add_metric([*always, *labels], value)
        yield from families.values()


def exposition(sheet: Sheet, run_id: str, node: str) -> bytes:
    """Return a sample in Prometheus' text format. Pure."""
    return exposition_of({(run_id, node): sheet})


def exposition_of(sheets: Mapping[tuple[str, str], Sheet]) -> bytes:
    """Return the samples of several runs in Prometheus' text format, by run and node. Pure."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Samples({(neutral(run), neutral(node)): sheet for (run, node), sheet in sheets.items()}))
    return generate_latest(registry)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = MOST_CALLERS

    def __init__(self, address: str, port: int) -> None:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self._room = threading.BoundedSemaphore(MOST_CALLERS)
        super().__init__(where[:2], _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind without a look-up of the host's name, which may hang."""
        self.allow_reuse_address = True
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a caller where there is room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one caller."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of callers that break off."""


class _Handler(WSGIRequestHandler):
    timeout = CALLER_S  # of each read and write

    def address_string(self) -> str:
        """Return the caller's address, without a look-up of its name."""
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of single requests."""


class Endpoint:
    """Serves ``/metrics`` in threads of its own."""

    def __init__(self, address: str, port: int, token: str) -> None:
        """Listen. ``token``: callers must send it as a bearer token; "": they need none. Raises OSError."""
        self.text = b""
        self._token = f"Bearer {token}".encode() if token else b""
        self._server = _Server(address, port)
        self._server.set_app(self._answer)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, name="resilio-metrics", daemon=True).start()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("utf-8", "replace")
        if self._token and not hmac.compare_digest(given, self._token):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
            return []
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            return []
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Length", "0")])
            return []
        text = self.text
        start_response("200 OK", [("Content-Type", _TEXT), ("Content-Length", str(len(text)))])
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [text]

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()
