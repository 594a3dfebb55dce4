"""A webhook's other end, for tests of notifications."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Server:
    """An HTTP server on this machine that answers with the next of ``statuses`` (the last one again and again)."""

    def __init__(self, *statuses: int) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        left = list(statuses)
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.append((self.path, body))
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                received.append((f"GET {self.path}", {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: Any) -> None:
                """Nothing on the test's output."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/SECRET"
        threading.Thread(target=lambda: self.server.serve_forever(0.01), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
